"""The kinds of fault, as functions of one array."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from stabil.testing.inject._fault import Fault

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def takes(fault: Fault, leaf: Any) -> bool:
    """Whether `leaf` is an array that the fault's kind can strike.

    Floating arrays take every kind, complex ones all but `bit_flip`, integer ones
    `bit_flip` and `garbage`; anything else takes none.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0 or leaf.size == 0:
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return fault.kind in ("bit_flip", "garbage")
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return fault.kind != "bit_flip"
    return jnp.issubdtype(dtype, jnp.floating)


def corrupt(fault: Fault, step: Any, name: str, leaf: Any) -> jax.Array:
    """`leaf` as the fault leaves it at `step`; shape and dtype stay.

    Args:
      fault: a fault whose kind the leaf takes.
      step: int scalar, traced or not; with `name` and the seed it decides the draws.
      name: the leaf's slash path.
      leaf: the array to strike.
    """
    x = jnp.asarray(leaf)
    key = jax.random.key(fault.seed, impl="threefry2x32")
    key = jax.random.fold_in(key, jnp.asarray(step, jnp.uint32))
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    if not 0 < fault.entries < x.size:
        return _strike(fault, key, x)
    # One entry from each of `entries` equal stretches: distinct, and cheap to draw.
    stretch = x.size // fault.entries
    starts = stretch * jnp.arange(fault.entries)
    draw = jax.random.randint(jax.random.fold_in(key, 1), [fault.entries], 0, stretch)
    flat, chosen = x.reshape(-1), starts + draw
    return flat.at[chosen].set(_strike(fault, key, flat[chosen])).reshape(x.shape)


def _strike(fault: Fault, key: jax.Array, x: jax.Array) -> jax.Array:
    if fault.kind in ("nan", "inf"):
        return jnp.full_like(x, jnp.nan if fault.kind == "nan" else jnp.inf)
    if fault.kind == "scale":
        return x * jnp.asarray(1000.0 if fault.size is None else fault.size, x.dtype)
    if fault.kind == "bit_flip":
        return _flip(fault, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        wide = jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32
        scale = jnp.asarray(1.0 if fault.size is None else fault.size, wide)
        return (jax.random.normal(key, x.shape, wide) * scale).astype(x.dtype)
    if fault.size is None:
        raise ValueError(
            f"needed size=, the exclusive upper bound of garbage in {x.dtype} entries, "
            "got None; write the size of the vocabulary, for example size=256"
        )
    return jax.random.randint(key, x.shape, 0, int(fault.size)).astype(x.dtype)


def _flip(fault: Fault, x: jax.Array) -> jax.Array:
    bits = 8 * x.dtype.itemsize
    bit = bits - 2 if fault.size is None else int(fault.size)
    if bit >= bits:
        raise ValueError(
            f"needed size= below {bits}, a bit of {x.dtype}, got {bit}; the lowest "
            "bit is 0"
        )
    unsigned = UNSIGNED[x.dtype.itemsize]
    flipped = jax.lax.bitcast_convert_type(x, unsigned) ^ unsigned(1 << bit)
    return jax.lax.bitcast_convert_type(flipped, x.dtype)
