"""Statistics of tensors: a quick pass where it is enough, a careful one elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes import _quick, _reduce, _shards
from stabil.probes._jaxprs import varying


def measure(x: jax.Array, statistics: tuple[str, ...]) -> jax.Array:
    """Statistics of one tensor, in one read of it.

    Non-finite entries are counted and left out of everything else. Where no entry is
    finite, all but the counts are NaN. Entries of a float64 tensor are rounded to
    float32 first; a complex tensor counts as its real and imaginary parts. The
    standard deviation of entries beyond 2**100 is right to 5e-4 of their mean.

    Args:
      x: real or complex floating array of any shape and width.
      statistics: names in `STATISTICS`.
    Returns:
      float32 `[statistics]`, without a gradient.
    Examples:
      >>> print(measure(jnp.array([3.0, -4.0, jnp.nan, 0.0]), ("nan_count", "absmax")))
      [1. 4.]
    """
    groups = _reduce.groups_of(statistics)
    return _reduce.finish(conclude([read(x, groups)], groups)[0], statistics)


class Reading(NamedTuple):
    """What was read of one tensor, before `conclude`.

    Attributes:
      packed: float32 `[width]`, what the quick pass told.
      usual: bool scalar, whether that holds.
      sums: float32 `[2 + terms, rows]`, what the careful pass told; zeros where it did
        not run.
      more: the same of the groups that the quick pass does not cover.
    """

    packed: jax.Array
    usual: jax.Array
    sums: jax.Array
    more: jax.Array


def read(
    x: jax.Array, groups: tuple[str, ...], due: jax.Array | None = None
) -> Reading:
    """Reads a tensor where `due` holds or is None.

    On a single CPU a quick pass serves a tensor in which nothing is out of the
    ordinary, and a careful one the rest; elsewhere one careful pass costs no more.
    """
    x = as_real(lax.stop_gradient(x))
    alone = _shards.devices() == 1 and not varying(jax.typeof(x))
    return _read(x, due, groups, quick=bool(x.size) and alone)


# Tensors of a shape share one trace.
@functools.partial(jax.jit, static_argnames=("groups", "quick"))
def _read(
    x: jax.Array, due: jax.Array | None, groups: tuple[str, ...], quick: bool
) -> Reading:
    skip = functools.partial(_skipped, groups=groups)

    def on_cpu(x: jax.Array) -> Reading:
        run = functools.partial(_read_quick, groups=groups)
        return _in_branch(due, run, skip, x)

    def elsewhere(x: jax.Array) -> Reading:
        run = functools.partial(_read_careful, groups=groups)
        return run(x) if due is None else lax.cond(due, run, skip, x)

    if not quick:
        return elsewhere(x)
    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def split(groups: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The groups of the quick pass, and what must be read in any case."""
    quick = tuple(g for g in groups if _quick.covers(g))
    slow = tuple(g for g in groups if not _quick.covers(g))
    return quick, (*_reduce.COUNTS, *slow) if slow else ()


def _in_branch(
    due: jax.Array | None,
    run: Callable[[jax.Array], Reading],
    skip: Callable[[jax.Array], Reading],
    x: jax.Array,
) -> Reading:
    """`run` on a tensor that lies in memory, where `due` holds or is None."""
    # Outside of a branch the pass would compute the tensor anew, and be no plain loop.
    if due is None:
        due = lax.optimization_barrier(jnp.bool_(True))
    # The branch has bits: what the program makes of the tensor itself stays fused.
    dtype = x.dtype
    bits = lax.bitcast_convert_type(x, f"uint{8 * dtype.itemsize}")

    def back(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, dtype)

    return lax.cond(due, lambda b: run(back(b)), lambda b: skip(back(b)), bits)


def read_in_rows(x: jax.Array, groups: tuple[str, ...], rows: int) -> Reading:
    """Reads a tensor into sums of `rows + 1` rows, for groups of the quick pass."""
    careful = functools.partial(_reduce.accumulate_in, groups=groups, rows=rows)

    def on_cpu(x: jax.Array) -> Reading:
        run = functools.partial(_quick_or, careful, groups)
        shapes = jax.eval_shape(run, x)
        empty = lambda _: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
        return _in_branch(None, run, empty, x)

    def elsewhere(x: jax.Array) -> Reading:
        packed = jnp.zeros([_reduce.width(groups)], jnp.float32)
        none = jnp.zeros([0, 0], jnp.float32)
        return Reading(packed, jnp.zeros([], bool), careful(x), none)

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def _skipped(x: jax.Array, *, groups: tuple[str, ...]) -> Reading:
    """A reading that comes out as NaN throughout."""
    shapes = jax.eval_shape(functools.partial(_read_careful, groups=groups), x)
    packed, _, sums, more = (jnp.full(s.shape, jnp.nan, jnp.float32) for s in shapes)
    return Reading(packed, jnp.ones([], bool), sums, more)


