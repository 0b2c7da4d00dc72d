"""Which rows a collected program has, in which loops, and in which order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One tensor: its place, which tensor of that place, and `@grad` or nothing."""

    name: str
    suffix: str


class Loop(NamedTuple):
    """Rows that come once per turn, in the order of the turns or against it."""

    length: int
    reverse: bool
    body: tuple[Row | Loop, ...]


Nodes = tuple[Row | Loop, ...]


def rows_in(nodes: Nodes) -> Iterator[Row]:
    """The rows of a program, loops entered once, in the order of their values."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from rows_in(node.body)
        else:
            yield node


def in_order(nodes: Nodes) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of all rows in the order of execution, and where each row lies.

    The values of the rows in `rows_in` order, each with its loop axes flattened, are
    taken as concatenated; the second return indexes that array.
    """
    labels = _labels(nodes)
    shapes: list[tuple[int, ...]] = []
    _shapes(nodes, (), shapes)
    sizes = [math.prod(s) for s in shapes]
    starts = np.cumsum([0, *sizes])[:-1]
    names: list[str] = []
    places: list[int] = []

    def walk(nodes: Nodes, first: int, at: tuple[int, ...]) -> int:
        for node in nodes:
            if isinstance(node, Row):
                flat = int(np.ravel_multi_index(at, shapes[first])) if at else 0
                index = f"[{','.join(map(str, at))}]" if at else ""
                name, suffix = labels[first]
                names.append(name + index + suffix)
                places.append(int(starts[first]) + flat)
                first += 1
                continue
            turns = range(node.length)
            after = first
            for turn in reversed(turns) if node.reverse else turns:
                after = walk(node.body, first, (*at, turn))
            first = after if node.length else first + len(list(rows_in(node.body)))
        return first

    walk(nodes, 0, ())
    return tuple(names), np.array(places, np.int32)


def _labels(nodes: Nodes) -> list[tuple[str, str]]:
    """Name and suffix of each row; `#2` marks the second call of a place.

    Cotangents come in the reverse order of the calls, and are counted that way.
    """
    rows = list(rows_in(nodes))
    total, seen = Counter(rows), Counter[Row]()
    labels = []
    for row in rows:
        seen[row] += 1
        backward = row.suffix.startswith("@grad")
        call = total[row] + 1 - seen[row] if backward else seen[row]
        labels.append((row.name + (f"#{call}" if call > 1 else ""), row.suffix))
    return labels


def _shapes(nodes: Nodes, around: tuple[int, ...], out: list[tuple[int, ...]]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _shapes(node.body, (*around, node.length), out)
        else:
            out.append(around)
