"""How large an optimizer's moments are, from a cheap sample, before they are used."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms._find_moments import Moments
from stabil.transforms._moments import find_moments

# Adam's first moment over the root of its second, which is at most
# (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) whatever the gradients are, by Cauchy and
# Schwarz: 7 with b1, b2 = 0.9, 0.999, and 72 with b2 = 0.99999. ADOPT, which keeps its
# moments in the same record, bounds the first: by 2.2 in the first 20 steps.
_IMPOSSIBLE, _LARGEST_FIRST = 1000.0, 3.0


class MomentLevels(NamedTuple):
    """One level per measured parameter leaf.

    Attributes:
      level: float32 `[leaves]`; root mean square of the first moment, divided by that
        of the root of the second moment where there is one (the step that Adam takes,
        before its learning rate). NaN for a leaf without a first moment.
      bad: bool `[leaves]`, whether the sample holds a non-finite value or a negative
        second moment.
      impossible: bool `[leaves]`, moments that Adam cannot make within 20 steps.
      rms: float32 scalar, `level` over all leaves that have both moments; NaN if none.
    """

    level: jax.Array
    bad: jax.Array
    impossible: jax.Array
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
        none = jnp.zeros([0], bool)
        return MomentLevels(jnp.zeros([0]), none, none, nan)
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
    level = jnp.sqrt(ratio)
    impossible = _are_of_adam(state, found, len(shapes)) & (level > _IMPOSSIBLE)
    impossible &= seen[0] > _LARGEST_FIRST**2
    return MomentLevels(level, bad, impossible, rms)


def _are_of_adam(state: Any, found: Moments, leaves: int) -> jax.Array:
    """Leaves bool `[leaves]`, static, whose moments stand in one Adam's record."""
    known = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=known)[0]
    heads = [_tree.path_name(path) for path, node in nodes if known(node)]
    first = {m.leaf: m.path for m in found.first}
    second = {m.leaf: m.path for m in found.second}

    def paired(leaf: int, head: str) -> bool:
        start = f"{head}/" if head else ""
        mu, nu = first.get(leaf, ""), second.get(leaf, "")
        return mu.startswith(f"{start}mu") and nu.startswith(f"{start}nu")

    pairs = [any(paired(i, head) for head in heads) for i in range(leaves)]
    return jnp.asarray(pairs)
