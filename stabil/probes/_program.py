"""A traced function: its taps, and how to run it and read them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from stabil.probes import _harvest, _reduce, _rows, _select, _spread, _tap
from stabil.probes._jaxprs import jaxprs_in
from stabil.vocabulary import Readings


class Program:
    """A function of nothing, traced: its jaxpr, and how to rebuild its return."""

    def __init__(self, run: Callable[[], Any]) -> None:
        static: list[Any] = []

        def arrays() -> list[Any]:
            leaves, treedef = jax.tree.flatten(run())
            is_array = [_is_array(x) for x in leaves]
            static[:] = [treedef, is_array, leaves]
            return [x for x, a in zip(leaves, is_array, strict=True) if a]

        self.closed = jax.make_jaxpr(arrays)()
        treedef, is_array, leaves = static
        self._treedef = treedef
        # Only what is no array is kept: a tracer must not outlive its trace.
        self._fixed = [None if a else x for a, x in zip(is_array, leaves, strict=True)]
        self._is_array = is_array

    def rebuild(self, arrays: Iterable[Any]) -> Any:
        """The return of the function with these arrays in it."""
        it = iter(arrays)
        pairs = zip(self._is_array, self._fixed, strict=True)
        leaves = [next(it) if a else x for a, x in pairs]
        return jax.tree.unflatten(self._treedef, leaves)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__") or _is_numpy(x)


def _is_numpy(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def trace(run: Callable[[], Any]) -> Program:
    """The program of a function whose arguments are closed over."""
    return Program(run)


def read(
    program: Program,
    patterns: tuple[str, ...],
    statistics: tuple[str, ...],
    *,
    backward: bool = False,
    places: Iterable[tuple[str, ...]] = (),
    due: jax.Array | bool | None = None,
    only: bool = False,
    per_device: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Any, Readings]:
    """Runs a program and reads its taps.

    Args:
      program: what to run.
      patterns: globs; a tap is read if one matches its name.
      statistics: columns of the readings.
      backward: whether cotangents are read.
      places: names that a pattern may match without a row, beside those of the taps.
      due: bool scalar, whether to measure at all; None is always.
      only: whether taps that are not read are taken out.
      per_device: whether to tell what each device holds too.
      around: what held while the program was traced, for what is traced later.
    Raises:
      ValueError: a pattern matches no place.
    """
    spread = _spread.Spread(_reduce.groups_of(statistics), due)

    def wants(row: _rows.Row) -> bool:
        kind = row.suffix.partition(":")[0]
        hidden = kind == "@place" or (kind == "@grad" and not backward)
        return not hidden and _select.selected(patterns, *_names(row.name))

    jaxpr = program.closed.jaxpr
    harvest = _harvest.Harvest(
        wants,
        only=only,
        around=around,
        run_before=_rows_before(jaxpr),
        read=spread.read,
        conclude=spread.conclude,
        nothing=spread.nothing,
        merge=spread.merge,
    )
    _select.require_matches(patterns, dict.fromkeys([*places, *names_in(jaxpr)]))
    outs, nodes, values = _harvest.evaluate(harvest, jaxpr, program.closed.consts, ())
    if harvest.missed:
        _warn_missed(harvest.missed)
    names, at = _rows.in_order(nodes)
    if not names:
        table = jnp.zeros([0, len(statistics)], jnp.float32)
        return program.rebuild(outs), Readings(table, names, statistics)
    flat = jnp.concatenate([v.reshape(-1, v.shape[-1]) for v in values])
    if not (at == range(len(at))).all():
        flat = flat[at]
    with jax.named_scope("stabil"):
        whole, each = spread.gather(flat, per_device)
        table = _reduce.finish(whole, statistics)
        shards = None if each is None else _reduce.finish(each, statistics)
    return program.rebuild(outs), Readings(table, names, statistics, shards)


def _rows_before(jaxpr: Any) -> frozenset[_rows.Row]:
    """The rows of forward taps outside of every second run of a checkpointed pass.

    A tap in a derivative rule written by hand may be met in a second run alone.
    """
    rows: set[_rows.Row] = set()
    seen: dict[int, Any] = {}

    def walk(jaxpr: Any) -> None:
        seen[id(jaxpr)] = jaxpr
        for eqn in jaxpr.eqns:
            if eqn.primitive is _tap.tap_p and eqn.params["kind"] == _tap.FORWARD:
                rows.add(_harvest.row_of(eqn.params))
            if not eqn.params.get("differentiated", False):
                for inner in jaxprs_in(eqn.params):
                    if id(inner) not in seen:
                        walk(inner)

    walk(jaxpr)
    return frozenset(rows)


def names_in(jaxpr: Any) -> list[tuple[str, ...]]:
    """The names that a pattern may match, from all taps in a jaxpr, each once."""
    names = {row.name for row in _everything().taps_in(jaxpr)}
    return [_names(name) for name in sorted(names)]


def _everything() -> _harvest.Harvest:
    """A harvest that finds every tap, for questions about a jaxpr."""

    def unused(*_: Any) -> Any:
        raise AssertionError("this harvest is not run")

    return _harvest.Harvest(lambda row: True, unused, unused, unused, unused)


def _names(name: str) -> tuple[str, ...]:
    """What a pattern may match: the name, and the module of a method."""
    return (name, name.rpartition(".")[0] or name)


def shares_a_trace(jaxpr: Any) -> bool:
    """Whether a `jit` with taps inside is called more than once."""
    everything = _everything()
    seen: set[int] = set()

    def walk(jaxpr: Any) -> bool:
        for eqn in jaxpr.eqns:
            for inner in jaxprs_in(eqn.params):
                if not everything.taps_in(inner):
                    continue
                if eqn.primitive.name in ("jit", "pjit"):
                    if id(inner) in seen:
                        return True
                    seen.add(id(inner))
                if walk(inner):
                    return True
        return False

    return walk(jaxpr)


def _warn_missed(missed: dict[str, str]) -> None:
    shown = ", ".join(f"{name} (in {where})" for name, where in sorted(missed.items()))
    warnings.warn(
        f"no statistics from {shown}: values cannot be brought out of there; tap the "
        "result of that call instead, for example y = stabil.tap(call(x), 'name')",
        stacklevel=4,
    )
