"""Scaling of trees that leaves an idle step bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms import _leaves


def rewrite_if(due: jax.Array, tree: Any, change: Callable[[int, Any], Any]) -> Any:
    """`change(i, leaf)` of each measured leaf where `due`, else the very same buffers.

    As `_tree.rescale`, a loop of at most one turn: a leaf that needs no change is not
    touched by arithmetic that the optimizer behind could be fused with. Unlike it,
    entries are not bounded, which is right for exact norms. `change` sees and returns
    float32 (or a wider or complex equivalent); the leaf's dtype is restored.
    """
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, x in enumerate(leaves) if _tree.is_measured(x)]
    if not where:
        return tree
    xs = [jnp.asarray(leaves[i]) for i in where]

    def body(carry: tuple[jax.Array, list[jax.Array]]) -> Any:
        on, now = carry
        new = [change(i, _leaves.widened(x)).astype(x.dtype) for i, x in enumerate(now)]
        return jnp.zeros_like(on), new

    _, xs = jax.lax.while_loop(lambda carry: carry[0], body, (due, xs))
    for i, x in zip(where, xs, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def scale_rows(tree: Any, factors: list[jax.Array], finite: jax.Array) -> Any:
    """Each measured leaf times its own factor, or zeros of the tree where not finite.

    Args:
      tree: gradients or updates.
      factors: one array a measured leaf, in [0, 1], that broadcasts against it.
      finite: bool scalar.
    """
    if not factors:
        return tree
    least = jnp.stack([jnp.min(f, initial=1.0) for f in factors])

    def change(i: int, x: jax.Array) -> jax.Array:
        f = factors[i]
        return jnp.where(
            finite, jnp.where(f < 1, _leaves.times(x, f), x), jnp.zeros_like(x)
        )

    return rewrite_if(jnp.any(least < 1) | ~finite, tree, change)


def scale_tree(tree: Any, factor: jax.Array, finite: jax.Array) -> Any:
    """The tree times one factor in [0, 1], or zeros where not finite."""

    def change(i: int, x: jax.Array) -> jax.Array:
        return jnp.where(finite, _leaves.times(x, factor), jnp.zeros_like(x))

    return rewrite_if((factor < 1) | ~finite, tree, change)


def select_rows(tree: Any, factors: list[jax.Array], finite: jax.Array) -> Any:
    """As `scale_rows`, with a select: for updates, which the optimizer has made.

    What follows is the sum with the parameters. XLA fuses it with the optimizer through
    a select, as it does without one, and not through the loop of `rewrite_if`.
    """
    out = []
    for x, f in zip(_leaves.measured(tree), factors, strict=True):
        wide = _leaves.widened(x)
        scaled = jnp.where(f < 1, _leaves.times(wide, f).astype(x.dtype), x)
        out.append(jnp.where(finite, scaled, jnp.zeros_like(x)))
    return _leaves.rebuild(tree, out)


def multiply(tree: Any, factors: list[jax.Array] | jax.Array) -> Any:
    """Plain products, as published codes do: a NaN times 0 stays NaN."""
    leaves = _leaves.measured(tree)
    many = factors if isinstance(factors, list) else [factors] * len(leaves)
    return _leaves.rebuild(
        tree,
        [
            _leaves.times(_leaves.widened(x), f)
            for x, f in zip(leaves, many, strict=True)
        ],
    )


def ratio(target: jax.Array, norm: jax.Array) -> jax.Array:
    """min(1, target / norm), with 1 for a zero norm; never NaN for finite inputs."""
    safe = jnp.where(norm > 0, norm, jnp.ones_like(norm))
    return jnp.where(norm > target, target / safe, jnp.ones_like(safe))


def unscaled(norms: jax.Array, scale: Any) -> jax.Array:
    """Norms of the true gradient when the one at hand is `scale` times as large."""
    if scale is None:
        return norms
    return norms / jnp.asarray(scale).astype(norms.dtype)
