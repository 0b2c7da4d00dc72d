"""One step of SPAM on one leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil.transforms import _leafwise, _leaves


class Rates(NamedTuple):
    b1: float
    b2: float
    eps: float
    threshold: float
    faithful: bool
    corrected: bool


class Clock(NamedTuple):
    """What the counters say about this step; `[leaves]`, or one leaf's scalars."""

    reset: jax.Array
    clip: jax.Array
    age: jax.Array
    corrected_steps: jax.Array
    scale: jax.Array
    resets: jax.Array


class Times(NamedTuple):
    """The periods of the method, in steps."""

    period: int
    warmup: int
    grace: int
    parity: str
    bias_correction: str


def read_clock(
    age: jax.Array,
    resets: jax.Array,
    steps: jax.Array,
    flags: jax.Array,
    times: Times,
    dtype: Any,
) -> Clock:
    """The clock of this step.

    Args:
      age: int32 `[leaves]`, steps since the newest reset, before this step.
      resets: int32 `[leaves]`, resets before this step.
      steps: int32 scalar, the number of this step, from 1.
      flags: bool `[leaves]`, which leaves restart in this step.
      times: the periods.
      dtype: of the warm-up scale.
    """
    age = jnp.where(flags, 0, _leaves.one_more(age))
    resets = resets + flags.astype(jnp.int32)
    ahead = int(times.parity == "pytorch_optimizer")
    scale = _leafwise.warmup_scale(age, times.warmup, dtype, ahead=ahead)
    clip = age >= times.grace
    if times.parity:
        grown = (steps >= times.grace) & (steps % times.period >= times.grace)
        clip = jnp.broadcast_to(grown, age.shape)
    restarts = times.bias_correction == "restart"
    return Clock(
        reset=flags,
        clip=clip,
        age=age,
        corrected_steps=age + 1 if restarts else jnp.broadcast_to(steps, age.shape),
        scale=jnp.where(resets > 0, scale, jnp.ones([], dtype)),
        resets=resets,
    )


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
    kind = _leaves.wide(g)
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
    moves = keep if r.faithful else keep & ok
    # Selected before they are used: a select of what is stored alone makes XLA compute
    # the update from the old moments once more.
    m_new = jnp.where(keep, jnp.where(moves, m_new, m_old), 0)
    v_new = jnp.where(keep, jnp.where(moves, v_new, v_old), 0)
    k = clock.corrected_steps
    ratio = jnp.ones([], dtype)
    if r.corrected:
        ratio = jnp.sqrt(_leafwise.debias(r.b2, k, dtype))
        ratio = ratio / _leafwise.debias(r.b1, k, dtype)
    ratio = ratio * clock.scale.astype(dtype)
    u = (ratio / (jnp.sqrt(v_new) + r.eps)).astype(kind) * m_new
    share = jnp.sum(spike).astype(jnp.float32) / max(g.size, 1)
    return (
        jnp.where(moves, u, 0),
        m_new.astype(m.dtype),
        v_new.astype(v.dtype),
        share,
    )
