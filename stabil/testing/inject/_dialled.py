"""Strikes leaves by a kind, a size and a number of entries that are arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil.testing.inject._corrupt import UNSIGNED
from stabil.testing.inject._fault import KINDS


def strike_all(
    how: tuple[jax.Array, jax.Array, jax.Array],
    key: jax.Array,
    leaves: list[jax.Array],
    hits: jax.Array,
) -> list[jax.Array]:
    """The leaves with their struck entries.

    Args:
      how: kind, size and entries, as `Dial` holds them.
      key: decides the draws.
      leaves: arrays; those of one dtype are struck as one flat vector.
      hits: bool `[leaves]`.
    """
    kind, size, entries = how
    out = list(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        if not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "iu"):
            continue  # booleans, keys and complex numbers are left alone
        group = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        sizes = [leaves[i].size for i in group]
        owner = np.repeat(np.arange(len(group)), sizes)
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
        few = _some_of_each(entries, jax.random.fold_in(key, 1), owner)
        chosen = hits[np.array(group)][owner] & ((entries == 0) | few)
        flat = jnp.where(chosen, _by_kind(kind, size, key, flat), flat)
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        for i, part in zip(group, parts, strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return out


def _some_of_each(entries: jax.Array, key: jax.Array, owner: np.ndarray) -> jax.Array:
    """Marks `entries` entries of each owner, drawn at random."""
    draw = jax.random.uniform(key, owner.shape)
    # An owner's entries lie together, so that the rank of an entry among them is its
    # place in the order less the place at which its owner begins.
    order = jnp.lexsort((draw, jnp.asarray(owner)))
    begins = np.searchsorted(owner, owner)
    return (
        jnp.zeros(owner.shape, bool)
        .at[order]
        .set(np.arange(owner.size) - begins < entries)
    )


def _by_kind(kind: jax.Array, size: jax.Array, key: jax.Array, x: jax.Array) -> Any:
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    bits = 8 * x.dtype.itemsize

    def or_default(value: float) -> jax.Array:
        return jnp.where(jnp.isnan(size), jnp.float32(value), size)

    def flip(x: jax.Array) -> jax.Array:
        unsigned = UNSIGNED[x.dtype.itemsize]
        bit = jnp.clip(or_default(bits - 2), 0, bits - 1).astype(unsigned)
        raw = jax.lax.bitcast_convert_type(x, unsigned)
        return jax.lax.bitcast_convert_type(raw ^ (unsigned(1) << bit), x.dtype)

    def garbage(x: jax.Array) -> jax.Array:
        if not floats:
            top = jnp.maximum(or_default(256), 1).astype(jnp.int32)
            return jax.random.randint(key, x.shape, 0, top).astype(x.dtype)
        drawn = jax.random.normal(key, x.shape, jnp.float32) * or_default(1.0)
        return drawn.astype(x.dtype)

    def only_floats(strike: Any) -> Any:
        return strike if floats else (lambda x: x)

    by_name = {
        "nan": only_floats(lambda x: jnp.full_like(x, jnp.nan)),
        "inf": only_floats(lambda x: jnp.full_like(x, jnp.inf)),
        "bit_flip": flip,
        "scale": only_floats(lambda x: x * or_default(1000.0).astype(x.dtype)),
        "garbage": garbage,
    }
    return jax.lax.switch(kind, [by_name[name] for name in KINDS], x)
