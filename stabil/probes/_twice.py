"""The pass over tensors with a surprise, where a quick one did not do.

The first read counts what is not finite and finds the largest magnitude; the second
and third take sums of the rest in a unit near it, so that no square can overflow and
none that matters is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stabil.probes import _quick
from stabil.probes._sums import LARGEST, Quantities

ROW = 4096  # entries that one accumulator adds up

_Term = tuple[Callable[[jax.Array], jax.Array], str]

_FIRST: dict[str, _Term] = {
    "nan": (lambda x: jnp.isnan(x).astype(jnp.float32), "add"),
    "inf": (lambda x: jnp.isinf(x).astype(jnp.float32), "add"),
    "absmax": (lambda x: jnp.where(jnp.isfinite(x), jnp.abs(x), 0), "max"),
    "posinf": (lambda x: (x == jnp.inf).astype(jnp.float32), "add"),
    "zero": (lambda x: (x == 0).astype(jnp.float32), "add"),
    "min": (lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf), "min"),
    "max": (lambda x: jnp.where(jnp.isfinite(x), x, -jnp.inf), "max"),
    "least": (
        lambda x: jnp.where(jnp.isfinite(x) & (x != 0), jnp.abs(x), jnp.inf),
        "min",
    ),
}


def run(
    x: jax.Array, size: jax.Array, groups: tuple[str, ...]
) -> tuple[jax.Array, dict[str, Quantities]]:
    """Finite entries of a real tensor, and quantities by group, as `_reduce.settle`.

    Args:
      x: a tensor that has entries.
      size: how many, float32 scalar.
      groups: names of `SUMS` that the quick pass covers.
    """
    raw = x.reshape(-1).astype(jnp.float32)
    names = tuple(n for n in _FIRST if n in groups or n in ("nan", "inf", "absmax"))
    columns = [_FIRST[n][0](raw) for n in names]
    found = _total(columns, tuple(_FIRST[n][1] for n in names))
    parts: dict[str, Quantities] = {
        n: (q,) for n, q in zip(names, found, strict=True) if n in groups
    }
    known = dict(zip(names, found, strict=True))
    n = size - known["nan"] - known["inf"]
    share = 1 / jnp.maximum(n, 1)
    up, down = _unit(known["absmax"])
    finite = jnp.isfinite(raw)
    v = jnp.where(finite, raw * up, 0)
    total, size, square = _total([v, jnp.abs(v), jnp.square(v)], ("add",) * 3)
    if "mean_abs" in groups:
        parts["mean_abs"] = (_scaled(size * share, down),)
    if "rms" in groups:
        parts["rms"] = (_scaled(jnp.sqrt(square * share), down),)
    if "moments" in groups:
        mean = total * share
        apart = jnp.where(finite, v - mean, 0)
        (spread,) = _total([jnp.square(apart)], ("add",))
        std = jnp.sqrt(spread * share)
        parts["moments"] = (_scaled(mean, down), _scaled(std, down))
    return n, parts


def _unit(absmax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two that brings the largest entry near 1, and its inverse."""
    bits = jax.lax.bitcast_convert_type(absmax, jnp.int32) >> 23
    # Both are normal numbers: denormals are zero to the CPU compiler.
    exponent = jnp.clip(bits, 1, 253)
    exponent = jnp.where(absmax > 0, exponent, 127)

    def power(biased: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)

    return power(254 - exponent), power(exponent)


def _scaled(x: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.clip(x * down, -LARGEST, LARGEST)


def _total(columns: list[jax.Array], kinds: tuple[str, ...]) -> list[jax.Array]:
    """Flat columns to scalars, in rows, all in one read."""
    while columns[0].size > 1:
        row = min(columns[0].size, ROW)
        fill = -columns[0].size % row
        rows = [
            jnp.pad(c, (0, fill), constant_values=_quick.START[k]).reshape(-1, row)
            for c, k in zip(columns, kinds, strict=True)
        ]
        columns = _quick.reduce(rows, kinds, (1,))
    return [c.reshape([]) for c in columns]
