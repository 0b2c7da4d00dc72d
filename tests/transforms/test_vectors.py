"""Every recorded run of other people's code in a folder, replayed step by step.

The folder is `tests/vectors`, or the one that the environment variable
`STABIL_VECTORS` names. A file whose method nobody knows fails.
"""

from __future__ import annotations

import pytest
import vectors_clipping
import vectors_optimizers
from vectors_tools import FOLDER, Document, load

READERS = {**vectors_clipping.READERS, **vectors_optimizers.READERS}

# Files that record no run of a method of stabil.transforms, and why.
NOT_A_METHOD = {
    "gradients that other files refer to": lambda d: "variants" in d and "w" in d,
    "numbers read from a public training log": lambda d: (
        "BLOOM" in d.get("description", "")
    ),
    "layer repair, a matter of stabil.checkpoints": lambda d: (
        "gensyn-ai/CheckFree" in str(d.get("code"))
    ),
    "spike score of a finished curve, a matter of stabil.curves": lambda d: (
        "counts" in d and "evaluated" in d
    ),
    "spike share of a log, a matter of stabil.curves": lambda d: (
        "StabilityMonitor" in str(d.get("object"))
    ),
}


def reasons(doc: Document) -> list[str]:
    return [why for why, fits in NOT_A_METHOD.items() if fits(doc)]


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("*.json")))
def test_recorded_run_is_reproduced(name: str) -> None:
    doc = load(name)
    runners = [run for fits, run in READERS.items() if fits(doc)]
    if reasons(doc):
        assert not runners, f"{name}: a reader exists, so strike it off NOT_A_METHOD"
        return
    assert len(runners) == 1, (
        f"{name}: needed one reader of vectors_clipping or vectors_optimizers, got "
        f"{len(runners)}: add one, or a line to NOT_A_METHOD with the reason"
    )
    runners[0](doc)


def test_folder_holds_files() -> None:
    assert any(FOLDER.glob("*.json")), f"no vector file in {FOLDER}"
