"""Restarts the moments of any optimizer without a kick."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms._find_moments import Moments, find_moments


def restart_moments(
    state: Any,
    params: Any,
    restart: jax.Array,
    fill: jax.Array,
    *,
    found: Moments | None = None,
) -> Any:
    """Restarts the moments of chosen leaves; everything else stays bit-identical.

    First moments become 0 and second moments become `fill`, the level that they would
    have in a steady run. A second moment of 0 beside a counter that goes on would
    multiply the next updates by up to `sqrt((1 - b1**2) / (1 - b2))` (13.8 at
    b2 = 0.999); with `fill` the first moment's own build-up is the warm-up.

    Args:
      state: state of an optimizer.
      params: parameters, or gradients, of the structure that `init` saw.
      restart: bool `[leaves]` over the measured leaves of `params`, or a scalar.
      fill: float32 `[leaves]`, or a scalar: mean square of an entry of the gradient.
        Where it is not finite or not positive, a second moment keeps its finite
        entries and the others become 0.
      found: what `find_moments(state, params)` returned, when it needed names.

    Returns:
      State of the same structure, shapes and dtypes. Counters and schedules go on.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> params, tx = jnp.ones(2), optax.adam(1e-3)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> state = restart_moments(state, params, jnp.array(True), jnp.array(4.0))
      >>> print(state[0].mu, state[0].nu, state[0].count)
      [0. 0.] [4. 4.] 1
    """
    found = find_moments(state, params) if found is None else found
    measured = [x for x in jax.tree.leaves(params) if _tree.is_measured(x)]
    sizes = [max(jnp.size(x), 1) for x in measured]
    restart = jnp.broadcast_to(restart, [len(sizes)])
    fill = jnp.broadcast_to(fill, [len(sizes)])
    leaves = jax.tree.leaves(state)
    # One number for a whole tensor is a squared norm (NovoGrad), not a mean.
    entries = [
        sizes[m.leaf] if jnp.ndim(leaves[m.position]) == 0 else 1 for m in found.second
    ]
    owners = jnp.asarray([m.leaf for m in found.second], jnp.int32)
    fills = fill[owners] * jnp.asarray(entries, fill.dtype)
    return restart_arrays(state, found, restart, fills)


def restart_arrays(
    state: Any, found: Moments, restart: jax.Array, fills: jax.Array, keep: float = 0.0
) -> Any:
    """Restarts the moments of chosen leaves, or damps them, to one level per array.

    Args:
      state: state of an optimizer.
      found: where its moments are.
      restart: bool `[leaves]` over the measured leaves of the parameters.
      fills: float32 `[len(found.second)]`, what the second moments become; where not
        finite or not positive, an array keeps its finite entries.
      keep: share of the old finite moments that stays; in [0, 1).

    Returns:
      State of the same structure, shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(state)

    def blend(x: jax.Array, level: jax.Array) -> jax.Array:
        if not keep:
            return level
        mixed = keep * x.astype(level.dtype) + (1 - keep) * level
        return jnp.where(jnp.isfinite(x), mixed, level)

    for m in found.first:
        x = jnp.asarray(leaves[m.position])
        zero = jnp.zeros_like(x)
        leaves[m.position] = jnp.where(restart[m.leaf], blend(x, zero), x)
    for i, m in enumerate(found.second):
        x = jnp.asarray(leaves[m.position])
        usable = jnp.isfinite(fills[i]) & (fills[i] > 0)
        level = jnp.full_like(x, fills[i].astype(x.dtype))
        finite = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
        fresh = jnp.where(usable, blend(x, level), finite)
        leaves[m.position] = jnp.where(restart[m.leaf], fresh, x)
    return jax.tree.unflatten(treedef, leaves)
