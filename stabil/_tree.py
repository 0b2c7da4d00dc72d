"""Norms, selects and names of pytrees: the only utilities that the packages share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The squares of 2**32 entries of this size still add up within float32.
LARGEST = 2.0**48


def is_measured(leaf: Any) -> bool:
    """Whether a leaf has a norm: a real or complex floating array or scalar.

    Integers, booleans, PRNG keys, `float0` and masked leaves have none; they pass
    through every transformation untouched.

    Examples:
      >>> is_measured(1.5), is_measured(3), is_measured(np.zeros(2, jax.dtypes.float0))
      (True, False, False)
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return jnp.issubdtype(dtype, jnp.inexact)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as a slash path.

    Examples:
      >>> tree = {"mlp": [{"kernel": 1.0}]}
      >>> [path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
      ['mlp/0/kernel']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def measured_names(tree: Any) -> tuple[str, ...]:
    """Slash paths of the leaves that have a norm, in flattening order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(path_name(path) for path, leaf in leaves if is_measured(leaf))


def _sum_of_squares(leaf: Any) -> jax.Array:
    x = jnp.asarray(leaf)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    total = jnp.zeros([], jnp.float32)
    for part in parts:
        v = part.astype(jnp.float32)
        # v - v is 0 for a finite entry and NaN for any other, infinities included.
        total += jnp.sum(v * v + (v - v))
    return total


def sums_of_squares(tree: Any) -> jax.Array:
    """Sum of squares of each measured leaf, float32 `[leaves]`, in one pass.

    NaN exactly when the leaf holds an entry that is not finite; infinity when all are
    finite and the sum leaves float32 (a norm above 1.8e19).

    Examples:
      >>> leaves = {"a": jnp.full(9, 100, jnp.float16), "b": 1e20, "c": jnp.inf}
      >>> print(sums_of_squares(leaves))
      [90000.    inf    nan]
    """
    sums = [_sum_of_squares(x) for x in jax.tree.leaves(tree) if is_measured(x)]
    return jnp.stack(sums) if sums else jnp.zeros([0], jnp.float32)


def sizes(tree: Any) -> jax.Array:
    """Entries of each measured leaf, at least 1, float32 `[leaves]`."""
    sizes = [jnp.size(x) for x in jax.tree.leaves(tree) if is_measured(x)]
    return jnp.maximum(jnp.asarray(sizes, jnp.float32), 1)


def columns(leaf: Any, at_most: int = 4) -> jax.Array:
    """A few evenly spaced columns of the last axis, a cheap sample of a leaf.

    A column crosses every row, so that an embedding's rare tokens are seen beside its
    frequent ones. A leaf of one axis or few columns is returned whole.
    """
    x = jnp.asarray(leaf)
    if x.ndim < 2 or x.shape[-1] <= at_most:
        return x
    return x[..., :: x.shape[-1] // at_most]


def select(pred: jax.Array, on_true: Any, on_false: Any) -> Any:
    """`on_true` where the scalar `pred` holds, else `on_false`, leaf by leaf.

    A select and never a product: a NaN on the side not taken does not leak. Leaves
    that are no arrays (`float0`, None) are taken from `on_true`.
    """

    def pick(a: Any, b: Any) -> Any:
        if getattr(a, "dtype", None) == jax.dtypes.float0:
            return a
        return jnp.where(pred, a, b)

    return jax.tree.map(pick, on_true, on_false)


def zeros_unless(pred: jax.Array, tree: Any) -> Any:
    """`tree` where the scalar `pred` holds, else zeros of the same shape and dtype."""

    def pick(x: Any) -> Any:
        if not is_measured(x) and not jnp.issubdtype(_dtype(x), jnp.integer):
            return x
        return jnp.where(pred, x, jnp.zeros([], _dtype(x)))

    return jax.tree.map(pick, tree)


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None) or jnp.result_type(x)


def rescale(tree: Any, factor: jax.Array, finite: jax.Array) -> Any:
    """`factor * tree`, or zeros where not `finite`; bit-identical when nothing is due.

    The product runs in a loop of at most one turn instead of a fused multiply: a
    gradient that needs no change stays the very buffer that came in, so that the
    optimizer after it compiles to the arithmetic that it has without stabil (a fused
    `1.0 * g` lets XLA contract other products and changes last bits). On an idle step
    the loop costs its test.

    Args:
      tree: gradients; any shapes and dtypes, leaves without a norm pass through.
      factor: float32 scalar in [0, 1]. Entries are first bounded by `LARGEST`.
      finite: bool scalar; False gives zeros of the same shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, x in enumerate(leaves) if is_measured(x)]
    if not where:
        return tree

    def shrink(x: jax.Array) -> jax.Array:
        wide = jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32
        v = x.astype(wide)
        if not jnp.iscomplexobj(x):
            v = jnp.clip(v, -LARGEST, LARGEST)
        return jnp.where(finite, v * factor.astype(wide), 0).astype(x.dtype)

    def body(carry: tuple[jax.Array, list[jax.Array]]) -> Any:
        due, xs = carry
        return jnp.zeros_like(due), [shrink(x) for x in xs]

    due = (factor < 1) | ~finite
    xs = [jnp.asarray(leaves[i]) for i in where]
    _, xs = jax.lax.while_loop(lambda carry: carry[0], body, (due, xs))
    for i, x in zip(where, xs, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


@functools.cache
def fingerprint(names: tuple[str, ...]) -> np.uint32:
    """A number that changes when the names or their order do."""
    import zlib

    return np.uint32(zlib.crc32("\n".join(names).encode()))
