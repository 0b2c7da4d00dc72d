"""One step of SPAM on one leaf."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.transforms import _leafwise


class Rates(NamedTuple):
    b1: float
    b2: float
    eps: float
    threshold: float
    faithful: bool


class Clock(NamedTuple):
    """What the counters say about this step; `[leaves]`, or one leaf's scalars."""

    reset: jax.Array
    clip: jax.Array
    age: jax.Array
    corrected_steps: jax.Array
    scale: jax.Array
    resets: jax.Array


def step(
    g: jax.Array | None,
    m: jax.Array,
    v: jax.Array,
    keep: jax.Array,
    clock: Clock,
    r: Rates,
) -> tuple[jax.Array | None, jax.Array, jax.Array, jax.Array]:
    """Update, new moments and clipped fraction of one leaf; None has no gradient."""
    if g is None:
        return None, m, v, jnp.zeros([], jnp.float32)
    kind = _leafwise.wide(g)
    dtype = _leafwise.real(kind)
    x = g.astype(kind)
    ok = jnp.isfinite(x)
    if not r.faithful:
        x = jnp.where(ok, _leafwise.bounded(x), 0)
    m_old = jnp.where(clock.reset | ~keep, 0, m.astype(kind))
    v_old = jnp.where(clock.reset | ~keep, 0, v.astype(dtype))
    size, limit = _leafwise.abs_square(x), r.threshold * v_old
    if not r.faithful:
        limit = limit / _leafwise.debias(r.b2, jnp.maximum(clock.age, 1), dtype)
    spike = clock.clip & (size > limit) & keep
    if not r.faithful:
        spike &= v_old > 0
    x = jnp.where(spike, jnp.sign(x) * jnp.sqrt(limit).astype(kind), x)
    m_new = r.b1 * m_old + (1 - r.b1) * x
    v_new = r.b2 * v_old + (1 - r.b2) * _leafwise.abs_square(x)
    k = clock.corrected_steps
    ratio = jnp.sqrt(_leafwise.debias(r.b2, k, dtype)) / _leafwise.debias(
        r.b1, k, dtype
    )
    ratio = ratio * clock.scale.astype(dtype)
    u = (ratio / (jnp.sqrt(v_new) + r.eps)).astype(kind) * m_new
    moves = keep
    if not r.faithful:
        moves = keep & ok
        m_new, v_new = jnp.where(ok, m_new, m_old), jnp.where(ok, v_new, v_old)
    share = jnp.sum(spike).astype(jnp.float32) / max(g.size, 1)
    return (
        jnp.where(moves, u, 0),
        jnp.where(keep, m_new, 0).astype(m.dtype),
        jnp.where(keep, v_new, 0).astype(v.dtype),
        share,
    )