def _read_careful(x: jax.Array, *, groups: tuple[str, ...]) -> Reading:
    quick, slow = split(groups)
    packed = jnp.zeros([_reduce.width(quick)], jnp.float32)
    usual = jnp.zeros([], bool)
    return Reading(
        packed, usual, _reduce.accumulate(x, quick), _accumulate_more(x, slow)
    )


def _read_quick(x: jax.Array, *, groups: tuple[str, ...]) -> Reading:
    quick, slow = split(groups)
    careful = functools.partial(_reduce.accumulate, groups=quick)
    found = _quick_or(careful, quick, x)
    return found._replace(more=_accumulate_more(x, slow))


def _quick_or(
    careful: Callable[[jax.Array], jax.Array], groups: tuple[str, ...], x: jax.Array
) -> Reading:
    found, usual = _quick.settle(x.size, _quick.run(x, groups), groups)
    packed = _reduce.pack(jnp.float32(x.size), found)
    shape = jax.eval_shape(careful, x).shape
    sums = lax.cond(usual, lambda _: jnp.zeros(shape, jnp.float32), careful, x)
    return Reading(packed, usual, sums, jnp.zeros([0, 0], jnp.float32))


def _accumulate_more(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    return _reduce.accumulate(x, groups) if groups else jnp.zeros([0, 0], jnp.float32)


def conclude(readings: list[Reading], groups: tuple[str, ...]) -> jax.Array:
    """What was read of several tensors, as packed quantities `[tensors, width]`."""
    quick, slow = split(groups)
    packed = jnp.stack([r.packed for r in readings])
    usual = jnp.stack([r.usual for r in readings])
    sums = _stack_rows([r.sums for r in readings], quick)

    packed = choose(packed, usual, sums, quick)
    if not slow:
        return packed
    n, parts = _reduce.unpack(packed, quick)
    more = settle_alike([r.more for r in readings], slow)
    return _reduce.pack(n, {**_reduce.unpack(more, slow)[1], **parts})


def choose(
    packed: jax.Array, usual: jax.Array, sums: jax.Array, groups: tuple[str, ...]
) -> jax.Array:
    """`packed` `[tensors, width]` where `usual` holds, else what the sums tell."""

    def careful(packed: jax.Array, usual: jax.Array, sums: jax.Array) -> jax.Array:
        return jnp.where(usual[:, None], packed, _reduce.settle(sums, groups))

    def on_cpu(packed: jax.Array, usual: jax.Array, sums: jax.Array) -> jax.Array:
        as_is = lambda packed, usual, sums: packed  # noqa: E731
        return lax.cond(jnp.all(usual), as_is, careful, packed, usual, sums)

    if varying(jax.typeof(packed)) or varying(jax.typeof(sums)):
        return careful(packed, usual, sums)
    return lax.platform_dependent(packed, usual, sums, cpu=on_cpu, default=careful)


def settle_alike(sums: list[jax.Array], groups: tuple[str, ...]) -> jax.Array:
    """`settle` of tensors whose sums have several shapes, in their order."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, s in enumerate(sums):
        alike.setdefault(s.shape, []).append(i)
    order = [i for same in alike.values() for i in same]
    told = [
        _reduce.settle(jnp.stack([sums[i] for i in same]), groups)
        for same in alike.values()
    ]
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.concatenate(told)[jnp.array(back)]


def _stack_rows(sums: list[jax.Array], groups: tuple[str, ...]) -> jax.Array:
    """Sums of tensors of several numbers of rows, `[tensors, 2 + terms, rows]`."""
    rows, none = max(s.shape[1] for s in sums), _reduce.no_rows(groups)
    return jnp.stack(
        [
            jnp.concatenate([s, jnp.repeat(none, rows - s.shape[1], 1)], axis=1)
            for s in sums
        ]
    )


def as_real(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return x
    return jnp.stack([x.real, x.imag], axis=-2 if x.ndim else -1)
