"""Runs a function on what each device holds, and gathers what it told, once.

The results of `on_shards` are typed as replicated, and yet each device has its own:
nothing between here and `gather` makes one device look at another's. So statistics of
all places together cost one collective, at the end, and none per device.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# For each dimension of a tensor, the mesh axes that it is cut along.
Cut = tuple[tuple[str, ...], ...]
# Of a function on shards: mesh axes, the cut of the argument, the argument, and what
# every device has.
OnShard = Callable[..., jax.Array]


def devices() -> int:
    """How many devices a program may be spread over."""
    return jax.device_count()


def explicit_mesh(x: jax.Array) -> Any:
    """The mesh in the type of `x`, if all its axes are part of types; else None."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = None if sharding is None else sharding.mesh
    if mesh is None or mesh.empty:
        return None
    types = tuple(mesh.axis_types)
    return mesh if all(t == AxisType.Explicit for t in types) else None


def on_shards(
    fn: OnShard,
    x: jax.Array,
    *,
    out: tuple[int, ...],
    same: Sequence[jax.Array] = (),
) -> jax.Array:
    """`fn(axes, cut, x, *same)` on each device's part of `x`.

    Args:
      fn: pure, and without arrays that it closes over; `axes` are the names of the
        mesh's axes and `cut` those along which each dimension of `x` is cut, all empty
        on one device.
      x: an array.
      out: shape of the result on a device, float32.
      same: arrays that every device has whole.
    """
    mesh = explicit_mesh(x)
    if mesh is not None:
        return _in_explicit_mesh(fn, x, mesh, P(), same)

    def whole(x: jax.Array, *same: jax.Array) -> jax.Array:
        return fn((), ((),) * x.ndim, x, *same)

    cut_up = custom_partitioning(whole)
    cut_up.def_partition(
        partition=functools.partial(_partition, fn),
        infer_sharding_from_operands=_everywhere,
        sharding_rule=_no_relation([a.ndim for a in (x, *same)], len(out)),
    )
    call = jax.custom_batching.custom_vmap(cut_up)

    @call.def_vmap
    def _(size: int, batched: Any, *args: jax.Array) -> tuple[jax.Array, bool]:
        axes = [0 if b else None for b in batched]
        return jax.vmap(whole, axes)(*args), True

    return call(x, *same)


def in_whole(index: jax.Array, shape: tuple[int, ...], cut: Cut) -> jax.Array:
    """From flat indices in a device's part of a tensor to those in the whole.

    Args:
      index: int32, of any shape.
      shape: of the part.
      cut: as `on_shards` has it.
    """
    told, stride = jnp.zeros_like(index), 1
    for part, axes in zip(reversed(shape), reversed(cut), strict=True):
        turn = lax.axis_index(axes) if axes else 0
        told += stride * (index % part + turn * part)
        index //= part
        stride *= part * parts_of((axes,))
    return told


def parts_of(cut: Cut) -> int:
    """In how many parts a tensor is cut."""
    return math.prod(lax.axis_size(axis) for axes in cut for axis in axes)


def stack_shards(x: jax.Array, mesh: Any) -> jax.Array:
    """What each device has of a result of `on_shards`, `[devices, ...]`, left there."""
    ends = P(tuple(mesh.axis_names))
    return _in_explicit_mesh(lambda axes, cut, x: x[None], x, mesh, ends)


def _in_explicit_mesh(
    fn: OnShard, x: jax.Array, mesh: Any, ends: Any, same: Sequence[jax.Array] = ()
) -> jax.Array:
    spec, axes = jax.typeof(x).sharding.spec, tuple(mesh.axis_names)
    run = functools.partial(fn, axes, _cut(spec, x.ndim))
    # Not checked: the results differ, whatever their type says.
    specs = (spec, *(P() for _ in same))
    return jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=ends, check_vma=False
    )(x, *same)


def _partition(fn: OnShard, mesh: Any, args: Any, result: Any) -> Any:
    sharding = args[0].sharding
    cut = _cut(sharding.spec, len(args[0].shape))
    run = functools.partial(fn, tuple(mesh.axis_names), cut)
    same = [_everywhere(mesh, args, result) for _ in args[1:]]
    return mesh, run, _everywhere(mesh, args, result), (sharding, *same)


def _everywhere(mesh: Any, args: Any, result: Any) -> NamedSharding:
    return NamedSharding(mesh, P())


def _cut(spec: Any, ndim: int) -> Cut:
    parts = [(s,) if isinstance(s, str) else tuple(s or ()) for s in spec]
    return *parts, *((),) * (ndim - len(parts))


def _no_relation(inner: Sequence[int], outer: int) -> str:
    """The rule of sharding by which no axis of the result is one of an argument."""
    names = iter(string.ascii_lowercase)
    sides = [" ".join(next(names) for _ in range(n)) for n in (*inner, outer)]
    return ", ".join(sides[:-1]) + " -> " + sides[-1]
