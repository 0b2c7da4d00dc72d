"""What the wrappers that answer a verdict share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _leafwise
from stabil.transforms._leaves import measured
from stabil.transforms._skip import SkipRecord
from stabil.vocabulary import Cause, Severity, Verdict


def check_wrapper(where: str, inner: Any, on: Any) -> None:
    """`inner` must be a transformation, `on` a severity, causes or None."""
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{where}: needed an optax.GradientTransformation for inner, got "
            f"{inner!r}; write {where}(optax.adamw(3e-4))"
        )
    if on is not None and not isinstance(on, (Severity, Cause)):
        raise TypeError(
            f"{where}: needed a Severity, Causes or None for on, got {on!r}; write "
            "on=Severity.BLOCK or on=Cause.LOSS_SPIKE"
        )


def sound(grads: Any, inner_state: Any) -> jax.Array:
    """Whether `inner` may keep what it makes of this gradient; bool scalar.

    True also for a gradient that is not finite when `inner` holds a guard, a clip or a
    skip of stabil: it answers by itself, and its record of the step must stay.
    """
    stop = lambda node: isinstance(node, (Verdict, SkipRecord))  # noqa: E731
    if any(map(stop, jax.tree.leaves(inner_state, is_leaf=stop))):
        return jnp.ones([], bool)
    # The gradient is asked and not the update: one more reader of the update would
    # change how XLA fuses the step, and so last bits of an idle one.
    return _leafwise.all_finite(measured(grads))


def asks(
    verdict: Verdict | None, inner_state: Any, on: Severity | Cause | None
) -> jax.Array:
    """Whether a verdict is one of those that `on` names; bool scalar.

    Args:
      verdict: the verdict handed in, or None to take the one in `inner_state`.
      inner_state: state that may hold a `stabil.guard` and so its newest verdict.
      on: least severity, causes, or None.
    """
    if verdict is None:
        stop = lambda node: isinstance(node, Verdict)  # noqa: E731
        nodes = jax.tree_util.tree_flatten_with_path(inner_state, is_leaf=stop)[0]
        # The outermost: a guard's own, and not that of the clip inside it.
        found = [(len(path), node) for path, node in nodes if stop(node)]
        verdict = min(found, key=lambda pair: pair[0])[1] if found else None
    if verdict is None or on is None:
        return jnp.zeros([], bool)
    if isinstance(on, Cause):
        return (verdict.flags & int(on)) != 0
    return verdict.severity >= int(on)
