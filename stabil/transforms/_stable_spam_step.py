"""One step of Stable-SPAM on one leaf."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from stabil.transforms import _adaptive_norm, _leafwise
from stabil.transforms._leafwise import debias

Parity = Literal["", "official", "pytorch_optimizer"]


class Leaf(NamedTuple):
    """The state of one leaf, without its counters."""

    mu: jax.Array
    nu: jax.Array
    spike_max: jax.Array
    norm_mean: jax.Array
    norm_square_mean: jax.Array
    samples: jax.Array


class Clock(NamedTuple):
    """What the counters say about this step; `[leaves]`, or one leaf's scalars."""

    reset: jax.Array
    old_age: jax.Array
    age: jax.Array
    scale: jax.Array


class Rates(NamedTuple):
    b1: float
    b2: float
    eps: float
    gammas: tuple[float, float, float]
    parity: Parity


def decay_scale(
    steps: jax.Array, total: int | None, eta_min: float, parity: Parity, dtype: Any
) -> jax.Array | None:
    """The factor s of beta1 and gamma1; None when it stays 1."""
    if total is None:
        return None
    angle = math.pi / (total + 1)
    if parity == "pytorch_optimizer":
        wave = (1 + jnp.cos((steps + 1).astype(dtype) * angle)) / (1 + math.cos(angle))
    else:
        t = steps if parity else jnp.minimum(steps, total)
        wave = (1 + jnp.cos(t.astype(dtype) * angle)) / 2
    return eta_min + (1 - eta_min) * wave


def step(
    g: jax.Array | None,
    leaf: Leaf,
    clock: Clock,
    shrink: jax.Array | None,
    r: Rates,
) -> tuple[jax.Array | None, Leaf]:
    """Update and new state of one leaf; None has no gradient."""
    if g is None:
        return None, leaf
    x, ok, samples = _adaptive_norm.prepare(
        g, leaf.spike_max, leaf.samples, r.parity != ""
    )
    kind, dtype = x.dtype, leaf.spike_max.dtype
    g1, b1 = r.gammas[0], r.b1
    if shrink is not None:
        g1, b1 = g1 * shrink.astype(dtype), b1 * shrink.astype(dtype)
    # The released code counts the samples of its statistics with Adam's counter.
    k = clock.old_age + 2 if r.parity == "official" else jnp.maximum(samples, 1)
    x, top = _adaptive_norm.adaclip(x, leaf.spike_max, ok, r.gammas[2], k)
    old = (leaf.norm_mean, leaf.norm_square_mean)
    x, averages, n = _adaptive_norm.adafn(x, old, ok, (g1, r.gammas[1]), k, r.eps)
    late = r.parity == "official"
    clear = clock.reset & (not late)
    m_old = jnp.where(clear, 0, leaf.mu.astype(kind))
    v_old = jnp.where(clear, 0, leaf.nu.astype(dtype))
    wide_b1 = b1 if shrink is None else jnp.asarray(b1, kind)
    m = wide_b1 * m_old + (1 - wide_b1) * x
    v = r.b2 * v_old + (1 - r.b2) * _leafwise.abs_square(x)
    moves = ok
    if r.parity == "pytorch_optimizer":
        moves = n > 0
        averages = tuple(
            jnp.where(moves, *pair) for pair in zip(averages, old, strict=True)
        )
    moves = _adaptive_norm.outer(moves, x)
    # Selected before they are used, for the same reason as in `_spam_step`.
    m, v = jnp.where(moves, m, m_old), jnp.where(moves, v, v_old)
    age = clock.age + 1
    root = jnp.sqrt(v) / jnp.sqrt(debias(r.b2, age, dtype)) + r.eps
    u = clock.scale.astype(dtype) / debias(b1, age, dtype) / root
    u = u.astype(kind) * m
    if late:
        m, v = jnp.where(clock.reset, 0, m), jnp.where(clock.reset, 0, v)
    new = Leaf(
        mu=m.astype(leaf.mu.dtype),
        nu=v.astype(leaf.nu.dtype),
        spike_max=top,
        norm_mean=averages[0],
        norm_square_mean=averages[1],
        samples=samples,
    )
    return jnp.where(moves, u, 0), new
