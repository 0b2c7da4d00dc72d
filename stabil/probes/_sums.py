"""What one pass adds up, and how the parts of a tensor merge without overflow.

A `Term` is one float32 accumulator of the pass. A `Sums` is a group of terms with two
rules: `settle` turns the accumulators of one row into quantities that cannot overflow,
and `merge` combines those quantities exactly over rows, micro-batches or devices,
weighted by the number of finite elements behind each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Quantities = tuple[jax.Array, ...]

# Magnitudes from `WIDE` on are squared in a second accumulator, scaled down; the rest
# is scaled up. Together they hold rows of 2**16 finite float32 from 2**-108 to the
# largest without overflow, and without loss of the small ones.
WIDE, UP, DOWN = 2.0**10, 2.0**45, 2.0**-73
# A row's plain sum is kept this much smaller, so that 2**16 of the largest fit.
SUM_DOWN = 2.0**-17
LARGEST_PILOT = 2.0**100
LARGEST = float(np.finfo(np.float32).max)


class Elements(NamedTuple):
    """One tensor, element by element, as a `Term` sees it; all float32 or bool.

    Attributes:
      raw: the values as they came, NaN and Inf included.
      finite: whether each value is finite.
      value: the values, 0 where not finite.
      shifted: values minus the pilot of their row, 0 where not finite.
    """

    raw: jax.Array
    finite: jax.Array
    value: jax.Array
    shifted: jax.Array


class Term(NamedTuple):
    """One accumulator: what each element adds, and how two partial results combine.

    Attributes:
      of: elementwise, from `Elements` to float32 of the same shape.
      combine: `add`, `min` or `max`.
    """

    of: Callable[[Elements], jax.Array]
    combine: str


class Row(NamedTuple):
    """What `settle` is told of each row, float32 `[rows]`.

    Attributes:
      finite: number of finite elements.
      pilot: the value that `Elements.shifted` was shifted by.
    """

    finite: jax.Array
    pilot: jax.Array


@dataclasses.dataclass(frozen=True)
class Sums:
    """A group of accumulators that settle and merge together.

    Attributes:
      terms: the accumulators.
      settle: from the row facts and one float32 `[rows]` per term to the group's
        quantities, each `[rows]`.
      merge: from weights `[parts, ...]` (each part's share of the finite elements,
        summing to 1 over axis 0, or all 0) and the quantities `[parts, ...]` to the
        quantities of the whole `[...]`.
      width: number of quantities.
      shifted: whether a term reads `Elements.shifted`.
      wide: how many of `width` are one vector, the last quantity `[..., wide]`.
      sampled: whether `settle` is told lines of a sample `[rows]` in place of terms,
        and makes of them the quantities of the whole tensor.
      placed: whether the quantities tell where in the whole tensor an entry is; the
        last two are then its size, as `_places` has it.
    """

    terms: tuple[Term, ...]
    settle: Callable[[Row, Quantities], Quantities]
    merge: Callable[[jax.Array, Quantities], Quantities]
    width: int = 1
    shifted: bool = False
    wide: int = 0
    sampled: bool = False
    placed: bool = False


def _keep(row: Row, sums: Quantities) -> Quantities:
    return sums


def _total(weights: jax.Array, parts: Quantities) -> Quantities:
    return tuple(jnp.sum(p, axis=0) for p in parts)


def _lowest(weights: jax.Array, parts: Quantities) -> Quantities:
    return tuple(jnp.min(p, axis=0) for p in parts)


def _highest(weights: jax.Array, parts: Quantities) -> Quantities:
    return tuple(jnp.max(p, axis=0) for p in parts)


def _mean(row: Row, total: jax.Array) -> jax.Array:
    return total / jnp.maximum(row.finite, 1)


def share(of: Callable[[Elements], jax.Array]) -> Sums:
    """Sums for the share of finite elements for which `of` holds."""
    return Sums(
        (Term(lambda e: _as_float(of(e) & e.finite), "add"),),
        lambda row, sums: (_mean(row, sums[0]),),
        lambda weights, parts: (jnp.sum(weights * parts[0], axis=0),),
    )


def plain(of: Callable[[Elements], jax.Array], combine: str) -> Sums:
    """Sums of one term that merge the way they add up."""
    merge = {"add": _total, "min": _lowest, "max": _highest}[combine]
    term = Term(lambda e: jnp.asarray(of(e)).astype(jnp.float32), combine)
    return Sums((term,), _keep, merge)


def _as_float(predicate: jax.Array) -> jax.Array:
    return predicate.astype(jnp.float32)


def _squares(of: Callable[[Elements], jax.Array]) -> tuple[Term, Term]:
    """Two accumulators that together hold the sum of squares of any finite row."""

    def small(e: Elements) -> jax.Array:
        v = of(e)
        return jnp.square(jnp.where(jnp.abs(v) < WIDE, v * UP, 0))

    def large(e: Elements) -> jax.Array:
        v = of(e)
        return jnp.square(jnp.where(jnp.abs(v) < WIDE, 0, v * DOWN))

    return Term(small, "add"), Term(large, "add")


def _root_mean(n: jax.Array, small: jax.Array, large: jax.Array) -> jax.Array:
    # Roots before the division: a quotient of the large part would be a denormal.
    root_n = jnp.sqrt(jnp.maximum(n, 1))
    low, high = jnp.sqrt(small) / root_n / UP, jnp.sqrt(large) / root_n / DOWN
    return jnp.minimum(_hypot(low, high), LARGEST)


def _hypot(a: jax.Array, b: jax.Array) -> jax.Array:
    """sqrt(a^2 + b^2) of non-negative numbers, without the squares."""
    small, large = jnp.minimum(a, b), jnp.maximum(a, b)
    near = jnp.where(large > 1, 2.0**-64, 2.0**64).astype(jnp.float32)
    ratio = small * near / jnp.where(large > 0, large * near, 1)
    return large * jnp.sqrt(1 + ratio * ratio)


def _root_of_mean_squares(weights: jax.Array, roots: jax.Array) -> jax.Array:
    """Square root of the weighted mean of squares over axis 0, without the squares."""
    scale = jnp.max(jnp.where(weights > 0, roots, 0), axis=0)
    # Near 1 before the division: a reciprocal of the largest floats is a denormal.
    near = jnp.where(scale > 1, 2.0**-64, 2.0**64).astype(jnp.float32)
    divisor = jnp.where(scale > 0, scale * near, 1)
    ratio = jnp.where(weights > 0, roots * near / divisor, 0)
    return jnp.minimum(scale * jnp.sqrt(jnp.sum(weights * ratio**2, axis=0)), LARGEST)


def _settle_rms(row: Row, sums: Quantities) -> Quantities:
    return (_root_mean(row.finite, *sums),)


def _merge_rms(weights: jax.Array, parts: Quantities) -> Quantities:
    return (_root_of_mean_squares(weights, parts[0]),)


def _settle_moments(row: Row, sums: Quantities) -> Quantities:
    total, small, large = sums
    n = jnp.maximum(row.finite, 1)
    offset = total / n / SUM_DOWN
    root, aside = _root_mean(n, small, large) / 2, jnp.abs(offset) / 2
    # E[d^2] - E[d]^2 as a product, so that no square is formed.
    std = 2 * jnp.sqrt(jnp.maximum(root - aside, 0)) * jnp.sqrt(root + aside)
    mean = jnp.clip(row.pilot + offset, -LARGEST, LARGEST)
    return mean, jnp.minimum(std, LARGEST)


def _merge_moments(weights: jax.Array, parts: Quantities) -> Quantities:
    """Chan's pairwise rule for all parts at once, on quarters: nothing overflows."""
    mean, std = (p / 4 for p in parts)
    seen = weights > 0
    # Deviations from one part's mean: differences of near-equal means stay exact.
    base = jnp.take_along_axis(mean, jnp.argmax(seen, axis=0)[None], axis=0)
    apart = jnp.where(seen, mean - base, 0)
    centre = jnp.sum(weights * apart, axis=0)
    spread = jnp.concatenate([jnp.where(seen, std, 0), jnp.abs(apart - centre)])
    both = jnp.concatenate([weights, weights])
    whole = jnp.clip(base[0] + centre, -LARGEST / 4, LARGEST / 4)
    # The root is at most sqrt(2) times the largest float; the spread of float32
    # values is at most the largest float.
    dev = jnp.minimum(_root_of_mean_squares(both, spread), LARGEST / 4)
    return 4 * whole, 4 * dev


