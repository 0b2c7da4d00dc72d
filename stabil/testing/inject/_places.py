"""The places that hold a tree: batch, loss, gradients, parameters, moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil._tree import path_name
from stabil.testing.inject._corrupt import corrupt, takes
from stabil.testing.inject._dial import Dial
from stabil.testing.inject._fault import Fault, candidates, runs_through
from stabil.testing.inject._shards import struck_shard


def batch(schedule: Sequence[Fault] | Dial, step: Any, arrays: Any) -> Any:
    """The batch with the faults that strike `batch` at `step`.

    Args:
      schedule: the planted faults, or a `Dial`; those of other places are ignored.
      step: a Python integer, or an int scalar inside a compiled step. A run that
        skips data after a rollback hands in the position of the batch instead.
      arrays: the batch, any tree of arrays; NumPy arrays stay NumPy arrays.

    Returns:
      A tree like `arrays`; the same object when nothing is due.

    Raises:
      ValueError: `where` meets no leaf, or none that takes the fault's kind.

    Examples:
      >>> burst = Fault(kind="garbage", place="batch", step=2, size=256)
      >>> tokens = np.zeros(3, np.uint8)
      >>> batch((burst,), 1, tokens), batch((burst,), 2, tokens).dtype
      (array([0, 0, 0], dtype=uint8), dtype('uint8'))
    """
    return _plant("batch", schedule, step, arrays)


def loss(schedule: Sequence[Fault] | Dial, step: Any, value: Any) -> Any:
    """The loss with the faults that strike `loss` at `step`.

    Args:
      schedule: the planted faults, or a `Dial`; those of other places are ignored.
      step: a Python integer, or an int scalar inside a compiled step.
      value: the loss, a floating array or any tree of them.

    Returns:
      A tree like `value`.

    Raises:
      ValueError: `where` meets no leaf, or none that takes the fault's kind.

    Examples:
      >>> print(loss((Fault(kind="inf", place="loss", step=1),), 1, jnp.ones([])))
      inf
    """
    return _plant("loss", schedule, step, value)


def gradients(schedule: Sequence[Fault] | Dial, step: Any, grads: Any) -> Any:
    """The gradients with the faults that strike `gradients` at `step`.

    Args:
      schedule: the planted faults, or a `Dial`; those of other places are ignored.
      step: a Python integer, or an int scalar inside a compiled step.
      grads: any tree of arrays.

    Returns:
      A tree like `grads`.

    Raises:
      ValueError: `where` meets no leaf, or none that takes the fault's kind.
    """
    return _plant("gradients", schedule, step, grads)


def parameters(schedule: Sequence[Fault] | Dial, step: Any, params: Any) -> Any:
    """The parameters with the faults that strike `parameters` at `step`.

    Args:
      schedule: the planted faults, or a `Dial`; those of other places are ignored.
      step: a Python integer, before that step runs, or an int scalar inside it.
      params: any tree of arrays.

    Returns:
      A tree like `params`; the same object when nothing is due.

    Raises:
      ValueError: `where` meets no leaf, or none that takes the fault's kind.
    """
    return _plant("parameters", schedule, step, params)


def moments(schedule: Sequence[Fault] | Dial, step: Any, opt_state: Any) -> Any:
    """The optimizer's state with the faults that strike `moments` at `step`.

    Args:
      schedule: the planted faults, or a `Dial`; those of other places are ignored.
      step: a Python integer, before that step runs, or an int scalar inside it.
      opt_state: the state of any optax transformation. Optax's Adam calls its first
        moment `mu` and its second `nu`, so `where='mu/mlp/kernel'` is the first
        moment of the leaf `mlp/kernel`.

    Returns:
      A tree like `opt_state`; the same object when nothing is due.

    Raises:
      ValueError: `where` meets no leaf, or none that takes the fault's kind.
    """
    return _plant("moments", schedule, step, opt_state)


def _plant(place: str, schedule: Sequence[Fault] | Dial, step: Any, tree: Any) -> Any:
    if isinstance(schedule, Dial):
        return schedule.plant(place, step, tree)
    faults = candidates(schedule, step, place)
    if not faults:
        return tree
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_name(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    for fault in faults:
        for i in _struck(fault, names, leaves):
            leaves[i] = struck_leaf(fault, step, names[i], leaves[i])
    return jax.tree.unflatten(treedef, leaves)


def _struck(fault: Fault, names: list[str], leaves: list[Any]) -> list[int]:
    met = [i for i, name in enumerate(names) if runs_through(fault.where, name)]
    if not met:
        raise ValueError(
            f"needed a leaf of the {fault.place} whose path holds {fault.where!r}, got "
            f"none; the leaves are {listed(names)}"
        )
    struck = [i for i in met if takes(fault, leaves[i])]
    if not struck:
        kinds = ", ".join(
            f"{names[i] or 'the only leaf'} "
            f"({getattr(leaves[i], 'dtype', type(leaves[i]).__name__)})"
            for i in met[:3]
        )
        raise ValueError(
            f"needed a leaf that {fault.kind} can strike, got {kinds}; integers take "
            "bit_flip and garbage, complex numbers all but bit_flip, floats every kind"
        )
    return struck


def struck_leaf(fault: Fault, step: Any, name: str, leaf: Any) -> Any:
    if fault.device is not None:
        return struck_shard(fault, step, name, leaf)
    if not isinstance(step, jax.core.Tracer):
        struck = corrupt(fault, step, name, leaf)
        return np.asarray(struck) if isinstance(leaf, np.ndarray) else struck
    # A branch and not a select: an idle step keeps the buffer that came in, so that
    # what follows compiles to the arithmetic that it has without the fault.
    leaf = jnp.asarray(leaf)
    return jax.lax.cond(
        fault.is_due(step), lambda x: corrupt(fault, step, name, x), lambda x: x, leaf
    )


def listed(names: list[str]) -> str:
    shown = ", ".join(name or "''" for name in names[:8])
    more = len(names) - 8
    return (shown or "none") + (f" and {more} more" if more > 0 else "")
