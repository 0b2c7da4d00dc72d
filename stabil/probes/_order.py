"""Names and order of the rows that a probed `apply` left behind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

# An empty row of every call: its leading axes tell the loops around it, its key when
# the call was entered and left, and whether it was measured.
MARK = "mark"
_PREFIX = "stabil:"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one method of one module.

    Attributes:
      path: names of the modules from the root down, the root left out.
      method: name of the method.
      index: 1 for the first call of this method, 2 for the second.
    """

    path: tuple[str, ...]
    method: str
    index: int

    @property
    def key(self) -> str:
        """Name of the variable that holds this call's rows, in the module's scope."""
        return f"{_PREFIX}{self.index}:{self.method}"

    def names(self, root: str) -> tuple[str, ...]:
        """The slash path of the module, and with the method where it is another."""
        path = "/".join(self.path) or root
        return (path,) if self.method == "__call__" else (path, f"{path}.{self.method}")

    def row_name(self, root: str) -> str:
        """The name of this call's output."""
        again = f"#{self.index}" if self.index > 1 else ""
        return self.names(root)[-1] + again


class Trace(NamedTuple):
    """When a call was entered and left, and which calls were around it."""

    entry: int
    exit: int
    parents: tuple[Call, ...]


class _Item(NamedTuple):
    order: tuple[Any, ...]
    name: str
    suffix: str
    value: jax.Array
    axes: int
    loops: tuple[Any, ...]


def leaf_key(side: str, index: int, name: str) -> str:
    """Key of one tensor within a call, sorted as the tensors came."""
    return f"{side}:{index:04d}:{name}"


def mark_key(trace: Trace, measured: bool) -> str:
    """Key of the empty row of a call."""
    return f"{MARK}:{trace.entry}:{trace.exit}:{measured:d}"


def was_measured(rows: Mapping[str, Any]) -> bool:
    """Whether a call was measured when it was traced."""
    return next(key for key in rows if _is_mark(key)).endswith(":1")


def calls_in(tree: Any, path: tuple[str, ...] = ()) -> dict[Call, Mapping[str, Any]]:
    """The calls whose rows are in a collection, in the collection's own order."""
    found: dict[Call, Mapping[str, Any]] = {}
    for name, below in tree.items():
        if name.startswith(_PREFIX):
            index, method = name.removeprefix(_PREFIX).split(":", 1)
            found[Call(path, method, int(index))] = below
        else:
            found |= calls_in(below, (*path, name))
    return found


def in_order(
    calls: Mapping[Call, Mapping[str, Any]],
    traced: Mapping[Call, Trace],
    root: str,
    wants: Callable[[Call], bool],
) -> tuple[tuple[str, ...], list[jax.Array]]:
    """Names and rows of the calls that are wanted, in the order of execution.

    The turns of a loop follow one another, each with all its rows.
    """
    marks = {call: next(k for k in rows if _is_mark(k)) for call, rows in calls.items()}
    axes = {call: rows[marks[call]].ndim - 1 for call, rows in calls.items()}
    items: list[_Item] = []
    for call, rows in calls.items():
        if not wants(call):
            continue
        loops = _loops(call, traced.get(call), axes)
        for key, value in rows.items():
            if _is_mark(key):
                continue
            side, index, leaf = key.split(":", 2)
            entered = side == "in"
            suffix = ("@input" if entered else "") + (f":{leaf}" if leaf else "")
            order = (*_when(call, marks[call], traced, entered), int(index))
            name = call.row_name(root)
            items.append(_Item(order, name, suffix, value, axes[call], loops))
    items.sort(key=lambda item: item.order)
    pairs = list(_unrolled(items, 0, ()))
    return tuple(name for name, _ in pairs), [row for _, row in pairs]


def _is_mark(key: str) -> bool:
    return key.startswith(f"{MARK}:")


def _when(
    call: Call, mark: str, traced: Mapping[Call, Trace], entered: bool
) -> tuple[Any, ...]:
    if call in traced:
        trace = traced[call]
        return (trace.entry if entered else trace.exit, (), 0)
    # Inside an `nn.jit` that was traced before: it ran before its parent returned,
    # beside modules of its kind in the order of their names, within it in the order
    # of that trace.
    then = int(mark.split(":")[1 if entered else 2])
    for size in range(len(call.path) - 1, -1, -1):
        exits = [t.exit for c, t in traced.items() if c.path == call.path[:size]]
        if exits:
            return (min(exits) - 0.5, _natural(call.path[size]), then)
    return (float("inf"), _natural("/".join(call.path)), then)


def _natural(name: str) -> tuple[Any, ...]:
    """Sorts `block_10` after `block_9`."""
    pieces = re.split(r"(\d+)", name)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in pieces)


def _loops(
    call: Call, trace: Trace | None, axes: Mapping[Call, int]
) -> tuple[Any, ...]:
    """For each loop around a call, the innermost call outside that loop."""
    parents = trace.parents if trace is not None else ()
    around = []
    for depth in range(axes[call]):
        outside = [c for c in parents if axes.get(c, 0) <= depth]
        around.append(outside[-1] if outside else call.path[:1])
    return tuple(around)


def _unrolled(
    items: list[_Item], depth: int, at: tuple[int, ...]
) -> Iterator[tuple[str, jax.Array]]:
    start = 0
    while start < len(items):
        first = items[start]
        stop = start + 1
        if first.axes <= depth:
            index = "[" + ",".join(map(str, at)) + "]" if at else ""
            yield first.name + index + first.suffix, first.value[at]
        else:
            loop, turns = first.loops[depth], first.value.shape[depth]
            while stop < len(items) and _same_loop(items[stop], loop, turns, depth):
                stop += 1
            for turn in range(turns):
                yield from _unrolled(items[start:stop], depth + 1, (*at, turn))
        start = stop


def _same_loop(item: _Item, loop: Any, turns: int, depth: int) -> bool:
    return (
        item.axes > depth
        and item.loops[depth] == loop
        and item.value.shape[depth] == turns
    )
