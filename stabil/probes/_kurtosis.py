"""Central moments up to the fourth, of values at any scale that float32 holds.

A fourth power spans four times the octaves of its number, so the values are raised in
several accumulators, each for its own band of magnitudes. What a row is told as, and
what is merged, are roots in the unit of the values: nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stabil.probes import _sums
from stabil.probes._sums import LARGEST_PILOT, Elements, Quantities, Row, Sums, Term

# All moments are kept in sixteenths: sums and differences of the largest floats fit.
SIXTEENTH = 2.0**-4
# Upper ends of the bands of magnitude, as powers of two, and the power that each end is
# scaled to: 2**16 of the largest fit into one sum, and the smallest is not lost.
_FOURTHS, _FOURTH_TOP = (128, 77, 26, -25, -76), 27
_CUBES, _CUBE_TOP = (128, 64, 0, -64), 36
# Below this share of the mean a spread is rounding, and its shape means nothing.
RESOLUTION, COARSE_RESOLUTION = 2.0**-20, 2.0**-10


def _banded(
    ends: tuple[int, ...], top: int, power: Callable[[jax.Array], jax.Array]
) -> tuple[Term, ...]:
    """One accumulator of powers for each band of magnitudes."""

    def term(high: int, low: int | None) -> Term:
        def of(e: Elements) -> jax.Array:
            size = jnp.abs(e.shifted)
            inside = size < 2.0**high if high < 128 else jnp.ones_like(size, bool)
            if low is not None:
                inside &= size >= 2.0**low
            return power(jnp.where(inside, e.shifted, 0) * 2.0 ** (top - high))

        return Term(of, "add")

    lows = (*ends[1:], None)
    return tuple(term(h, low) for h, low in zip(ends, lows, strict=True))


def _fourth(x: jax.Array) -> jax.Array:
    return jnp.square(jnp.square(x))


def _fourth_root(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sqrt(jnp.maximum(x, 0)))


def _cube(x: jax.Array) -> jax.Array:
    return x * x * x


def _over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale`, 0 where the scale is."""
    return x / jnp.where(scale > 0, scale, 1)


def _settle(row: Row, sums: Quantities) -> Quantities:
    """Mean, and the roots of the second, third and fourth central moments."""
    (total, small, large), sums = sums[:3], sums[3:]
    fourths, cubes = sums[: len(_FOURTHS)], sums[len(_FOURTHS) :]
    n = jnp.maximum(row.finite, 1)
    offset = total / n / _sums.SUM_DOWN
    roots = [
        _fourth_root(s / n) * 2.0 ** (end - _FOURTH_TOP - 4)
        for s, end in zip(fourths, _FOURTHS, strict=True)
    ]
    most = jnp.max(jnp.stack(roots), axis=0)
    scale = most * _fourth_root(sum(_fourth(_over(r, most)) for r in roots))
    # Moments about the pilot, in units of the root of the fourth, the largest of them.
    first = _over(offset * SIXTEENTH, scale)
    root = _over(_sums._root_mean(n, small, large) * SIXTEENTH, scale)
    third = sum(
        _cube(_over(jnp.cbrt(s / n) * 2.0 ** (end - _CUBE_TOP - 4), scale))
        for s, end in zip(cubes, _CUBES, strict=True)
    )
    square, second = jnp.square(first), jnp.square(root)
    variance = jnp.maximum(root - jnp.abs(first), 0) * (root + jnp.abs(first))
    skew = third - 3 * first * second + 2 * first * square
    tail = 1 - 4 * first * third + 6 * square * second - 3 * jnp.square(square)
    mean = row.pilot * SIXTEENTH + offset * SIXTEENTH
    return (
        mean,
        scale * jnp.sqrt(variance),
        scale * jnp.cbrt(skew),
        scale * _fourth_root(jnp.maximum(tail, jnp.square(variance))),
    )


def _merge(weights: jax.Array, parts: Quantities) -> Quantities:
    """The pairwise rules for central moments, for all parts at once."""
    mean, std, skew, tail = parts
    seen = weights > 0
    # Deviations from one part's mean: differences of near-equal means stay exact.
    base = jnp.take_along_axis(mean, jnp.argmax(seen, axis=0)[None], axis=0)
    apart = jnp.where(seen, mean - base, 0)
    centre = jnp.sum(weights * apart, axis=0)
    apart = jnp.where(seen, apart - centre, 0)
    sizes = jnp.maximum(jnp.abs(apart), jnp.where(seen, tail, 0))
    scale = jnp.max(sizes, axis=0)

    def part(x: jax.Array) -> jax.Array:
        return _over(jnp.where(seen, x, 0), scale)

    d, second = part(apart), jnp.square(part(std))
    third, fourth = _cube(part(skew)), _fourth(part(tail))
    square = jnp.square(d)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(weights * x, axis=0)

    return (
        base[0] + centre,
        scale * jnp.sqrt(total(second + square)),
        scale * jnp.cbrt(total(third + 3 * d * second + d * square)),
        scale
        * _fourth_root(
            total(fourth + 4 * d * third + 6 * square * second + jnp.square(square))
        ),
    )


def excess_kurtosis(quantities: Quantities) -> jax.Array:
    """Fourth standardised moment less 3; NaN where the spread is rounding."""
    mean, std, _, tail = quantities
    coarse = jnp.abs(mean) >= LARGEST_PILOT * SIXTEENTH
    least = jnp.abs(mean) * jnp.where(coarse, COARSE_RESOLUTION, RESOLUTION)
    spread = std > least
    return jnp.where(spread, _fourth(tail / jnp.where(spread, std, 1)) - 3, jnp.nan)


FOURTH_MOMENT = Sums(
    (
        *_sums.SUMS["moments"].terms,
        *_banded(_FOURTHS, _FOURTH_TOP, _fourth),
        *_banded(_CUBES, _CUBE_TOP, _cube),
    ),
    _settle,
    _merge,
    width=4,
    shifted=True,
)
