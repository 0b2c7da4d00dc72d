"""Leaves of a tree by path, dtypes, counters and checks that the clips share."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stabil import _tree

Paths = str | Sequence[str] | Callable[[str], bool]
Path = tuple[Any, ...]


def one_of(where: str, options: tuple[Any, ...], **values: Any) -> None:
    """Each value must be one of the options.

    Examples:
      >>> one_of("zclip", ("max", "mean"), mode="min")
      Traceback (most recent call last):
      ...
      ValueError: zclip: needed mode to be 'max' or 'mean', got 'min'
    """
    for name, value in values.items():
        if value not in options:
            *most, last = map(repr, options)
            words = f"{', '.join(most)} or {last}" if most else last
            raise ValueError(f"{where}: needed {name} to be {words}, got {value!r}")


def is_traced(x: Any) -> bool:
    """Whether a hyperparameter is an array, as `inject_hyperparams` hands one in."""
    return isinstance(x, jax.Array)


def matches(paths: Paths, name: str) -> bool:
    """Whether a slash path is chosen: by a predicate, or by one of the patterns."""
    if callable(paths):
        return paths(name)
    patterns = (paths,) if isinstance(paths, str) else paths
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def measured(tree: Any) -> list[Any]:
    """The leaves that have a norm, as arrays, in flattening order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if _tree.is_measured(x)]


def wide(x: jax.Array) -> Any:
    """Dtype to compute in: float32, or wider where the leaf is wider; keeps complex."""
    return jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype


def widened(x: jax.Array) -> jax.Array:
    """A leaf in at least single precision."""
    return x.astype(wide(x))


def times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x` times a real factor, in the precision of `x`."""
    f = factor.astype(jnp.finfo(x.dtype).dtype)
    return jax.lax.complex(x.real * f, x.imag * f) if jnp.iscomplexobj(x) else x * f


def by_path(tree: Any) -> dict[Path, jax.Array]:
    """The measured leaves of a tree under their key paths, in flattening order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path: jnp.asarray(x) for path, x in leaves if _tree.is_measured(x)}


def with_leaves(tree: Any, new: dict[Path, jax.Array]) -> Any:
    """The tree with the leaves at the given key paths replaced."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: new.get(path, leaf), tree
    )


def partners(updates: Any, params: Any) -> list[jax.Array]:
    """The parameter of each measured update, found by path.

    By path and not by position, as a gradient tree may hold None where a parameter is
    frozen.

    Raises:
      ValueError: an update has no parameter at its path.
    """
    found = by_path(params)
    wanted = list(by_path(updates))
    missing = [path for path in wanted if path not in found]
    if missing:
        raise ValueError(
            "needed a parameter for every update, got none at "
            f"{_tree.path_name(missing[0])!r}: hand update the parameters that the "
            "gradient was taken for"
        )
    return [found[path] for path in wanted]


def rebuild(tree: Any, new: Sequence[jax.Array | None]) -> Any:
    """`tree` with its measured leaves replaced, None skipped; each keeps its dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, x in enumerate(leaves) if _tree.is_measured(x)]
    for i, x in zip(where, (x for x in new if x is not None), strict=True):
        leaves[i] = x.astype(jnp.asarray(leaves[i]).dtype)
    return jax.tree.unflatten(treedef, leaves)


def like(params: Any, make: Callable[[jax.Array], jax.Array]) -> Any:
    """A tree of the parameters' structure; leaves without a norm hold no array."""

    def one(p: Any) -> Any:
        return make(jnp.asarray(p)) if _tree.is_measured(p) else optax.MaskedNode()

    return jax.tree.map(one, params)


def wide_zeros(params: Any) -> Any:
    """Zeros of the parameters' structure in at least 32 bit; complex stays complex.

    Parameters without a norm have an empty node instead of an array.
    """
    return like(params, lambda p: jnp.zeros_like(widened(p)))


def real_like(params: Any, value: float) -> Any:
    """As `wide_zeros`, filled with a number, and real for a complex parameter."""
    return like(params, lambda p: jnp.full(p.shape, value, jnp.finfo(wide(p)).dtype))


def statistics_dtype(tree: Any) -> Any:
    """float32, or float64 when a measured leaf is 64 bits wide."""
    wide = any(jnp.finfo(x.dtype).bits > 32 for x in measured(tree))
    return jnp.float64 if wide else jnp.float32


def separate(state: Any) -> Any:
    """The state with a buffer of its own for every field, as donation asks for."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def zero_int() -> jax.Array:
    return jnp.zeros([], jnp.int32)


def one_more(counter: jax.Array, event: jax.Array | bool = True) -> jax.Array:
    """A counter that saturates at the int32 maximum, raised where `event` holds."""
    top = jnp.iinfo(jnp.int32).max
    return jnp.where(jnp.asarray(event) & (counter < top), counter + 1, counter)
