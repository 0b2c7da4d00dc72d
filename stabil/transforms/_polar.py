"""Polar factor and stable rank of matrices by products alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# What a turn of `matrix_sign` assumes of the least singular value, at least: a smaller
# one would have it map the largest near 0, where rounding is large beside it.
LEAST = 0.05
# Above this the last turns take every direction to 1.
NEAR = 0.99
SHARPENING_TURNS = 3


def _gram(x: jax.Array) -> jax.Array:
    return jnp.matmul(x.mT.conj(), x, precision="highest")


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def _norm(x: jax.Array) -> jax.Array:
    square = jnp.square(jnp.abs(x))
    return jnp.sqrt(jnp.sum(square, axis=(-2, -1), keepdims=True))


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    return x / jnp.where(by > 0, by, jnp.ones_like(by)).astype(x.dtype)


def matrix_sign(w: jax.Array) -> jax.Array:
    """`U V^H` over the nonzero singular directions of each matrix, `[..., m, n]`.

    Scaled Newton-Schulz turns `x <- a x (3 - a^2 x^2) / 2`, `a^2 = 3 / (1 + l + l^2)`,
    bring singular values in `[l, 1]` closer to 1 and end once l is there. They begin
    with the cut, `l = 1e-5 ||W||_F` (1e-10 in float64): directions below it count as
    null, and rounding noise (about 1e-7 of the norm in float32) stays small among them.
    Then turns of `x <- (5 x^3 - 3 x^5) / 2`, which has both 0 and 1 as attracting fixed
    points, send those to 0, so that a null direction stays null and gets no arbitrary
    partner. A direction close to the cut may end in between.

    Source of the scaling: Chen and Chow, A stable scaling of Newton-Schulz for
    improving the sign function computation of a Hermitian matrix, 2014.

    Args:
      w: float32 or wider; finite. A zero matrix gives zeros.
    """
    tall = w.shape[-2] >= w.shape[-1]
    x = w if tall else w.mT.conj()
    x = _divided(x, jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0))
    x = _divided(x, _norm(x))
    # The root of the Gram matrix's norm bounds the largest singular value from above.
    most = jnp.sqrt(_norm(_gram(x)))
    cut = 1e-10 if most.dtype == jnp.float64 else 1e-5
    least = _divided(jnp.full_like(most, cut), most)

    def grow(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, least = carry
        low = jnp.maximum(least, LEAST)
        a = jnp.sqrt(3 / (1 + low + jnp.square(low)))
        b = a**3
        y = 1.5 * a.astype(x.dtype) * x - 0.5 * b.astype(x.dtype) * _times(x, _gram(x))
        return y, 1.5 * a * least - 0.5 * b * least**3

    def sharpen(_: int, x: jax.Array) -> jax.Array:
        gram = _gram(x)
        return _times(x, 2.5 * gram - 1.5 * _times(gram, gram))

    x, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1] < NEAR), grow, (_divided(x, most), least)
    )
    x = jax.lax.fori_loop(0, SHARPENING_TURNS, sharpen, x)
    return x if tall else x.mT.conj()


def restored(w: jax.Array) -> jax.Array:
    """`||W||_F / ||U V^H||_F * U V^H`, or W itself where it is zero or not finite."""
    ok = jnp.all(jnp.isfinite(w), axis=(-2, -1), keepdims=True)
    x = jnp.where(ok, w, jnp.zeros_like(w))
    sign = matrix_sign(x)
    top = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    unit = jnp.where(top > 0, top, jnp.ones_like(top))
    before, after = _norm(x / unit.astype(x.dtype)), _norm(sign)
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
    x = _divided(x, top)
    start = jax.random.normal(jax.random.key(0), (w.shape[-1], 1), jnp.float32)
    v = jnp.broadcast_to(start.astype(x.dtype), (*w.shape[:-2], w.shape[-1], 1))

    def turn(_: int, v: jax.Array) -> jax.Array:
        v = _times(x.mT.conj(), _times(x, v))
        return _divided(v, _norm(v))

    v = jax.lax.fori_loop(0, turns, turn, _divided(v, _norm(v)))
    spectral = jnp.sum(jnp.square(jnp.abs(_times(x, v))), axis=(-2, -1))
    total = jnp.sum(jnp.square(jnp.abs(x)), axis=(-2, -1))
    return total / jnp.where(spectral > 0, spectral, jnp.ones_like(spectral))
