"""Exact norms of leaves, layers and trees, that no finite entry overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms import _leaves


def squares(x: jax.Array, dtype: Any, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Plain sum of |x|^2 over `axes` (all when None, kept when given), in `dtype`."""
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    keep = axes is not None
    return sum(
        (jnp.sum(jnp.square(p.astype(dtype)), axis=axes, keepdims=keep) for p in parts),
        start=jnp.zeros([], dtype),
    )


def magnitude(x: jax.Array, dtype: Any) -> jax.Array:
    """|x| entry by entry, in `dtype`."""
    if jnp.iscomplexobj(x):
        return jnp.abs(x).astype(dtype)
    return jnp.abs(x.astype(dtype))


def power_of_two_below(x: jax.Array) -> jax.Array:
    """A power of two near a positive number, to divide by without rounding.

    At most 2**125 in float32: XLA divides by multiplying with the reciprocal, and
    flushes that to zero when it is not a normal number. 1 for zero.
    """
    if x.dtype == jnp.float64:
        bits, mask, top = jnp.uint64, 0x7FF0000000000000, 2.0**1021
    else:
        bits, mask, top = jnp.uint32, 0x7F800000, 2.0**125
    kept = jax.lax.bitcast_convert_type(x, bits) & jnp.array(mask, bits)
    unit = jnp.minimum(jax.lax.bitcast_convert_type(kept, x.dtype), top)
    return jnp.where(unit > 0, unit, jnp.ones_like(unit))


def exact_norm(
    x: jax.Array, dtype: Any, axes: tuple[int, ...] | None = None
) -> jax.Array:
    """Norm scaled by the largest entry: no square leaves the range of `dtype`."""
    keep = axes is not None
    size = magnitude(x, dtype)
    unit = power_of_two_below(jnp.max(size, axis=axes, keepdims=keep, initial=0.0))
    return unit * jnp.sqrt(jnp.sum(jnp.square(size / unit), axis=axes, keepdims=keep))


def total_norm(norms: jax.Array) -> jax.Array:
    """Joint norm of the parts whose norms are given; NaN when one is NaN."""
    top = jnp.max(norms, initial=0.0)
    # A power of two divides without rounding, so small inputs give the plain result.
    unit = power_of_two_below(top)
    return unit * jnp.sqrt(jnp.sum(jnp.square(norms / unit)))


def naive_norms(tree: Any, dtype: Any) -> jax.Array:
    """Per-leaf norms as published codes take them: they overflow, NaN stays NaN."""
    rows = [jnp.sqrt(squares(x, dtype)) for x in _leaves.measured(tree)]
    return jnp.stack(rows) if rows else jnp.zeros([0], dtype)


def leaf_norms(tree: Any, norms: Any = None) -> jax.Array:
    """Exact norm of each measured leaf `[leaves]`; NaN when a leaf is not finite.

    Squares are summed plainly; a second pass, scaled by the largest entry, runs only
    on a step whose squares leave the range of float32 on the large side. A norm below
    about 1e-19 may read as 0.

    Args:
      tree: gradients or updates.
      norms: per-leaf norms that somebody measured already, float32 `[leaves]`; used
        instead of the first pass when the length fits.
    """
    leaves, dtype = _leaves.measured(tree), _leaves.statistics_dtype(tree)
    if not leaves:
        return jnp.zeros([0], dtype)
    if dtype != jnp.float32:
        plain = naive_norms(tree, dtype)
    elif norms is not None and jnp.shape(norms) == (len(leaves),):
        plain = jnp.asarray(norms).astype(dtype)
    else:
        plain = jnp.sqrt(_tree.sums_of_squares(tree))

    def exact() -> jax.Array:
        slow = jnp.stack([exact_norm(x, dtype) for x in leaves])
        slow = jnp.where(jnp.isnan(plain), plain, slow)
        return jnp.where(jnp.isfinite(slow), slow, jnp.nan)

    # NaN says that an entry is not finite; an infinity may be finite squares.
    return jax.lax.cond(jnp.any(jnp.isinf(plain)), exact, lambda: plain)


class Layout:
    """Which rows of a flat statistics vector belong to which measured leaf.

    A leaf has one row; a stacked leaf `[layers, ...]` one per layer; an excluded or
    empty leaf none.
    """

    def __init__(
        self, tree: Any, stacked: _leaves.Paths = (), exclude: _leaves.Paths = ()
    ):
        names, leaves = _tree.measured_names(tree), _leaves.measured(tree)
        self.dtype = _leaves.statistics_dtype(tree)
        self.stacked = [
            _leaves.matches(stacked, n) and x.ndim > 0
            for n, x in zip(names, leaves, strict=True)
        ]
        self.rows = [
            0
            if _leaves.matches(exclude, n) or x.size == 0
            else (x.shape[0] if s else 1)
            for n, x, s in zip(names, leaves, self.stacked, strict=True)
        ]
        self.total = sum(self.rows)
        self.plain = all(r == 1 for r in self.rows)

    def _parts(self, tree: Any) -> Any:
        return zip(_leaves.measured(tree), self.stacked, self.rows, strict=True)

    def gather(self, tree: Any, measure: Callable[..., jax.Array]) -> jax.Array:
        """`measure(leaf, axes)` of each leaf, concatenated to `[rows]`.

        `axes` are the axes to reduce: all of them, or all but the layer axis.
        """
        parts = [
            measure(x, tuple(range(1 if s else 0, x.ndim))).reshape(r)
            for x, s, r in self._parts(tree)
            if r
        ]
        return jnp.concatenate(parts) if parts else jnp.zeros([0], self.dtype)

    def norms(self, tree: Any, norms: Any = None) -> jax.Array:
        """Exact norm of every row; NaN when a row is not finite."""
        if self.plain:
            return leaf_norms(tree, norms)
        dtype = self.dtype
        fast = self.gather(tree, lambda x, axes: jnp.sqrt(squares(x, dtype, axes)))
        # A finite row never gives NaN, so an overflow shows as an infinity.
        due = jnp.any(jnp.isinf(fast))

        def exact() -> jax.Array:
            slow = self.gather(tree, lambda x, axes: exact_norm(x, dtype, axes))
            slow = jnp.where(jnp.isfinite(fast), fast, slow)
            return jnp.where(jnp.isfinite(slow), slow, jnp.nan)

        return jax.lax.cond(due, exact, lambda: fast)

    def scatter(self, tree: Any, rows: jax.Array, other: float = 1.0) -> list[Any]:
        """`[rows]` back to one array a leaf that broadcasts against it."""
        out, start = [], 0
        for x, s, r in self._parts(tree):
            shape = ((x.shape[0],) if s else (1,)) + (1,) * (x.ndim - 1)
            shape = shape[: x.ndim]
            if r:
                out.append(rows[start : start + r].reshape(shape))
            else:
                out.append(jnp.full((1,) * x.ndim, other, rows.dtype))
            start += r
        return out
