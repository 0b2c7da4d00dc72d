"""What changed between two steps: leaves, and what is said about them."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from stabil.checkpoints import _manifest, _offline
from stabil.checkpoints._folder import QUARANTINE, Folder

_CHUNK = 1 << 20


class LeafDifference(NamedTuple):
    """A leaf that is not the same in two steps.

    Attributes:
      name: its slash path.
      before: dtype and shape in the first step; empty where it has no such leaf.
      after: the same of the second step.
      entries: entries that differ; 0 where the forms differ and none is compared.
      size: entries of the leaf.
      largest: largest absolute difference; NaN where it is not a number.
      relative: norm of the difference by norm of the first; NaN where either is not
        finite, infinite where the first is zero.
      nonfinite: entries of the second that are NaN or infinite.
    """

    name: str
    before: str
    after: str
    entries: int
    size: int
    largest: float
    relative: float
    nonfinite: int


class Difference(NamedTuple):
    """What `diff` found.

    Attributes:
      leaves: the leaves that differ, in the order of the first step.
      same: leaves that do not.
      metadata: tag, versions, configuration and extra that differ, for people.
    """

    leaves: tuple[LeafDifference, ...]
    same: int
    metadata: tuple[str, ...]


def diff(directory: str | os.PathLike[str], a: int, b: int) -> Difference:
    """Compares two steps of a run, also quarantined ones; needs no model.

    Arrays are read only where digests differ, and are checked. Needs memory for two
    states.

    Args:
      directory: a folder that a `Keeper` made.
      a: a step, taken as the first.
      b: another step.
    Raises:
      NotARunFolderError: the folder is something else.
      DamagedError: one of the steps is damaged.
      ValueError: there is no such step.
    """
    folder = Folder(directory)
    places = [_place(folder, step) for step in (a, b)]
    old, new = (folder.manifest_at(place) for place in places)
    metadata = _metadata(folder, places, old, new)
    rows = [{tuple(r["path"]): r for r in m["leaves"]} for m in (old, new)]
    alike = [p for p, row in rows[0].items() if row == rows[1].get(p)]
    if len(alike) == len(rows[0]) == len(rows[1]):
        return Difference((), len(alike), metadata)
    states = [
        _offline.read_plain(place, m)
        for place, m in zip(places, (old, new), strict=True)
    ]
    found = []
    for path in [*rows[0], *(p for p in rows[1] if p not in rows[0])]:
        if path not in alike:
            found.append(
                _compare(
                    "/".join(path),
                    *(
                        [r.get(path), s.get(path)]
                        for r, s in zip(rows, states, strict=True)
                    ),
                )
            )
    return Difference(tuple(found), len(alike), metadata)


def _place(folder: Folder, step: int) -> pathlib.Path:
    if step in folder.steps():
        return folder.path(step)
    batches = [batch for batch, s in folder.quarantined() if s == step]
    if batches:
        return folder.root / QUARANTINE / batches[-1] / str(step)
    raise ValueError(_offline.no_such_step(folder, step))


def _metadata(
    folder: Folder,
    places: list[pathlib.Path],
    old: dict[str, Any],
    new: dict[str, Any],
) -> tuple[str, ...]:
    tags = [
        folder.health(int(p.name))["tag"] if p.parent == folder.root else "quarantined"
        for p in places
    ]
    found = [("tag", *tags)] if tags[0] != tags[1] else []
    for what, key in (
        ("version of ", "versions"),
        ("config ", "config"),
        ("extra ", "extra"),
    ):
        found += _manifest.changes(what, old.get(key, {}), new.get(key, {}))
    return tuple(
        f"{name}: {x} in step {places[0].name}, {y} in step {places[1].name}"
        for name, x, y in found
    )


def _form(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['dtype']}{row['shape'] if row['kind'] != 'python' else ''}"


def _compare(name: str, before: list[Any], after: list[Any]) -> LeafDifference:
    (old, x), (new, y) = before, after
    forms = _form(old), _form(new)
    x, y = np.ravel(np.asarray(x)), np.ravel(np.asarray(y))
    if forms[0] != forms[1] or x.shape != y.shape:
        return LeafDifference(name, *forms, 0, y.size, math.nan, math.nan, 0)
    if x.dtype.kind in "US":
        nan = math.nan
        return LeafDifference(name, *forms, int((x != y).sum()), x.size, nan, nan, 0)
    entries = nonfinite = 0
    largest = squares = norm = 0.0
    with np.errstate(all="ignore"):
        for at in range(0, x.size, _CHUNK):
            p, q = (_wide(z[at : at + _CHUNK]) for z in (x, y))
            entries += int(np.count_nonzero((p != q) & ~((p != p) & (q != q))))
            nonfinite += int(np.count_nonzero(~np.isfinite(q)))
            gap = np.abs(q - p)
            largest = float(np.maximum(largest, gap.max()))
            squares += float(np.sum(gap * gap))
            norm += float(np.sum(np.abs(p) ** 2))
        relative = float(np.sqrt(np.float64(squares) / np.float64(norm)))
    if not entries:
        # The same NaN in both, or zeros of two signs: other bits, no other number.
        largest = relative = 0.0
    return LeafDifference(name, *forms, entries, x.size, largest, relative, nonfinite)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
