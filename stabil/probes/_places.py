"""Where in a tensor something is: flat indices, found in the same pass.

A float32 holds whole numbers up to 2**24 exactly, so an index travels as two of them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes._sums import Elements, Quantities, Row, Sums, Term

_WORD = 2**16
NOWHERE = 2**31 - 1


def _join(high: jax.Array, low: jax.Array) -> jax.Array:
    return high.astype(jnp.int32) * _WORD + low.astype(jnp.int32)


def _split(index: jax.Array) -> Quantities:
    high, low = index // _WORD, index % _WORD
    return high.astype(jnp.float32), low.astype(jnp.float32)


def _column(e: Elements) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, e.raw.shape, e.raw.ndim - 1)


_SIZE = Term(lambda e: jnp.ones_like(e.raw), "add")


def _starts(size: jax.Array) -> jax.Array:
    """Where each part begins when all lie one after the other."""
    return jnp.cumsum(size, axis=0) - size


def _first(index: jax.Array, size: jax.Array, counts: jax.Array) -> Quantities:
    """The first index of the whole among those of the parts that count."""
    found = jnp.where(counts & (index < NOWHERE), index + _starts(size), NOWHERE)
    return *_split(jnp.min(found, axis=0)), *_split(jnp.sum(size, axis=0))


def _first_bad_column(e: Elements) -> jax.Array:
    return jnp.where(e.finite, jnp.inf, _column(e).astype(jnp.float32))


def _settle_bad(row: Row, sums: Quantities) -> Quantities:
    column, size = sums
    some = jnp.isfinite(column)
    index = jnp.where(some, jnp.where(some, column, 0).astype(jnp.int32), NOWHERE)
    return *_split(index), *_split(size.astype(jnp.int32))


def _merge_bad(weights: jax.Array, parts: Quantities) -> Quantities:
    index, size = _join(*parts[:2]), _join(*parts[2:])
    return _first(index, size, jnp.ones_like(index, bool))


def _magnitude_and_column(e: Elements) -> jax.Array:
    """A float whose upper half is that of |x|, and whose lower half is the column.

    Positive floats are in the order of their bits, so the largest of these is at the
    largest magnitude, to 7 bits of mantissa, and there at the lowest column.
    """
    size = lax.bitcast_convert_type(jnp.abs(e.value), jnp.int32)
    mixed = (size & ~(_WORD - 1)) | (_WORD - 1 - _column(e))
    return lax.bitcast_convert_type(mixed, jnp.float32)


def _settle_largest(row: Row, sums: Quantities) -> Quantities:
    mixed, size = sums
    bits = lax.bitcast_convert_type(mixed, jnp.int32)
    column = _WORD - 1 - (bits & (_WORD - 1))
    magnitude = lax.bitcast_convert_type(bits & ~(_WORD - 1), jnp.float32)
    some = (row.finite > 0) & (magnitude > 0)
    index = jnp.where(some, column, NOWHERE)
    largest = jnp.where(some, magnitude, 0)
    return largest, *_split(index), *_split(size.astype(jnp.int32))


def _merge_largest(weights: jax.Array, parts: Quantities) -> Quantities:
    magnitude, index, size = parts[0], _join(*parts[1:3]), _join(*parts[3:])
    largest = jnp.max(magnitude, axis=0)
    return largest, *_first(index, size, magnitude == largest)


def as_index(high: jax.Array, low: jax.Array) -> jax.Array:
    """The flat index as float32, NaN for nowhere."""
    index = _join(high, low)
    # A branch that did not run has NaN here.
    return jnp.where(
        (high >= 0) & (index < NOWHERE), index.astype(jnp.float32), jnp.nan
    )


def within(
    parts: Quantities, whole: Callable[[jax.Array], jax.Array], size: int
) -> Quantities:
    """Quantities of a device's part of a tensor, with places in the whole of it.

    Args:
      parts: as `FIRST_BAD` and `LARGEST_AT` settle them.
      whole: from flat indices in the part to those in the whole.
      size: entries of the whole.
    """
    *magnitude, high, low, _, _ = parts
    index = _join(high, low)
    some = index < NOWHERE
    index = jnp.where(some, whole(jnp.where(some, index, 0)), NOWHERE)
    return *magnitude, *_split(index), *_split(jnp.full_like(index, size))


def side_by_side(parts: Quantities) -> Quantities:
    """What `within` told, so that merging keeps the places as they are."""
    return *parts[:-2], *map(jnp.zeros_like, parts[-2:])


FIRST_BAD = Sums(
    (Term(_first_bad_column, "min"), _SIZE), _settle_bad, _merge_bad, 4, placed=True
)
LARGEST_AT = Sums(
    (Term(_magnitude_and_column, "max"), _SIZE),
    _settle_largest,
    _merge_largest,
    5,
    placed=True,
)
