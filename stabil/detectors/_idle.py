"""Signals that have died: always zero, or without any change."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class IdleState(NamedTuple):
    """How long each of S signals has been zero, or has stood still.

    Attributes:
      zero_steps: int32 `[S]`, steps in a row with a value of exactly 0.
      still_steps: int32 `[S]`, steps in a row with the value of the step before.
      last: float32 `[S]`, the newest finite value.
    """

    zero_steps: jax.Array
    still_steps: jax.Array
    last: jax.Array

    @classmethod
    def empty(cls, signals: int) -> IdleState:
        """No value was seen yet; every leaf has its own buffer."""
        return cls(
            jnp.zeros([signals], jnp.int32),
            jnp.zeros([signals], jnp.int32),
            jnp.full([signals], jnp.inf, jnp.float32),
        )


def watch_idle(
    state: IdleState, values: jax.Array, *, steps: int = 50
) -> tuple[IdleState, jax.Array, jax.Array]:
    """Counts steps of zeros and of standing still; what is not finite changes nothing.

    Args:
      state: counters so far.
      values: float32 `[S]`, for example the norm of each gradient leaf, or the standard
        deviation of each layer's output.
      steps: steps in a row after which a signal is dead or stuck; >= 1.

    Returns:
      The new state; bool `[S]`, signals that are dead (zero for `steps`); bool `[S]`,
      signals that are stuck at another value for as long (a collapsed variance, a layer
      that is not computed).

    Examples:
      >>> state = IdleState.empty(2)
      >>> for i in range(3):
      ...     state, dead, stuck = watch_idle(state, jnp.array([0.0, i + 1.0]), steps=3)
      >>> print(dead, stuck)
      [ True False] [False False]
    """
    finite = jnp.isfinite(values)
    zero = jnp.where(values == 0, state.zero_steps + 1, 0)
    still = jnp.where(values == state.last, state.still_steps + 1, 0)
    top = jnp.int32(jnp.iinfo(jnp.int32).max - 1)
    new = IdleState(
        zero_steps=jnp.minimum(jnp.where(finite, zero, state.zero_steps), top),
        still_steps=jnp.minimum(jnp.where(finite, still, state.still_steps), top),
        last=jnp.where(finite, values, state.last),
    )
    dead = new.zero_steps >= steps
    return new, dead, (new.still_steps >= steps) & ~dead
