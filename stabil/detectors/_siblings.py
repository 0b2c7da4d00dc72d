"""Layers that drift away from their siblings, and layers that have died.

Siblings are never equal: a first block may have ten times the gradient of the others
for a whole run. So each signal is held against its own habit, a slow mean of its level,
and only then against the other members of its group, as `agree` does:

  h <- h + max(1 / n, 1 / 2000, min(s, 1)^2 / 20) (m - h)        apart = agree(m - h)

where s is the noise that is usual in the group, the median of its members: in a wild
time, and just after it, levels are on their way, and none of them is a habit.
A signal that departs is named at once, and a second time when it has been away for 50
steps; its habit is then its present level, so that the event ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._agreement import has_siblings, stand
from stabil.detectors._idle import IdleState, watch_idle

_SLOWEST = 1 / 2000
_RESTLESS = 1 / 20
_SETTLED_STEPS = 20
PATIENCE_STEPS = 50


class SiblingState(NamedTuple):
    """What is usual for each of S signals, gradient leaves before rows.

    Attributes:
      habit: float32 `[S]`, slow mean of the level, on the logarithm.
      followed: int32 `[S]`, steps that went into it.
      apart: int32 `[S]`, steps in a row away from the siblings.
      idle: `IdleState` of the same signals, not on a logarithm.
    """

    habit: jax.Array
    followed: jax.Array
    apart: jax.Array
    idle: IdleState

    @classmethod
    def empty(cls, signals: int) -> SiblingState:
        """Nothing is usual yet; every leaf has its own buffer."""
        return cls(
            jnp.zeros([signals], jnp.float32),
            jnp.zeros([signals], jnp.int32),
            jnp.zeros([signals], jnp.int32),
            IdleState.empty(signals),
        )


class Departed(NamedTuple):
    """What the comparison found, bool `[S]` each.

    Attributes:
      alone: signals that begin to depart, or jump while their siblings do not.
      away: signals that have been away for long; True on one step.
      died: signals that were alive and have been zero for long; True on one step.
      silent: signals that were never alive and have been zero for long; one step.
    """

    alone: jax.Array
    away: jax.Array
    died: jax.Array
    silent: jax.Array


def compare(
    state: SiblingState,
    level: jax.Array,
    jump: jax.Array,
    noise: jax.Array,
    spikes: jax.Array,
    values: jax.Array,
    alive: jax.Array,
    groups: Sequence[int],
) -> tuple[SiblingState, Departed]:
    """Compares siblings at one step.

    Args:
      state: what is usual.
      level: float32 `[S]`, level of each signal's logarithm; NaN where it is unknown or
        the signal was not read.
      jump: float32 `[S]`, the newest value over that level; NaN likewise.
      noise: float32 `[S]`, one robust standard deviation of the logarithm.
      spikes: bool `[S]`, signals whose jump is a spike by itself.
      values: float32 `[S]`, the newest values, not on a logarithm.
      alive: bool `[S]`, whether a signal was ever well above zero.
      groups: one number per signal, static; see `groups_of`.
    """
    idle, dead, _ = watch_idle(state.idle, values, steps=PATIENCE_STEPS)
    now = dead & (state.idle.zero_steps < PATIENCE_STEPS)
    no = jnp.zeros(now.shape, bool)
    alone = away = no
    if has_siblings(groups):
        state, alone, away = _hold_against_siblings(
            state, level, jump, noise, spikes, groups
        )
    return state._replace(idle=idle), Departed(
        alone=alone, away=away, died=now & alive, silent=now & ~alive
    )


def _hold_against_siblings(
    state: SiblingState,
    level: jax.Array,
    jump: jax.Array,
    noise: jax.Array,
    spikes: jax.Array,
    groups: Sequence[int],
) -> tuple[SiblingState, jax.Array, jax.Array]:
    """The next state, signals that begin to depart, and that have been away long."""
    known = jnp.isfinite(level)
    followed = jnp.where(known, jnp.minimum(state.followed + 1, 1 << 30), 0)
    settled = known & (state.followed >= _SETTLED_STEPS)
    drift = jnp.where(settled, level - state.habit, jnp.nan)
    noise = jnp.where(known, noise, jnp.nan)
    found = stand(jnp.stack([drift, jump, noise]), groups)
    of_group = noise - found.ratio[2]
    rate = 1 / jnp.maximum(followed, 1).astype(jnp.float32)
    restless = _RESTLESS * jnp.minimum(of_group**2, 1.0)
    rate = jnp.maximum(rate, jnp.maximum(restless, _SLOWEST))
    departs = found.departs[0]
    steps = jnp.where(departs, state.apart + 1, 0)
    away = steps >= PATIENCE_STEPS
    # While a signal departs its habit stands still, and then is what it came to.
    moved = state.habit + rate * (level - state.habit)
    habit = jnp.where(departs, state.habit, moved)
    new = state._replace(
        habit=jnp.where(known, jnp.where(away, level, habit), state.habit),
        followed=jnp.where(known, followed, state.followed),
        apart=jnp.where(known, jnp.where(away, 0, steps), state.apart),
    )
    begins = departs & (state.apart == 0)
    return new, begins | (found.departs[1] & spikes), away
