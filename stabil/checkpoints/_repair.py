"""Rebuilding one layer from its neighbours, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stabil.checkpoints import _leaves

WEIGHTINGS = ("squared", "norm", "code")
Path = tuple[str, ...]


class Repaired(NamedTuple):
    """What `repair_layer` gives back.

    Attributes:
      params: the parameters with the layer rebuilt.
      opt_state: the optimizer's state with the layer's moments restarted.
      update_scale: a tree like the parameters of float32 factors for the updates, 1
        except in the rebuilt layer; scalars, or `[layers, 1, ...]` for stacked layers.
    """

    params: Any
    opt_state: Any
    update_scale: Any


def merge_neighbours(
    before: Any,
    after: Any,
    norm_before: float,
    norm_after: float,
    *,
    weighting: str = "squared",
) -> Any:
    """The weighted mean of two layers; the less converged one counts more.

    W = (c_before W_before + c_after W_after) / (c_before + c_after)

    Args:
      before: the layer before the lost one, any pytree.
      after: the layer after it, of the same structure and shapes.
      norm_before: L2 norm of the newest gradient of `before`; >= 0.
      norm_after: the same of `after`.
      weighting: c as a function of the norm g: `squared` g**2, `norm` g, `code`
        min(g, 1) + 1e-4. With both norms 0 the mean is plain.
    Returns:
      A layer in the dtypes of `before`; the mean is taken in float32.
    Raises:
      ValueError: a norm is negative or not finite, or the weighting is unknown.
    Examples:
      >>> print(merge_neighbours(jnp.zeros(2), jnp.ones(2), 1.0, 3.0, weighting="norm"))
      [0.75 0.75]

    Source: All is not lost: LLM recovery without checkpoints, arXiv 2506.15461, and
      gensyn-ai/CheckFree at 8d7d547. The formula is printed with a norm that can be
      read plain or squared; the code takes the norm after clipping to 1. Both norms 0
      are 0/0 in print; we take the plain mean.
    """
    weights = _weights(norm_before, norm_after, weighting)

    def mean(x: Any, y: Any) -> Any:
        if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact):
            return x
        x, y = jnp.asarray(x), jnp.asarray(y)
        wide = x.astype(jnp.float32) * weights[0] + y.astype(jnp.float32) * weights[1]
        return wide.astype(x.dtype)

    return jax.tree.map(mean, before, after)


def _weights(norm_before: float, norm_after: float, weighting: str) -> list[np.float32]:
    if weighting not in WEIGHTINGS:
        raise ValueError(
            f"needed weighting as one of {', '.join(WEIGHTINGS)}, got {weighting!r}"
        )
    norms = np.array([norm_before, norm_after], np.float64)
    if not np.all(np.isfinite(norms)) or np.any(norms < 0):
        raise ValueError(
            "needed finite gradient norms >= 0, got "
            f"{norm_before} and {norm_after}: take those of the last healthy step"
        )
    weights = {
        "squared": norms**2,
        "norm": norms,
        "code": np.minimum(norms, 1.0) + 1e-4,
    }[weighting]
    if weights.sum() == 0:
        weights = np.ones(2)
    return [np.float32(w) for w in weights / weights.sum()]


def repair_layer(
    params: Any,
    opt_state: Any,
    *,
    layers: Sequence[str] | str,
    lost: int,
    grad_norms: Sequence[float],
    weighting: str = "squared",
    learning_rate_factor: float = 1.1,
) -> Repaired:
    """Rebuilds a layer that is lost, or holds NaN or flipped bits, from its neighbours.

    The first or the last layer becomes a copy of its one neighbour. In the optimizer's
    state every array that belongs to the layer restarts: at zero where it can be
    negative (a first moment), at the neighbours' mean where it cannot (a second
    moment). The published method gives the layer a new Adam with a counter of its own;
    under Optax's one counter a second moment of zero would make the first steps three
    times too large.

    Args:
      params: parameters, any pytree.
      opt_state: any Optax state.
      layers: slash paths of the layers in order, for example `["block_0", "block_1",
        "block_2"]`; or one slash path below which all leaves are stacked with the
        layers as the leading axis.
      lost: index of the layer to rebuild.
      grad_norms: L2 norm of the newest healthy gradient of each layer.
      weighting: see `merge_neighbours`.
      learning_rate_factor: for the layer's updates from now on, 1.1 as published; in
        `update_scale`.
    Raises:
      ValueError: a path is not there, an argument is out of range, or a neighbour is
        not finite itself.
    Source: see `merge_neighbours`.
    """
    stack = _Stack(params, layers)
    if not 0 <= lost < stack.count or len(grad_norms) != stack.count:
        raise ValueError(
            f"needed lost in [0, {stack.count}) and {stack.count} gradient norms, got "
            f"lost={lost} and {len(grad_norms)} norms"
        )
    if stack.count < 2:
        raise ValueError("needed at least two layers, got one: it has no neighbour")
    near = [n for n in (lost - 1, lost + 1) if 0 <= n < stack.count]
    before, after = near[0], near[-1]
    norms = float(grad_norms[before]), float(grad_norms[after])
    _weights(*norms, weighting)

    def merged(x: Any, y: Any) -> Any:
        for value, n in ((x, before), (y, after)):
            if not bool(jnp.all(jnp.isfinite(value))):
                raise ValueError(
                    f"needed finite neighbours of layer {lost}, got layer {n} with NaN "
                    "or infinite entries: restore a checkpoint"
                )
        return merge_neighbours(x, y, *norms, weighting=weighting)

    def restarted(x: Any, y: Any) -> Any:
        if bool(jnp.all(x >= 0)) and bool(jnp.all(y >= 0)):
            return merged(x, y)
        return jnp.zeros_like(x)

    return Repaired(
        stack.rebuild(params, lost, before, after, merged),
        stack.rebuild(opt_state, lost, before, after, restarted),
        stack.scale(params, lost, learning_rate_factor),
    )


class _Stack:
    """Where the layers are: in separate subtrees, or along a leading axis."""

    def __init__(self, params: Any, layers: Sequence[str] | str):
        self.stacked = isinstance(layers, str)
        names = [layers] if isinstance(layers, str) else list(layers)
        self.paths = [tuple(name.split("/")) for name in names]
        found = {leaf: value for leaf, value in _flat(params)}
        self.forms: dict[Path, tuple[int, ...]] = {}
        for path, name in zip(self.paths, names, strict=True):
            below = {p: v for p, v in found.items() if p[: len(path)] == path}
            if not below:
                top = sorted({p[0] for p in found})
                raise ValueError(
                    f"needed a layer's path in the parameters, got {name!r}; the first "
                    f"levels are {', '.join(top)}"
                )
            self.forms |= {p: jnp.shape(v) for p, v in below.items()}
        self.count = len(self.paths)
        if self.stacked:
            sizes = {shape[0] if shape else 0 for shape in self.forms.values()}
            if len(sizes) != 1:
                raise ValueError(
                    f"needed one leading axis below {names[0]!r}, got sizes "
                    f"{', '.join(str(n) for n in sorted(sizes))}: name the layers one "
                    "by one"
                )
            (self.count,) = sizes

    def _home(self, path: Path, shape: tuple[int, ...]) -> Path | None:
        """The parameter whose array, or whose moment, lies at this path."""
        for start in range(len(path)):
            if self.forms.get(path[start:]) == shape:
                return path[start:]
        return None

    def rebuild(
        self, tree: Any, lost: int, before: int, after: int, make: Callable[..., Any]
    ) -> Any:
        """The tree with every array of the lost layer made from its neighbours'."""
        values = dict(_flat(tree))

        def at(path: Path, value: Any) -> Any:
            home = self._home(path, jnp.shape(value))
            if home is None:
                return value
            if self.stacked:
                x = jnp.asarray(value)
                return x.at[lost].set(make(x[before], x[after]))
            layer = self.paths[lost]
            if home[: len(layer)] != layer:
                return value
            prefix, tail = path[: len(path) - len(home)], home[len(layer) :]
            near = [values[prefix + self.paths[n] + tail] for n in (before, after)]
            return make(*near)

        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
        return treedef.unflatten([at(_leaves.parts(p), v) for p, v in pairs])

    def scale(self, params: Any, lost: int, factor: float) -> Any:
        """A factor for every parameter's updates: 1, and `factor` in the lost layer."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
        raised = []
        for path, _ in pairs:
            parts, value = _leaves.parts(path), jnp.ones([], jnp.float32)
            shape = self.forms.get(parts)
            if shape is not None and self.stacked:
                ones = jnp.ones([self.count] + [1] * (len(shape) - 1), jnp.float32)
                value = ones.at[lost].set(factor)
            elif (
                shape is not None and parts[: len(self.paths[lost])] == self.paths[lost]
            ):
                value = jnp.float32(factor)
            raised.append(value)
        return treedef.unflatten(raised)


def _flat(tree: Any) -> list[tuple[Path, Any]]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(_leaves.parts(path), value) for path, value in pairs]