_shifted = _squares(lambda e: e.shifted)

SUMS: dict[str, Sums] = {
    "nan": Sums((Term(lambda e: _as_float(jnp.isnan(e.raw)), "add"),), _keep, _total),
    "inf": Sums((Term(lambda e: _as_float(jnp.isinf(e.raw)), "add"),), _keep, _total),
    "zero": Sums((Term(lambda e: _as_float(e.raw == 0), "add"),), _keep, _total),
    "min": Sums(
        (Term(lambda e: jnp.where(e.finite, e.raw, jnp.inf), "min"),), _keep, _lowest
    ),
    "max": Sums(
        (Term(lambda e: jnp.where(e.finite, e.raw, -jnp.inf), "max"),), _keep, _highest
    ),
    "posinf": Sums(
        (Term(lambda e: _as_float(e.raw == jnp.inf), "add"),), _keep, _total
    ),
    "absmax": Sums((Term(lambda e: jnp.abs(e.value), "max"),), _keep, _highest),
    # The smallest magnitude that is not zero; infinite where there is none.
    "least": Sums(
        (
            Term(
                lambda e: jnp.where(e.finite & (e.raw != 0), jnp.abs(e.raw), jnp.inf),
                "min",
            ),
        ),
        _keep,
        _lowest,
    ),
    "mean_abs": Sums(
        (Term(lambda e: jnp.abs(e.value) * SUM_DOWN, "add"),),
        lambda row, sums: (_mean(row, sums[0]) / SUM_DOWN,),
        lambda weights, parts: (jnp.sum(weights * parts[0], axis=0),),
    ),
    "rms": Sums(_squares(lambda e: e.value), _settle_rms, _merge_rms),
    "moments": Sums(
        (Term(lambda e: e.shifted * SUM_DOWN, "add"), *_shifted),
        _settle_moments,
        _merge_moments,
        width=2,
        shifted=True,
    ),
}
