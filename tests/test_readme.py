"""The README's Python blocks run, one after the other, as a reader would type them."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_blocks_run(standard_promotion, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    namespace = {"__name__": "readme"}
    for i, block in enumerate(blocks):
        exec(compile(block, f"README block {i}", "exec"), namespace)
    assert "BLOCK activations/hidden" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "LICENSE",
        "CHANGELOG.md",
        "docs/checkpoints.md",
        "docs/judging.md",
        "docs/faults.md",
        "docs/methods.md",
        "docs/probing.md",
        "docs/running.md",
    ],
)
def test_files_that_it_names_exist(name):
    assert name in README.read_text() or name == "LICENSE"
    assert (README.parent / name).is_file()
