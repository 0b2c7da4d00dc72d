"""Makes a restored state what the first one was to the compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Alike:
    """Remembers how the leaves of a state are placed and typed.

    A restored array is bound to its device and has a strong dtype. Where the first
    state's was not, the train step would be compiled again after every rollback, which
    takes minutes for a large model.

    Args:
      state: the state that a run begins with.

    Attributes:
      template: its structure, dtypes and shardings, without its values.
    """

    def __init__(self, state: Any):
        leaves, treedef = jax.tree.flatten(state)
        self.template = jax.tree.unflatten(treedef, [_abstract(x) for x in leaves])
        self._kinds = [_kind(x) for x in leaves]

    def __call__(self, restored: Any) -> Any:
        """The restored state, with leaves as loosely bound as those of the first."""
        leaves, treedef = jax.tree.flatten(restored)
        pairs = zip(leaves, self._kinds, strict=True)
        return jax.tree.unflatten(treedef, [_loosened(x, *kind) for x, kind in pairs])


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _kind(leaf: Any) -> tuple[bool, bool]:
    """Whether a leaf is bound to a device, and whether its dtype is weak."""
    if not isinstance(leaf, jax.Array):
        return True, False
    is_bound = bool(getattr(leaf, "committed", True))
    return is_bound, bool(getattr(leaf, "weak_type", False))


def _loosened(leaf: Any, is_bound: bool, is_weak: bool) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_weak and leaf.ndim == 0:
        weak = jnp.asarray(leaf.item())
        return weak if weak.dtype == leaf.dtype else leaf
    if is_bound:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))
