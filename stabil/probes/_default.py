"""What a probe reads when nobody says where: the blocks, and what frames them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from stabil.probes import _program
from stabil.probes._jaxprs import jaxprs_in, open_jaxpr

Places = Mapping[tuple[str, ...], type]


def default_places(places: Places, root: str, jaxpr: Any) -> tuple[str, ...]:
    """Names of the rows to read.

    Blocks are modules of one class and one parent whose names differ in a number
    alone, and modules that a scan stacks, the outermost of each. To them come the
    root's other children, or the root if there is nothing else, and every tap that a
    user set.

    Args:
      places: names of each place, the module's path last, and the module's class.
      root: path of the root.
      jaxpr: the traced model.
    """
    taps = {names[0]: names[-1] for names in _program.names_in(jaxpr)}
    inner = {n[-1]: kind for n, kind in places.items() if n[-1] != root}
    siblings: dict[Any, list[str]] = {}
    for path, kind in inner.items():
        stem = path.rstrip("0123456789")
        if stem != path:
            siblings.setdefault((stem, kind), []).append(path)
    repeated = [p for same in siblings.values() if len(same) > 1 for p in same]
    stacked = {taps[name] for name in _in_scans(jaxpr)} & set(inner)
    blocks = _outermost({*repeated, *_outermost(stacked)})
    # A numbered entry of a list is a child of whoever has the list.
    children = {p for p in inner if "/" not in re.sub(r"(/\d+)+$", "", p)}
    chosen = blocks | children or {root}
    known = {n[0]: n[-1] for n in places}
    return tuple(n for n in taps if n not in known or known[n] in chosen)


def _outermost(paths: Iterable[str]) -> set[str]:
    """The paths that lie below no other of them."""
    paths = set(paths)
    return {p for p in paths if not any(p.startswith(f"{q}/") for q in paths)}


def _in_scans(jaxpr: Any) -> set[str]:
    """Names of the taps inside scans."""
    found: set[str] = set()
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in jaxprs_in(eqn.params):
            if eqn.primitive.name == "scan":
                found |= {names[0] for names in _program.names_in(inner)}
            else:
                found |= _in_scans(inner)
    return found
