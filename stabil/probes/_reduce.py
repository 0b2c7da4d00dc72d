"""One pass over a tensor: every accumulator in one two-stage reduction."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes._statistics import (
    LARGEST_PILOT,
    STATISTICS,
    SUMS,
    Elements,
    Quantities,
    Row,
    Term,
)

PILOTS = 8  # finite elements at the head of a row whose mean the row is shifted by
SHORTEST_ROW, LONGEST_ROW = 64, 2**16
_START = {"add": 0.0, "min": math.inf, "max": -math.inf}
_COMBINE = {"add": lax.add, "min": lax.min, "max": lax.max}

Parts = Mapping[str, Quantities]


def groups_of(statistics: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the `Sums` that `statistics` need, each once; counts always."""
    needed = {"nan", "inf"}.union(*(STATISTICS[s].needs for s in statistics))
    return tuple(name for name in SUMS if name in needed)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def measure(x: jax.Array, statistics: tuple[str, ...]) -> jax.Array:
    """Statistics of one tensor, in one read of it.

    Non-finite entries are counted and left out of everything else. Where no entry is
    finite, all but the counts are NaN. Entries of a float64 tensor are rounded to
    float32 first; a complex tensor counts as its real and imaginary parts. The
    standard deviation of entries beyond 2**100 is right to 5e-4 of their mean.

    Args:
      x: real or complex floating array of any shape and width.
      statistics: names in `STATISTICS`.
    Returns:
      float32 `[statistics]`, without a gradient.
    Examples:
      >>> print(measure(jnp.array([3.0, -4.0, jnp.nan, 0.0]), ("nan_count", "absmax")))
      [1. 4.]
    """
    n, parts = partials(lax.stop_gradient(x), groups_of(statistics))
    return finish(n, parts, statistics)


def finish(n: jax.Array, parts: Parts, statistics: tuple[str, ...]) -> jax.Array:
    """Statistics from merged quantities, float32 `[..., statistics]`."""
    values = [STATISTICS[s].finish(n, parts) for s in statistics]
    return jnp.stack(values, axis=-1)


def partials(x: jax.Array, groups: tuple[str, ...]) -> tuple[jax.Array, Parts]:
    """Number of finite elements and the merged quantities of each group, scalars."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-2 if x.ndim else -1)
    pieces = [_rows(p, groups) for p in _as_rows(x) if p.size]
    if not pieces:
        pieces = [_rows(jnp.full((1, 1), jnp.nan, x.dtype), groups)]
        pieces = [(n, {**q, "nan": (jnp.zeros_like(n),)}) for n, q in pieces]
    n = jnp.concatenate([p[0] for p in pieces])
    parts = {
        g: tuple(map(jnp.concatenate, zip(*(p[1][g] for p in pieces), strict=True)))
        for g in groups
    }
    return merge(n, parts)


def merge(n: jax.Array, parts: Parts) -> tuple[jax.Array, Parts]:
    """Combines quantities over their first axis: rows, micro-batches or devices.

    Args:
      n: float32 `[parts, ...]`, finite elements behind each part.
      parts: quantities by group, each `[parts, ...]`.
    Returns:
      The total of `n` and the quantities of the whole, first axis gone.
    """
    total = jnp.sum(n, axis=0)
    weights = n / jnp.maximum(total, 1)
    return total, {g: SUMS[g].merge(weights, q) for g, q in parts.items()}


def _as_rows(x: jax.Array) -> list[jax.Array]:
    """`x` as one or two matrices whose rows suit one accumulator each."""
    while x.ndim > 1 and x.shape[-1] < SHORTEST_ROW:
        x = x.reshape(*x.shape[:-2], -1)
    width = x.shape[-1] if x.ndim else 1
    x = x.reshape(-1, width) if x.size else x.reshape(0, 1)
    chunk = next((c for c in range(4096, 255, -1) if width % c == 0), None)
    if width > 4096 and chunk:
        return [x.reshape(-1, chunk)]
    if width <= LONGEST_ROW:
        return [x]
    body = width // 4096 * 4096
    return [x[:, :body].reshape(-1, 4096), x[:, body:]]


def _rows(x: jax.Array, groups: tuple[str, ...]) -> tuple[jax.Array, Parts]:
    """Finite count and settled quantities of each row of a matrix."""
    raw = x.astype(jnp.float32)
    finite = jnp.isfinite(raw)
    pilot = _pilot(raw, finite)
    value = jnp.where(finite, raw, 0)
    e = Elements(raw, finite, value, jnp.where(finite, raw - pilot[:, None], 0))
    terms: list[Term] = [t for g in groups for t in SUMS[g].terms]

    def combine(left: Quantities, right: Quantities) -> Quantities:
        pairs = zip(terms, left, right, strict=True)
        return tuple(_COMBINE[t.combine](a, b) for t, a, b in pairs)

    start = tuple(jnp.float32(_START[t.combine]) for t in terms)
    sums = lax.reduce(tuple(t.of(e) for t in terms), start, combine, (1,))
    by_group, at = {}, 0
    for g in groups:
        by_group[g] = sums[at : at + len(SUMS[g].terms)]
        at += len(SUMS[g].terms)
    n = raw.shape[1] - by_group["nan"][0] - by_group["inf"][0]
    row = Row(n, pilot)
    return n, {g: SUMS[g].settle(row, q) for g, q in by_group.items()}


def _pilot(raw: jax.Array, finite: jax.Array) -> jax.Array:
    """Mean of the first few finite elements of each row, 0 where it is too large."""
    ok = finite[:, :PILOTS]
    head = jnp.where(ok, raw[:, :PILOTS] / PILOTS, 0)
    share = jnp.maximum(jnp.sum(ok, axis=1), 1).astype(jnp.float32) / PILOTS
    pilot = jnp.sum(head, axis=1) / share
    return jnp.where(jnp.abs(pilot) < LARGEST_PILOT, pilot, 0)
