"""Runs a traced program again, and brings out a vector for every tap in it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from stabil.probes import _rows
from stabil.probes._jaxprs import (
    bind,
    context_of,
    jaxprs_in,
    last_uses,
    open_jaxpr,
    trace_open,
    varying,
)
from stabil.probes._tap import FORWARD, PLACE, tap_p

Values = list[jax.Array]


class Mode(NamedTuple):
    """How a jaxpr is run.

    Attributes:
      recompute: whether this is the second run of a checkpointed forward pass, most of
        whose forward taps were read in the first.
      keep: whether taps stay in place, for whoever collects around this run.
    """

    recompute: bool = False
    keep: bool = True


@dataclasses.dataclass
class Harvest:
    """What to bring out, and what one run has met.

    Attributes:
      wants: whether the tap with this row is read.
      read: from a tensor to what was read of it.
      conclude: from what was read of several tensors to what it tells of each, float32
        `[tensors, width]`.
      nothing: what a tensor without entries tells, `[width]`.
      merge: from `[parts, ..., width]` of the parts of a tensor to the whole's.
      only: whether taps that are not read are taken out.
      around: what holds while a derivative rule is traced, which is after the rest.
      run_before: rows that a checkpointed forward pass leaves to its first run.
      missed: names of taps that were met where nothing can be brought out, with the
        primitive that holds them.
    """

    wants: Callable[[_rows.Row], bool]
    read: Callable[[jax.Array], Any]
    conclude: Callable[[list[Any]], jax.Array]
    nothing: Callable[[], jax.Array]
    merge: Callable[[jax.Array], jax.Array]
    only: bool = False
    around: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )
    run_before: frozenset[_rows.Row] = frozenset()
    missed: dict[str, str] = dataclasses.field(default_factory=dict)
    _taps: dict[int, tuple[Any, frozenset[_rows.Row]]] = dataclasses.field(
        default_factory=dict
    )
    _closed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def taps_in(self, jaxpr: Any) -> frozenset[_rows.Row]:
        """The wanted rows in a jaxpr and all jaxprs inside it.

        Places that are no rows are asked for as rows with the suffix `@place`.
        """
        jaxpr = open_jaxpr(jaxpr)
        if id(jaxpr) not in self._taps:
            found = set()
            for eqn in jaxpr.eqns:
                if eqn.primitive is tap_p and self.wants(row_of(eqn.params)):
                    found.add(row_of(eqn.params))
                for inner in jaxprs_in(eqn.params):
                    found |= self.taps_in(inner)
            # The jaxpr is kept, so that its id stays its own.
            self._taps[id(jaxpr)] = (jaxpr, frozenset(found))
        return self._taps[id(jaxpr)][1]

    def close(
        self, jaxpr: Any, consts: Sequence[Any], mode: Mode
    ) -> tuple[Any, list[Any], _rows.Nodes]:
        """The jaxpr with the wanted values as further outputs.

        Returns:
          A jaxpr without constants, what to pass before the old arguments, and the
          rows of the further outputs.
        """
        key = (id(jaxpr), mode)
        if key not in self._closed:
            nodes: list[_rows.Nodes] = []

            def run(*args: Any) -> list[Any]:
                outs, found, values = evaluate(self, jaxpr, consts, args, mode)
                nodes.append(found)
                return [*outs, *values]

            new, hoisted = trace_open(run, [v.aval for v in jaxpr.invars])
            self._closed[key] = (jaxpr, new, hoisted, nodes[-1])
        _, new, hoisted, found = self._closed[key]
        return new, hoisted, found


def row_of(params: dict[str, Any]) -> _rows.Row:
    """The row that a tap leaves."""
    kind = "" if params["kind"] == FORWARD else "@" + params["kind"]
    return _rows.Row(params["name"], kind + params["suffix"])


def evaluate(
    harvest: Harvest,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    mode: Mode = Mode(),  # noqa: B008
) -> tuple[list[Any], _rows.Nodes, Values]:
    """Runs a jaxpr, reading its wanted taps.

    Args:
      harvest: what to read.
      jaxpr: an open jaxpr.
      consts: values of its constants.
      args: values of its arguments.
      mode: how to run it.
    Returns:
      The outputs, bit-identical; the rows found; and a value for each row, float32
      `[*loops, width]`.
    """
    from stabil.probes._rules import RULES

    env: dict[Any, Any] = {}
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    nodes: list[_rows.Row | _rows.Loop] = []
    values: list[Any] = []
    reader = _Reader(harvest, mode)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    last = last_uses(jaxpr)
    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(v) for v in eqn.invars]
        with context_of(eqn):
            if eqn.primitive is tap_p:
                outs = reader.read(eqn, operands[0], nodes, values)
            elif not any(map(harvest.taps_in, jaxprs_in(eqn.params))):
                outs = bind(eqn, operands)
            else:
                rule = RULES.get(eqn.primitive.name, _unseen)
                outs, found, new = rule(harvest, eqn, operands, mode)
                nodes.extend(found)
                values.extend(new)
        env.update(zip(eqn.outvars, outs, strict=True))
        for v in last.get(i, ()):
            env.pop(v, None)
    return [read(v) for v in jaxpr.outvars], tuple(nodes), reader.conclude(values)


class _Reader:
    """Reads taps; a tensor that several taps name is read once."""

    def __init__(self, harvest: Harvest, mode: Mode) -> None:
        self.harvest = harvest
        self.mode = mode
        self.same: dict[Any, Any] = {}
        self.found: dict[Any, Any] = {}
        self.kinds: dict[Any, list[Any]] = {}

    def read(self, eqn: Any, x: Any, nodes: list[Any], values: list[Any]) -> list[Any]:
        """Reads one tap, and leaves it in place for whoever collects around us."""
        if eqn.params["kind"] == PLACE:
            return [x]
        row = row_of(eqn.params)
        skipped = self.mode.recompute and row in self.harvest.run_before
        if self.harvest.wants(row) and not skipped:
            source = eqn.invars[0]
            tensor = self.same.get(source, source)
            known = tensor in self.found
            if not known:
                with jax.named_scope("stabil"):
                    self.found[tensor] = self.harvest.read(x)
                self.kinds.setdefault(varying(jax.typeof(x)), []).append(tensor)
            self.same[eqn.outvars[0]] = tensor
            # An input that is another place's output has its row there.
            if not (known and row.suffix.startswith("@input")):
                nodes.append(row)
                values.append(_Pending(tensor))
        keep = self.mode.keep and (self.harvest.wants(row) or not self.harvest.only)
        return [tap_p.bind(x, **eqn.params) if keep else x]

    def conclude(self, values: list[Any]) -> Values:
        """The values of all rows, those that were read here concluded together."""
        done: dict[Any, jax.Array] = {}
        with jax.named_scope("stabil"):
            for alike in self.kinds.values():
                told = self.harvest.conclude([self.found[t] for t in alike])
                done |= zip(alike, told, strict=True)
        return [done[v.tensor] if isinstance(v, _Pending) else v for v in values]


class _Pending(NamedTuple):
    """A value whose tensor has been read and not concluded."""

    tensor: Any


def _unseen(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Any:
    for inner in jaxprs_in(eqn.params):
        for row in harvest.taps_in(inner):
            harvest.missed[row.name + row.suffix] = eqn.primitive.name
    return bind(eqn, operands), (), []


def not_run(shape: tuple[int, ...]) -> jax.Array:
    """The value of a row in a branch that was not taken: NaN throughout."""
    return jnp.full(shape, jnp.nan, jnp.float32)
