"""Quantiles of magnitudes, from a histogram of a strided sample.

A bin is one sixteenth of an octave's lower end: the exponent and the first four bits of
the mantissa. Bins are counted down from the largest that the sample holds, so a
histogram has few of them at any scale, and two of them merge by moving one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes._sums import Quantities, Row, Sums

SAMPLE = 2**14  # entries, from half to twice as many
OCTAVES, PER_OCTAVE = 20, 16
BINS = OCTAVES * PER_OCTAVE
_SHIFT = 19  # bits of a float32 below those that name its bin


def stride(size: int) -> int:
    """Steps from one sampled entry to the next.

    It has no factor in common with the size: a stride that divides the width would
    visit few of the channels, and never the others.

    Examples:
      >>> stride(100), stride(2**21), stride(19200)
      (1, 129, 1)
    """
    usual = max(-(-size // SAMPLE), 1)
    others = (*range(usual, 2 * usual), *range(usual, 0, -1))
    return next((k for k in others if math.gcd(k, size) == 1), 1)


def sample(x: jax.Array, rows: int) -> jax.Array:
    """A sample of `x` as float32 `[lines, rows]`, filled up with NaN."""
    some = x.reshape(-1)[:: stride(x.size)].astype(jnp.float32)
    fill = -some.size % rows
    full = jnp.concatenate([some, jnp.full([fill], jnp.nan, jnp.float32)])
    return full.reshape(-1, rows)


def _settle(row: Row, lines: Quantities) -> Quantities:
    """Largest bin, and the share of the sample in each bin or a larger one."""
    x = jnp.stack(lines)
    x = x.reshape(-1, *x.shape[2:])  # sample first, tensors after
    seen = jnp.isfinite(x)
    bits = lax.bitcast_convert_type(jnp.abs(jnp.where(seen, x, 0)), jnp.int32)
    place = jnp.where(seen, bits >> _SHIFT, -1)
    top = jnp.max(place, axis=0)
    down = jnp.where(seen & (place > 0), top - place, BINS)
    tensors = jnp.arange(down[0].size)[None]
    counts = jnp.zeros([down[0].size, BINS], jnp.float32)
    counts = counts.at[tensors, down.reshape(len(down), -1)].add(1.0, mode="drop")
    counts = counts.reshape(*top.shape, BINS)
    total = jnp.maximum(jnp.sum(seen, axis=0), 1).astype(jnp.float32)
    tails = jnp.cumsum(counts, axis=-1) / total[..., None]
    return top.astype(jnp.float32), tails


def _merge(weights: jax.Array, parts: Quantities) -> Quantities:
    top, tails = parts
    weights = jnp.where(top >= 0, weights, 0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=0), 1e-30)
    whole = jnp.max(jnp.where(weights > 0, top, -1), axis=0)
    back = jnp.arange(BINS) - (whole - top).astype(jnp.int32)[..., None]
    moved = jnp.take_along_axis(tails, jnp.clip(back, 0, BINS - 1), axis=-1)
    moved = jnp.where(back >= 0, moved, 0)
    return whole, jnp.sum(weights[..., None] * moved, axis=0)


def quantile(level: float, absmax: jax.Array, quantities: Quantities) -> jax.Array:
    """The middle of the bin that holds the quantile; 0 below all bins."""
    top, tails = quantities
    held = tails > 1 - level
    down = jnp.argmax(held, axis=-1).astype(jnp.int32)
    bits = ((top.astype(jnp.int32) - down) << _SHIFT) + (1 << (_SHIFT - 1))
    middle = lax.bitcast_convert_type(bits, jnp.float32)
    value = jnp.where(jnp.any(held, axis=-1), jnp.minimum(middle, absmax), 0)
    return jnp.where(top >= 0, value, jnp.nan)


MAGNITUDES = Sums((), _settle, _merge, width=1 + BINS, wide=BINS, sampled=True)
