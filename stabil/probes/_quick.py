"""The pass over tensors without a surprise: few accumulators, and a check of them.

Where every entry is finite and of a usual size, counts are known, one sum of squares
holds without scaling, and one shift serves the whole tensor. The check says whether
that was so; `_twice` measures the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Squares are of values scaled up: exact to float32 from 2**-70 to 2**34 and beyond.
UP = 2.0**20
LEAST_SQUARE = 2.0**-100
# Of the mean square about the shift, at least this much must be the variance.
LEAST_SPREAD = 2.0**-7
# A reduction of so few entries is unrolled and vectorised by the CPU compiler.
FOLD, SHORT = 8, 4096

_OF: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], str]] = {
    "square": (lambda v, d: jnp.square(d * UP), "add"),
    "sum": (lambda v, d: d, "add"),
    "least": (lambda v, d: jnp.where(v == 0, jnp.inf, jnp.abs(v)), "min"),
    "low": (lambda v, d: v, "min"),
    "high": (lambda v, d: v, "max"),
    "absmax": (lambda v, d: jnp.abs(v), "max"),
    "abs": (lambda v, d: jnp.abs(v), "add"),
    "zero": (lambda v, d: (v == 0).astype(jnp.float32), "add"),
}
_COMBINE = {"add": lax.add, "min": lax.min, "max": lax.max}
START = {"add": 0.0, "min": math.inf, "max": -math.inf}

# What each group of `SUMS` needs.
_NEEDS: dict[str, tuple[str, ...]] = {
    "nan": (),
    "inf": (),
    "posinf": (),
    "zero": ("zero",),
    "min": ("low",),
    "max": ("high",),
    "absmax": ("absmax",),
    "least": ("least",),
    "mean_abs": ("abs",),
    "rms": (),
    "moments": ("sum", "low", "high"),
}


class Pass(NamedTuple):
    """What one pass over a tensor found.

    Attributes:
      shift: float32 scalar that the sums are taken about.
      sums: float32 scalar for each name of `terms_of`.
    """

    shift: jax.Array
    sums: tuple[jax.Array, ...]


def covers(group: str) -> bool:
    """Whether this pass can tell the quantities of a group."""
    return group in _NEEDS


def terms_of(groups: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the accumulators for `groups`."""
    needed = {"square"}.union(*(_NEEDS[g] for g in groups))
    if not {"low", "high"} <= needed:
        needed.add("absmax")
    else:
        needed.discard("absmax")
    return tuple(name for name in _OF if name in needed)


def run(x: jax.Array, groups: tuple[str, ...]) -> Pass:
    """One pass over a real tensor that has entries."""
    terms = terms_of(groups)
    shift = _shift(x) if "sum" in terms else jnp.zeros([], jnp.float32)
    return Pass(shift, tuple(_fold(x.reshape(-1), shift, terms)))


def _shift(x: jax.Array) -> jax.Array:
    """The median of three entries: near the bulk of them, and seldom an outlier."""
    flat, n = x.reshape(-1), x.size
    a, b, c = (flat[i].astype(jnp.float32) for i in (0, n // 2, n - 1))
    return jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))


def _terms(x: jax.Array, shift: jax.Array, names: tuple[str, ...]) -> list[jax.Array]:
    v = x.astype(jnp.float32)
    return [_OF[name][0](v, v - shift) for name in names]


def reduce(
    columns: list[jax.Array], kinds: tuple[str, ...], axes: tuple[int, ...]
) -> list[jax.Array]:
    """All accumulators over the same axes, in one read."""

    def combine(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(kinds, left, right, strict=True)
        return [_COMBINE[k](a, b) for k, a, b in pairs]

    start = [jnp.float32(START[k]) for k in kinds]
    return lax.reduce(columns, start, combine, axes)


def _fold(x: jax.Array, shift: jax.Array, names: tuple[str, ...]) -> list[jax.Array]:
    """Folds a flat tensor, each fold a few entries deep and as wide as can be."""
    kinds = tuple(_OF[name][1] for name in names)
    folds = 1
    while x.size // FOLD**folds > SHORT:
        folds += 1
    body = x.size // FOLD**folds * FOLD**folds
    parts = []
    if body:
        part = _terms(x[:body].reshape(FOLD, -1), shift, names)
        part = reduce(part, kinds, (0,))
        for _ in range(folds - 1):
            part = reduce([p.reshape(FOLD, -1) for p in part], kinds, (0,))
        parts.append(reduce(part, kinds, (0,)))
    if body < x.size:
        parts.append(reduce(_terms(x[body:], shift, names), kinds, (0,)))
    if len(parts) == 1:
        return parts[0]
    return reduce([jnp.stack(p) for p in zip(*parts, strict=True)], kinds, (0,))


def settle(
    n: jax.Array, found: Pass, groups: tuple[str, ...]
) -> tuple[dict[str, tuple[jax.Array, ...]], jax.Array]:
    """Quantities of a tensor by group, and whether they hold.

    Args:
      n: entries of the tensor, float32 scalar.
      found: from `run` with the same groups.
      groups: names of `SUMS` that are covered.
    Returns:
      Quantities as `_reduce.settle` would have them, and a bool scalar; where that is
      False they mean nothing.
    """
    t = dict(zip(terms_of(groups), found.sums, strict=True))
    top = t["absmax"] if "absmax" in t else jnp.maximum(-t["low"], t["high"])
    square = t["square"] / n
    mean, variance = found.shift * UP, square
    usual = jnp.isfinite(square)
    if "sum" in t:
        drift = t["sum"] / n * UP
        mean, variance = mean + drift, jnp.maximum(square - drift * drift, 0)
        sure = (square >= LEAST_SQUARE) & (variance >= LEAST_SPREAD * square)
        usual &= sure | (t["low"] == t["high"])
    power = mean * mean + variance
    usual &= (power < jnp.inf) & ((power >= LEAST_SQUARE) | (top == 0))
    none = jnp.zeros([], jnp.float32)
    known = {
        **dict.fromkeys(("nan", "inf", "posinf"), (none,)),
        "absmax": (top,),
        "rms": (jnp.sqrt(power) / UP,),
        "moments": (mean / UP, jnp.sqrt(variance) / UP),
        "zero": (t.get("zero", none),),
        "min": (t.get("low", none),),
        "max": (t.get("high", none),),
        "least": (t.get("least", none),),
        "mean_abs": (t.get("abs", none) / n,),
    }
    return {g: known[g] for g in groups}, usual
