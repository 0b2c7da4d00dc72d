"""`stabil.collect`: the statistics of every tap inside a function."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from stabil.probes import _harvest, _reduce, _rows, _select, _spread, _statistics
from stabil.probes._jaxprs import jaxprs_in
from stabil.vocabulary import Readings


def collect(
    fn: Callable[..., Any],
    *,
    where: str | tuple[str, ...] = "**",
    stats: str | tuple[str, ...] = ("finite", "absmax", "rms"),
    backward: bool = False,
    per_device: bool = False,
) -> Callable[..., tuple[Any, Readings]]:
    """A function that also returns statistics of the values tapped inside `fn`.

    It sees every `stabil.tap`, and every module output of a `stabil.probe`, through
    `jit`, `scan`, `while_loop` (the last turn), `cond` (NaN where a branch was not
    taken), `remat`, `vmap` (one row over the batch), `shard_map` and custom
    derivative rules. Where `fn` computes gradients, the cotangents of the same places
    are seen too, as `name@grad`. Turns of a scan have a row each: `name[2]`. Rows are
    in the order of execution.

    Wrap what is compiled: `jax.jit(stabil.collect(train_step))`. Arrays among the
    arguments are traced; Python scalars stay what they are; NNX objects are updated.

    Does not: change the return of `fn` by a bit; see inside Pallas kernels.

    Args:
      fn: any JAX function; pytrees in, pytrees out.
      where: glob over tap names, or a tuple of globs; see `stabil.probe`.
      stats: which statistics; see `stabil.probe`.
      backward: whether to read cotangents too.
      per_device: whether to return `Readings.shards` too; see `stabil.probe`.
    Returns:
      A function of the same arguments that returns `(fn's return, Readings)`.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a statistic is unknown; at the call, a pattern matches no tap.
    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from stabil.probes import collect, tap
      >>> def loss(w):
      ...     return jnp.sum(tap(w * 3.0, "scaled") ** 2)
      >>> step = collect(jax.grad(loss), stats="absmax", backward=True)
      >>> grad, readings = jax.jit(step)(jnp.array([1.0, -2.0]))
      >>> readings.names, readings["absmax"].tolist()
      (('scaled', 'scaled@grad'), [6.0, 12.0])
    """
    if not callable(fn):
        raise TypeError(
            f"needed a function to collect from, got {fn!r}; write for example "
            "stabil.collect(train_step)"
        )
    patterns, statistics = _select.as_patterns(where), _statistics.columns(stats)
    options: Any = dict(backward=backward, per_device=per_device)

    @functools.wraps(fn)
    def collected(*args: Any, **kwargs: Any) -> tuple[Any, Readings]:
        if "flax.nnx" not in sys.modules:
            program = trace(lambda: fn(*args, **kwargs))
            return read(program, patterns, statistics, **options)
        # Objects with state are made anew inside the trace, and updated after it.
        from stabil.probes._nnx import Copies

        copies = Copies((args, kwargs))
        program = trace(lambda: copies.run(lambda all_: fn(*all_[0], **all_[1])))
        (out, new), readings = read(program, patterns, statistics, **options)
        copies.update(new)
        return out, readings

    return collected


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
    Raises:
      ValueError: a pattern matches no place.
    """
    spread = _spread.Spread(_reduce.groups_of(statistics), due)

    def wants(row: _rows.Row) -> bool:
        kind = row.suffix.partition(":")[0]
        hidden = kind == "@place" or (kind == "@grad" and not backward)
        return not hidden and _select.selected(patterns, *_names(row.name))

    harvest = _harvest.Harvest(
        wants,
        only=only,
        read=spread.read,
        conclude=spread.conclude,
        nothing=spread.nothing,
        merge=spread.merge,
    )
    jaxpr = program.closed.jaxpr
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
