"""Random masks of coordinates that keep momentum."""

from __future__ import annotations

from typing import Any

import jax


def draw(mask: Any, density: float, seed: int, cycle: Any) -> Any:
    """Fresh masks of the given shapes; scalars stay True."""
    leaves, treedef = jax.tree.flatten(mask)
    key = jax.random.fold_in(jax.random.key(seed), cycle)
    fresh = [
        jax.random.bernoulli(jax.random.fold_in(key, i), density, x.shape)
        if x.ndim
        else x
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, fresh)


def redraw(turn: jax.Array, mask: Any, density: float, seed: int, cycle: Any) -> Any:
    if density == 1:
        return mask
    return jax.lax.cond(turn, lambda: draw(mask, density, seed, cycle), lambda: mask)
