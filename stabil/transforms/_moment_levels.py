"""How large an optimizer's moments are, from a cheap sample, before they are used."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms._moments import find_moments


class MomentLevels(NamedTuple):
    """One level per measured parameter leaf.

    Attributes:
      level: float32 `[leaves]`; root mean square of the first moment, divided by that
        of the root of the second moment where there is one (the step that Adam takes,
        before its learning rate). NaN for a leaf without a first moment.
      bad: bool `[leaves]`, whether the sample holds a non-finite value or a negative
        second moment.
      rms: float32 scalar, `level` over all leaves that have both moments; NaN if none.
    """

    level: jax.Array
    bad: jax.Array
    rms: jax.Array


def moment_levels(state: Any, params: Any) -> MomentLevels:
    """Levels of the moments in `state`, read from a few columns of each array.

    Args:
      state: optimizer state of any nesting.
      params: parameters, or gradients of their structure.
    """
    found = find_moments(state, params)
    arrays = jax.tree.leaves(state)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(params) if _tree.is_measured(x)]
    nan = jnp.full([], jnp.nan, jnp.float32)
    first: list[jax.Array] = [nan] * len(shapes)
    second: list[jax.Array] = [nan] * len(shapes)
    for m in found.first:
        x = arrays[m.position]
        if jnp.shape(x) == shapes[m.leaf] and not jnp.iscomplexobj(x):
            v = _tree.columns(x).astype(jnp.float32)
            first[m.leaf] = jnp.sum(v * v + (v - v)) / max(v.size, 1)
    for m in found.second:
        x = arrays[m.position]
        if jnp.shape(x) == shapes[m.leaf]:
            v = _tree.columns(x).astype(jnp.float32)
            second[m.leaf] = jnp.sum(v + (v - v)) / max(v.size, 1)
    if not shapes:
        return MomentLevels(jnp.zeros([0]), jnp.zeros([0], bool), nan)
    seen = jnp.stack(first + second).reshape(2, -1)
    has_first = jnp.asarray([x is not nan for x in first])
    has_second = jnp.asarray([x is not nan for x in second])
    bad = (has_first & ~jnp.isfinite(seen[0])) | (
        has_second & (~jnp.isfinite(seen[1]) | (seen[1] < 0))
    )
    below = jnp.where(has_second, seen[1], 1.0)
    usable = has_first & ~bad & (below > 0)
    ratio = jnp.where(usable, seen[0] / jnp.where(usable, below, 1.0), jnp.nan)
    both = usable & has_second
    sizes = _tree.sizes(params)
    total = jnp.sum(jnp.where(both, ratio * sizes, 0.0))
    weight = jnp.sum(jnp.where(both, sizes, 0.0))
    rms = jnp.sqrt(total / jnp.where(weight > 0, weight, jnp.nan))
    return MomentLevels(jnp.sqrt(ratio), bad, rms)
