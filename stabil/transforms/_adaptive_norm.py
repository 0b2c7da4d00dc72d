"""AdaClip and AdaFN of Stable-SPAM: a tensor's usual largest entry and usual norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms import _leafwise, _leaves
from stabil.transforms._leafwise import abs_square, debias, real


def per_tensor(params: Any, stacked: _leaves.Paths, make: Any = jnp.zeros) -> Any:
    """A tree of one scalar per tensor, or one per layer of a stacked tensor."""
    flags = iter(layered(params, stacked))
    return _leaves.like(
        params,
        lambda p: make(p.shape[:1] if next(flags) else (), real(_leaves.wide(p))),
    )


def layered(params: Any, stacked: _leaves.Paths) -> tuple[bool, ...]:
    """Which measured leaves have layers on their first axis."""
    leaves = zip(_tree.measured_names(params), _leaves.measured(params), strict=True)
    return tuple(_leaves.matches(stacked, n) and x.ndim > 0 for n, x in leaves)


def outer(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """A statistic with the trailing axes of `x` added, so that it broadcasts."""
    return statistic.reshape(statistic.shape + (1,) * (x.ndim - statistic.ndim))


def _axes(x: jax.Array, statistic: jax.Array) -> tuple[int, ...]:
    return tuple(range(statistic.ndim, x.ndim))


def all_finite(x: jax.Array, statistic: jax.Array) -> jax.Array:
    """Whether each tensor (or layer) is finite; of the shape of its statistic."""
    return jnp.all(jnp.isfinite(x), axis=_axes(x, statistic))


def adaclip(
    x: jax.Array, spike_max: jax.Array, ok: jax.Array, decay: float, steps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The clipped gradient and the new average of its largest entry.

    Args:
      x: gradient of one tensor, in the dtype to compute in.
      spike_max: M, a scalar, or `[layers]`.
      ok: whether this sample may enter M; of the shape of M.
      decay: gamma3.
      steps: k, samples in M with this one; broadcasts to M.
    """
    size = jnp.abs(x)
    top = jnp.max(size, axis=_axes(x, spike_max), initial=0)
    new = jnp.where(ok, decay * spike_max + (1 - decay) * top, spike_max)
    level = new / debias(decay, steps, new.dtype)
    ratio = level / jnp.where(top > 0, top, jnp.ones([], top.dtype))
    spike = size > outer(level, x)
    return jnp.where(spike, x * outer(ratio, x).astype(x.dtype), x), new


def adafn(
    x: jax.Array,
    averages: tuple[jax.Array, jax.Array],
    ok: jax.Array,
    decays: tuple[Any, float],
    steps: jax.Array,
    eps: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """The gradient with its norm replaced, the new averages, and the norm that came.

    Args:
      x: gradient of one tensor, in the dtype to compute in.
      averages: a and b, of the norm and of its square; scalars, or `[layers]`.
      ok: whether this sample may enter the averages.
      decays: gamma1 and gamma2.
      steps: k, samples in the averages with this one.
      eps: added to `sqrt(b_hat)`.
    """
    dtype = averages[0].dtype
    n = jnp.sqrt(jnp.sum(abs_square(x), axis=_axes(x, averages[0])))
    a = jnp.where(ok, decays[0] * averages[0] + (1 - decays[0]) * n, averages[0])
    square = jnp.square(n)
    b = jnp.where(ok, decays[1] * averages[1] + (1 - decays[1]) * square, averages[1])
    a_hat = a / debias(decays[0], steps, dtype)
    b_hat = b / debias(decays[1], steps, dtype)
    unit = x / outer(jnp.where(n > 0, n, jnp.ones([], dtype)), x).astype(x.dtype)
    level = outer(a_hat / (jnp.sqrt(b_hat) + eps), x).astype(x.dtype)
    return jnp.where(outer(n > 0, x), unit * level, x), (a, b), n


def int_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del dtype
    return jnp.zeros(shape, jnp.int32)


def prepare(
    g: jax.Array, statistic: jax.Array, samples: jax.Array, faithful: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient to work on, whether it is sound, and the samples with it."""
    x = g.astype(_leaves.wide(g))
    if faithful:
        return x, jnp.ones_like(statistic, bool), _leaves.one_more(samples)
    ok = all_finite(x, statistic)
    x = jnp.where(outer(ok, x), _leafwise.bounded(x), 0)
    return x, ok, jnp.where(ok, _leaves.one_more(samples), samples)


def per_leaf(name: str, updates: Any, state: Any, one: Any) -> tuple[Any, Any]:
    """Applies `one(gradient, *statistics)` to every leaf that has a gradient."""
    columns = [jax.tree.leaves(field) for field in state]
    grads = _leafwise.aligned(name, updates, _tree.measured_names(state[0]))
    rows = [
        (None, *old) if g is None else one(g, *old)
        for g, *old in zip(grads, *columns, strict=True)
    ]
    new = [list(column) for column in zip(*rows, strict=True)] if rows else [[]]
    fields = [
        jax.tree.unflatten(jax.tree.structure(field), values)
        for field, values in zip(state, new[1:] or columns, strict=True)
    ]
    return _leaves.rebuild(updates, new[0]), type(state)(*fields)
