"""Damage to the bytes of a checkpoint on the disk."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from stabil.testing.inject._fault import Fault, due, runs_through
from stabil.testing.inject._places import listed


def checkpoint(
    schedule: Sequence[Fault], step: int, folder: str | os.PathLike[str]
) -> tuple[pathlib.Path, ...]:
    """Damages files below `folder` with the faults that strike `checkpoint` at `step`.

    Each fault strikes one file that its `where` meets, drawn by its seed and the step:
    `bit_flip` flips one bit of `entries` bytes (one if 0), `truncate` leaves the share
    `size` of the file (half if None), `remove` deletes it.

    Args:
      schedule: the planted faults; those of other places are ignored.
      step: a Python integer.
      folder: of one checkpoint, which must be written to its end: for a
        `stabil.checkpoints.Keeper` its `directory / str(step)`, after `wait()`.

    Returns:
      The files that were struck.

    Raises:
      ValueError: `where` meets no file with a byte in it, or a size out of range.

    Examples:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights"
      >>> _ = path.write_bytes(bytes(100))
      >>> fault = Fault(kind="truncate", place="checkpoint", step=4, size=0.25)
      >>> _ = checkpoint((fault,), 4, path.parent)
      >>> path.stat().st_size
      25
    """
    root, struck = pathlib.Path(folder), []
    for fault in due(schedule, step, "checkpoint"):
        draw = np.random.default_rng((fault.seed, step))
        path = _file(fault, root, draw)
        raw = bytearray(path.read_bytes())
        if fault.kind == "remove":
            path.unlink()
        elif fault.kind == "truncate":
            path.write_bytes(raw[: int(len(raw) * _share(fault))])
        else:
            number = min(max(fault.entries, 1), len(raw))
            for at in draw.choice(len(raw), number, replace=False):
                raw[at] ^= 1 << int(draw.integers(8))
            path.write_bytes(raw)
        struck.append(path)
    return tuple(struck)


def _file(fault: Fault, root: pathlib.Path, draw: np.random.Generator) -> pathlib.Path:
    names = sorted(
        p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()
    )
    met = [
        name
        for name in names
        if runs_through(fault.where, name) and (root / name).stat().st_size
    ]
    if not met:
        raise ValueError(
            f"needed a file below {root} whose path holds {fault.where!r} and that is "
            f"not empty, got none; the files are {listed(names)}"
        )
    return root / met[int(draw.integers(len(met)))]


def _share(fault: Fault) -> float:
    share = 0.5 if fault.size is None else fault.size
    if not 0 <= share < 1:
        raise ValueError(
            f"needed 0 <= size < 1, the share of the file that truncate leaves, got "
            f"{share}"
        )
    return share
