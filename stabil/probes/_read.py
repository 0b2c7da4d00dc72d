"""Statistics of tensors: a quick pass where it is enough, a careful one elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes import _quick, _reduce, _shards, _twice
from stabil.probes._captured import own_terms
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
      told: float32 scalars, finite entries and the quantities of the groups that the
        quick pass covers; meaningless where it does not run, and empty where it never
        does.
      sums: float32 `[2 + terms, rows]`, what the careful pass told where no quick pass
        runs.
      more: the same of the groups that the quick pass does not cover.
    """

    told: tuple[jax.Array, ...]
    sums: jax.Array
    more: jax.Array


def read(
    x: jax.Array, groups: tuple[str, ...], due: jax.Array | None = None
) -> Reading:
    """Reads a tensor where `due` holds or is None.

    On a single CPU a quick pass serves a tensor in which nothing is out of the
    ordinary, and two or three more the rest; elsewhere one careful pass costs no more.
    """
    x = as_real(lax.stop_gradient(x))
    alone = _shards.devices() == 1 and not varying(jax.typeof(x))
    # A user's function may close over what changes from one trace to the next.
    run = _read if own_terms(groups) else _read_alike
    return run(x, due, groups, quick=bool(x.size) and alone)


def _read(
    x: jax.Array, due: jax.Array | None, groups: tuple[str, ...], quick: bool
) -> Reading:
    covered, slow = split(groups)

    def careful(x: jax.Array) -> Reading:
        told = _nothing_told(covered) if quick else ()
        return Reading(told, _reduce.accumulate(x, covered), _more(x, slow))

    shapes = jax.eval_shape(careful, x)

    def on_cpu(x: jax.Array) -> Reading:
        def run(bits: Bits, n: jax.Array) -> tuple[Any, jax.Array]:
            return _quick_or_twice(bits, n, covered), _more(bits.tensor(), slow)

        told, more = _in_branch(due, run, x)
        return Reading(told, jnp.zeros(shapes.sums.shape), more)

    def elsewhere(x: jax.Array) -> Reading:
        if due is None:
            return careful(x)
        skipped = functools.partial(jax.tree.map, _nan, shapes)
        return lax.cond(due, careful, lambda _: skipped(), x)

    if not quick:
        return elsewhere(x)
    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def _nan(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(like.shape, jnp.nan, jnp.float32)


def _nothing_told(groups: tuple[str, ...]) -> tuple[jax.Array, ...]:
    return (jnp.zeros([], jnp.float32),) * _reduce.width(groups)


def split(groups: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The groups of the quick pass, and what must be read in any case."""
    quick = tuple(g for g in groups if _quick.covers(g))
    slow = tuple(g for g in groups if not _quick.covers(g))
    return quick, (*_reduce.COUNTS, *slow) if slow else ()


# Tensors of a shape share one trace.
_read_alike = jax.jit(_read, static_argnames=("groups", "quick"))


class Bits(NamedTuple):
    """A tensor by its bits, unsigned and flat, from which each pass takes it anew."""

    flat: jax.Array
    shape: tuple[int, ...]
    dtype: Any

    def tensor(self) -> jax.Array:
        values = lax.bitcast_convert_type(self.flat, self.dtype)
        return values.reshape(self.shape)


def _in_branch(
    due: jax.Array | None, run: Callable[[Bits, jax.Array], Any], x: jax.Array
) -> Any:
    """`run` on a tensor that lies in memory and its size; NaN where it is not due."""
    # Outside of a branch the pass would compute the tensor anew, and be no plain loop.
    # And with sizes unknown, tensors of all sizes share what follows a pass.
    ran = jnp.bool_(True) if due is None else due
    due, n = lax.optimization_barrier((ran, jnp.float32(x.size)))
    # The branch has bits: what the program makes of the tensor itself stays fused.
    flat = lax.bitcast_convert_type(x.reshape(-1), f"uint{8 * x.dtype.itemsize}")

    def read(flat: jax.Array, n: jax.Array) -> Any:
        return run(Bits(flat, x.shape, x.dtype), n)

    shapes = jax.eval_shape(read, flat, n)
    return lax.cond(due, read, lambda *_: jax.tree.map(_nan, shapes), flat, n)


def _quick_or_twice(
    bits: Bits, n: jax.Array, groups: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    found, usual = _quick.settle(n, _quick.run(bits.tensor(), groups), groups)

    def as_told(found: Any, flat: jax.Array) -> tuple[jax.Array, ...]:
        return (n, *(q for g in groups for q in found[g]))

    def again(found: Any, flat: jax.Array) -> tuple[jax.Array, ...]:
        finite, parts = _twice.run(bits._replace(flat=flat).tensor(), n, groups)
        return (finite, *(q for g in groups for q in parts[g]))

    return lax.cond(usual, as_told, again, found, bits.flat)


def read_in_rows(x: jax.Array, groups: tuple[str, ...], rows: int) -> Reading:
    """Reads a tensor into sums of `rows + 1` rows, for groups of the quick pass."""
    none = jnp.zeros([0, 0], jnp.float32)
    careful = functools.partial(_reduce.accumulate_in, groups=groups, rows=rows)

    def on_cpu(x: jax.Array) -> Reading:
        run = functools.partial(_quick_or_twice, groups=groups)
        sums = jnp.zeros(jax.eval_shape(careful, x).shape)
        return Reading(_in_branch(None, run, x), sums, none)

    def elsewhere(x: jax.Array) -> Reading:
        return Reading(_nothing_told(groups), careful(x), none)

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def _more(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    return _reduce.accumulate(x, groups) if groups else jnp.zeros([0, 0], jnp.float32)


def conclude(readings: list[Reading], groups: tuple[str, ...]) -> jax.Array:
    """What was read of several tensors, as packed quantities `[tensors, width]`."""
    quick, slow = split(groups)
    told = [i for i, r in enumerate(readings) if r.told]
    rest = [i for i, r in enumerate(readings) if not r.told]
    packed = []
    if told:
        columns = zip(*(readings[i].told for i in told), strict=True)
        found = jnp.stack([jnp.stack(c) for c in columns], axis=1)
        sums = [readings[i].sums for i in told]
        packed += [choose(found, sums, functools.partial(settle_alike, groups=quick))]
    if rest:
        packed += [settle_alike([readings[i].sums for i in rest], quick)]
    whole = in_order(packed, [*told, *rest])
    if not slow:
        return whole
    n, parts = _reduce.unpack(whole, quick)
    more = settle_alike([r.more for r in readings], slow)
    return _reduce.pack(n, {**_reduce.unpack(more, slow)[1], **parts})


def choose(told: jax.Array, sums: Any, settle: Callable[[Any], jax.Array]) -> jax.Array:
    """Packed quantities: `told` where a quick pass runs, `settle(sums)` elsewhere."""
    return lax.platform_dependent(
        told, sums, cpu=lambda told, _: told, default=lambda _, sums: settle(sums)
    )


def in_order(pieces: list[jax.Array], order: list[int]) -> jax.Array:
    """Rows of several arrays together, where `order` has the place of each."""
    if len(pieces) == 1:
        return pieces[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.concatenate(pieces)[jnp.array(back)]


def settle_alike(sums: list[jax.Array], groups: tuple[str, ...]) -> jax.Array:
    """`settle` of tensors whose sums have several shapes, in their order."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, s in enumerate(sums):
        alike.setdefault(s.shape, []).append(i)
    told = [
        _reduce.settle(jnp.stack([sums[i] for i in same]), groups)
        for same in alike.values()
    ]
    return in_order(told, [i for same in alike.values() for i in same])


def as_real(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return x
    return jnp.stack([x.real, x.imag], axis=-2 if x.ndim else -1)
