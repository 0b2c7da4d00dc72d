"""Strikes leaves by a kind, a size and a number of entries that are arrays.

Plain arithmetic on each entry's number, and one select among the kinds: a campaign
compiles this once for every place that can be struck.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil.testing.inject._corrupt import UNSIGNED
from stabil.testing.inject._fault import KINDS

_ROW = 4096  # entries


def strike_all(
    how: tuple[jax.Array, jax.Array, jax.Array],
    seed: jax.Array,
    leaves: list[jax.Array],
    hits: jax.Array,
) -> list[jax.Array]:
    """The leaves with their struck entries.

    Args:
      how: kind, size and entries, as `Dial` holds them.
      seed: uint32 scalar, decides the draws.
      leaves: arrays; those of one dtype are struck as one flat vector.
      hits: bool `[leaves]`.
    """
    out = list(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        if not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "iu"):
            continue  # booleans, keys and complex numbers are left alone
        group = [i for i, x in enumerate(leaves) if x.dtype == dtype and x.size]
        if not group:
            continue
        sizes = np.array([leaves[i].size for i in group])
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
        flat = _struck(how, seed, flat, sizes, hits[np.array(group)])
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        for i, part in zip(group, parts, strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return out


def _struck(
    how: tuple[jax.Array, jax.Array, jax.Array],
    seed: jax.Array,
    flat: jax.Array,
    sizes: np.ndarray,
    hits: jax.Array,
) -> jax.Array:
    """A vector of leaves end to end, struck row by row: a loop is compiled once."""
    kind, size, entries = how
    ends = jnp.asarray(np.cumsum(sizes), jnp.uint32)
    lengths = jnp.asarray(sizes, jnp.uint32)

    def strike_row(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, x = given
        last = number[:, None] >= ends[:-1]
        owner = jnp.sum(last, axis=1, dtype=jnp.int32)
        place = number - (ends - lengths)[owner]
        chosen = _is_some(entries, seed, number, place, lengths[owner])
        found = _by_kind(kind, size, seed, number, x)
        return jnp.where(hits[owner] & chosen, found, x)

    width = min(_ROW, flat.size)
    rows = -(-flat.size // width)
    padded = jnp.pad(flat, (0, rows * width - flat.size))
    number = jax.lax.iota(jnp.uint32, padded.size)
    given = (number.reshape(rows, width), padded.reshape(rows, width))
    return jax.lax.map(strike_row, given).reshape(-1)[: flat.size]


def _is_some(
    entries: jax.Array,
    seed: jax.Array,
    number: jax.Array,
    place: jax.Array,
    size: jax.Array,
) -> jax.Array:
    """Marks `entries` entries of a leaf, or all: one in each equal stretch of it."""
    wanted, salt = jnp.maximum(entries, 1).astype(jnp.uint32), jnp.uint32(0x5BD1E995)
    length = jnp.maximum(size // wanted, jnp.uint32(1))
    stretch, offset = place // length, place % length
    drawn = _mixed(number - place + stretch, seed ^ salt) % length
    return (entries <= 0) | (stretch < wanted) & (offset == drawn)


def _mixed(number: jax.Array, seed: jax.Array) -> jax.Array:
    """Uniform uint32, one for each number: rounds of shift, xor and odd multiples."""
    x = number * jnp.uint32(0x9E3779B1) + seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x2C1B3C6D)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _normal(number: jax.Array, seed: jax.Array) -> jax.Array:
    """Nearly standard normal float32: the sum of eight uniform numbers."""
    total = jnp.zeros(number.shape, jnp.uint32)
    for _ in range(4):
        seed = _mixed(seed, jnp.uint32(1))
        drawn = _mixed(number, seed)
        total += (drawn >> 16) + (drawn & jnp.uint32(0xFFFF))
    mean, deviation = 4 * 65535.0, 65536 * np.sqrt(8 / 12)
    return ((total.astype(jnp.float32) - mean) / deviation).astype(jnp.float32)


def _by_kind(
    kind: jax.Array, size: jax.Array, seed: jax.Array, number: jax.Array, x: jax.Array
) -> jax.Array:
    given = dict(size=size, seed=seed, number=number)
    found = _of_integers(x, **given)
    if jnp.issubdtype(x.dtype, jnp.floating):
        found = _of_floats(x, **given)
    # A kind that the dtype does not take leaves it as it is.
    which = [kind == KINDS.index(name) for name in found]
    return jnp.select(which, list(found.values()), x)


def _of_floats(x: jax.Array, size: jax.Array, seed: Any, number: Any) -> dict[str, Any]:
    drawn = _normal(number, seed) * _or_default(size, 1.0)
    return {
        "nan": jnp.full_like(x, jnp.nan),
        "inf": jnp.full_like(x, jnp.inf),
        "bit_flip": _flipped(x, size),
        "scale": x * _or_default(size, 1000.0).astype(x.dtype),
        "garbage": drawn.astype(x.dtype),
    }


def _of_integers(
    x: jax.Array, size: jax.Array, seed: Any, number: Any
) -> dict[str, Any]:
    top = jnp.maximum(_or_default(size, 256.0), 1).astype(jnp.uint32)
    return {
        "bit_flip": _flipped(x, size),
        "garbage": (_mixed(number, seed) % top).astype(x.dtype),
    }


def _flipped(x: jax.Array, size: jax.Array) -> jax.Array:
    bits, unsigned = 8 * x.dtype.itemsize, UNSIGNED[x.dtype.itemsize]
    bit = jnp.clip(_or_default(size, bits - 2), 0, bits - 1).astype(unsigned)
    raw = jax.lax.bitcast_convert_type(x, unsigned)
    return jax.lax.bitcast_convert_type(raw ^ (unsigned(1) << bit), x.dtype)


def _or_default(size: jax.Array, value: float) -> jax.Array:
    return jnp.where(jnp.isnan(size), jnp.float32(value), size)
