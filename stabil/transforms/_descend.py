"""The last link of the ready optimizers: weight decay and learning rate."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _leafwise, _leaves
from stabil.transforms._leaves import measured, partners


class DescendState(NamedTuple):
    """State of the last link of a ready optimizer.

    Attributes:
      steps: int32 scalar, updates since the run began; a schedule reads it.
    """

    steps: jax.Array


def descend(
    where: str,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    *,
    decay: Literal["before", "after", "after, not on matrices"] = "before",
) -> optax.GradientTransformationExtraArgs:
    """`-lr u` with decoupled weight decay; leaves without a norm pass through.

    Args:
      where: name of the optimizer, for error texts.
      learning_rate: a number or a schedule of the step.
      weight_decay: wd.
      decay: `"before"` the step as AdamW, `p <- p - lr (u + wd p)`; or `"after"` it,
        `p <- (p - lr u) (1 - lr wd)`.
    """
    if not callable(learning_rate):
        _leafwise.check_not_negative(where, learning_rate=learning_rate)
    _leafwise.check_not_negative(where, weight_decay=weight_decay)

    def init(params: Any) -> DescendState:
        del params
        return DescendState(jnp.zeros([], jnp.int32))

    def update(
        updates: Any, state: DescendState, params: Any = None, **extra: Any
    ) -> tuple[Any, DescendState]:
        del extra
        if weight_decay and params is None:
            raise ValueError(
                f"{where}: needed params for weight_decay={weight_decay}, got None; "
                "write tx.update(grads, opt_state, params)"
            )
        rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        leaves = measured(updates)
        owners = partners(updates, params) if weight_decay else leaves

        def one(u: jax.Array, p: jax.Array) -> jax.Array:
            kind = _leaves.wide(u)
            lr, x = jnp.asarray(rate, kind), u.astype(kind)
            if not weight_decay or (decay == "after, not on matrices" and u.ndim > 1):
                return -lr * x
            wide = p.astype(kind)
            if decay == "before":
                return -lr * (x + weight_decay * wide)
            step = -lr * x
            return step - lr * weight_decay * (wide + step)

        new = [one(u, p) for u, p in zip(leaves, owners, strict=True)]
        state = DescendState(_leaves.one_more(state.steps))
        return _leaves.rebuild(updates, new), state

    return optax.GradientTransformationExtraArgs(init, update)
