"""Slow drift and change points of the few global scalars, by a one-sided CUSUM.

On the logarithm of the loss, the gradient norm and the update's root mean square:

  z = clip((x - a) / s, -3, 3)     a, s: mean and deviation with a memory of 1000 steps
  c <- max(c + z - 1, 0)           a drift is found when c passes 100

White noise keeps c near 0; a level that lies 3 s higher for 50 steps, or 2 s higher for
100, is found, however slowly it came. Then c and a start afresh: one event.

Source: E. S. Page, Continuous inspection schemes, Biometrika 41, 1954. We differ: the
residual is robust (bounded), and so is what it is measured by.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_SLOWEST = 1 / 1000
_INFLUENCE = 3.0
_ALLOWANCE = 1.0
_THRESHOLD = 100.0
_MAD_TO_SD = math.sqrt(math.pi / 2)


class DriftState(NamedTuple):
    """What is usual for each of S scalars over the long term.

    Attributes:
      anchor: float32 `[S]`, slow mean a.
      spread: float32 `[S]`, mean absolute deviation from it.
      total: float32 `[S]`, the sum c.
      seen: int32 `[S]`, finite values so far.
    """

    anchor: jax.Array
    spread: jax.Array
    total: jax.Array
    seen: jax.Array

    @classmethod
    def empty(cls, signals: int) -> DriftState:
        """Nothing was seen yet; every leaf has its own buffer."""
        anchor, spread, total = (jnp.zeros([signals], jnp.float32) for _ in range(3))
        return cls(anchor, spread, total, jnp.zeros([signals], jnp.int32))


def drift(
    state: DriftState,
    value: jax.Array,
    told: jax.Array | bool = False,
    *,
    floor: float = 0.01,
    warmup_steps: int = 100,
) -> tuple[DriftState, jax.Array]:
    """Takes values in; those that are not finite change nothing.

    Args:
      state: what was usual.
      value: float32 `[S]`, on the logarithm.
      told: bool `[S]`, scalars whose change is known by other means: they start afresh.
      floor: smallest standard deviation to believe.
      warmup_steps: values to see before anything is added up.

    Returns:
      The new state, and bool `[S]`: scalars that were found to have risen, on one step.

    Examples:
      >>> t = jnp.arange(900.0)
      >>> x = jnp.sin(t) + 0.01 * jnp.maximum(t - 600, 0.0)
      >>> step = lambda state, x: drift(state, x[None])
      >>> _, risen = jax.lax.scan(step, DriftState.empty(1), x)
      >>> print(jnp.flatnonzero(risen[:, 0]))
      [843]
    """
    usable = jnp.isfinite(value)
    x = jnp.where(usable, value, state.anchor)
    seen = state.seen + usable.astype(jnp.int32)
    first = state.seen == 0
    anchor = jnp.where(first, x, state.anchor)
    away = x - anchor
    scale = jnp.maximum(_MAD_TO_SD * state.spread, floor)
    z = jnp.clip(away / scale, -_INFLUENCE, _INFLUENCE)
    armed = state.seen >= warmup_steps
    total = jnp.where(armed, jnp.maximum(state.total + z - _ALLOWANCE, 0.0), 0.0)
    risen = usable & (total > _THRESHOLD)
    rate = jnp.maximum(1 / jnp.maximum(seen, 1).astype(jnp.float32), _SLOWEST)
    bound = jnp.where(armed, _INFLUENCE * scale, jnp.inf)
    held = jnp.clip(away, -bound, bound)
    over = risen | told
    new = DriftState(
        anchor=jnp.where(over, x, anchor + rate * held),
        spread=state.spread + rate * (jnp.abs(held) - state.spread),
        total=jnp.where(over, 0.0, total),
        seen=jnp.minimum(seen, 1 << 30),
    )
    kept = DriftState(
        *(jnp.where(usable, n, o) for n, o in zip(new, state, strict=True))
    )
    return kept, risen & ~jnp.asarray(told)
