"""Clips that hold each row of a tree to a limit of its own: the rows and the product.

A row is a tensor, a layer of a stacked one, or with the scope "global" the whole tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil.transforms import _norms, _scaling


def measure(
    updates: Any,
    layout: _norms.Layout,
    scope: str,
    dtype: Any,
    *,
    plain: bool,
    norms: Any = None,
    scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Norm of every row `[rows]`, and the joint norm.

    Args:
      updates: gradients.
      layout: of these gradients.
      scope: "tensor" or "global".
      dtype: of the statistics.
      plain: as published codes take norms: they overflow, and NaN stays NaN.
      norms: per-leaf norms that are known already, float32 `[leaves]`.
      scale: loss scale that the gradients carry.
    """
    if plain:
        rows = layout.gather(
            updates, lambda x, axes: jnp.sqrt(_norms.squares(x, dtype, axes))
        )
    else:
        rows = layout.norms(updates, norms)
    rows = _scaling.unscaled(rows.astype(dtype), scale)
    total = jnp.sqrt(jnp.sum(jnp.square(rows))) if plain else _norms.total_norm(rows)
    return (total[None] if scope == "global" else rows), total


def shrink(
    updates: Any,
    layout: _norms.Layout,
    factors: jax.Array,
    finite: jax.Array,
    *,
    plain: bool,
) -> Any:
    """Each row times its factor; zeros where not `finite`, unless `plain`."""
    spread = jnp.broadcast_to(factors, [layout.total]) if len(factors) == 1 else factors
    parts = layout.scatter(updates, spread)
    if plain:
        return _scaling.multiply(updates, parts)
    return _scaling.scale_rows(updates, parts, finite)
