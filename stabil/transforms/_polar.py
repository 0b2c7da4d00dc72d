"""Polar factor and stable rank of matrices by products alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Plan(NamedTuple):
    """How many turns of each kind; see `matrix_sign`."""

    grow: int
    sharpen: int


def _plan(dtype: jnp.dtype) -> _Plan:
    # A Newton-Schulz turn multiplies a small singular value by 1.5. Directions below
    # the cut count as null: rounding noise (about 1e-7 of the norm in float32) must
    # stay below it after growing, and real directions should lie above it.
    cut = 1e-10 if dtype == jnp.float64 else 1e-5
    return _Plan(math.ceil(math.log(1 / cut) / math.log(1.5)) + 3, 6)


def _gram(x: jax.Array) -> jax.Array:
    return jnp.matmul(x.mT.conj(), x, precision="highest")


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def matrix_sign(w: jax.Array) -> jax.Array:
    """`U V^H` over the nonzero singular directions of each matrix, `[..., m, n]`.

    Newton-Schulz turns `x <- 1.5 x - 0.5 x^3` bring the singular values of
    `W / ||W||_F` to 1, except those that began below the cut of 1e-5 (1e-10 in
    float64). Then turns of `x <- (5 x^3 - 3 x^5) / 2`, which has both 0 and 1 as
    attracting fixed points, send those to 0, so that a null direction stays null and
    gets no arbitrary partner. A direction close to the cut may end in between.

    Args:
      w: float32 or wider; finite. A zero matrix gives zeros.
    """
    tall = w.shape[-2] >= w.shape[-1]
    x = w if tall else w.mT.conj()
    top = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    x = x / jnp.where(top > 0, top, jnp.ones_like(top)).astype(x.dtype)
    norm = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x)), axis=(-2, -1), keepdims=True))
    x = x / jnp.where(norm > 0, norm, jnp.ones_like(norm)).astype(x.dtype)
    plan = _plan(norm.dtype)

    def grow(_: int, x: jax.Array) -> jax.Array:
        return 1.5 * x - 0.5 * _times(x, _gram(x))

    def sharpen(_: int, x: jax.Array) -> jax.Array:
        gram = _gram(x)
        return _times(x, 2.5 * gram - 1.5 * _times(gram, gram))

    x = jax.lax.fori_loop(0, plan.grow, grow, x)
    x = jax.lax.fori_loop(0, plan.sharpen, sharpen, x)
    return x if tall else x.mT.conj()


def restored(w: jax.Array) -> jax.Array:
    """`||W||_F / ||U V^H||_F * U V^H`, or W itself where it is zero or not finite."""
    ok = jnp.all(jnp.isfinite(w), axis=(-2, -1), keepdims=True)
    x = jnp.where(ok, w, jnp.zeros_like(w))
    sign = matrix_sign(x)

    def norm(a: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(jnp.abs(a)), axis=(-2, -1), keepdims=True))

    top = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    unit = jnp.where(top > 0, top, jnp.ones_like(top))
    before, after = norm(x / unit.astype(x.dtype)), norm(sign)
    usable = ok & (before > 0) & (after > 0)
    ratio = before / jnp.where(usable, after, jnp.ones_like(after)) * unit
    return jnp.where(usable, sign * ratio.astype(w.dtype), w)


def stable_rank(w: jax.Array, turns: int = 20) -> jax.Array:
    """`||W||_F^2 / ||W||_2^2` of each matrix `[...]`; 0 where zero or not finite.

    The spectral norm comes from a power iteration, which finds it from below: with
    singular values that lie close together the result is a little too high.

    Args:
      w: float32 or wider, `[..., m, n]`.
      turns: power iterations.
    """
    ok = jnp.all(jnp.isfinite(w), axis=(-2, -1), keepdims=True)
    x = jnp.where(ok, w, jnp.zeros_like(w))
    top = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    x = x / jnp.where(top > 0, top, jnp.ones_like(top)).astype(x.dtype)
    start = jax.random.normal(jax.random.key(0), (w.shape[-1], 1), jnp.float32)
    v = jnp.broadcast_to(start.astype(x.dtype), (*w.shape[:-2], w.shape[-1], 1))

    def unit(v: jax.Array) -> jax.Array:
        size = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(v)), axis=-2, keepdims=True))
        return v / jnp.where(size > 0, size, jnp.ones_like(size)).astype(v.dtype)

    def turn(_: int, v: jax.Array) -> jax.Array:
        return unit(_times(x.mT.conj(), _times(x, v)))

    v = jax.lax.fori_loop(0, turns, turn, unit(v))
    spectral = jnp.sum(jnp.square(jnp.abs(_times(x, v))), axis=(-2, -1))
    total = jnp.sum(jnp.square(jnp.abs(x)), axis=(-2, -1))
    return total / jnp.where(spectral > 0, spectral, jnp.ones_like(spectral))
