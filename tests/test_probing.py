"""The blocks of `docs/probing.md` run, one after the other, as a reader would type."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "probing.md"


def test_blocks_run(standard_promotion, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    namespace = {"__name__": "probing"}
    for i, block in enumerate(blocks):
        exec(compile(block, f"docs/probing.md block {i}", "exec"), namespace)
    told = capsys.readouterr().out
    assert "('block_0', 'block_1', 'norm')" in told
    assert re.search(r"block_1: largest at position \d+, channel \d+", told)
    assert re.search(r"the busiest expert of layer 1 has \d+% of the tokens", told)
