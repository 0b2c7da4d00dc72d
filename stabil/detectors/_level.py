"""The level and the noise of signals that may spike for long, in the compiled step.

The rule of `stabil.curves.Signal`, which says it in full, for a step instead of a row
and for any number of signals at once. In short, with z = (x - m) / s:

  s = max(d, u, floor) (1 + 4 / n)
  d   mean of sqrt(pi) / 2 |x_t - x_{t-1}|, repeats left out: a trend does not enter
  u   mean of sqrt(2 pi) max(x - m, 0): the noise above the level
  z   shrunk where recent dips that came back up were deeper than 6 / 1.8
  z > threshold begins an excursion, which lasts while z > 3; m, d and u stand still but
  for its first two steps. A candidate that has been flat for 16 of 32 steps, or that is
  `longest_steps` old, becomes the level; if the signal falls back to the level before,
  that is restored at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_RETURN = 3.0
_LEVEL_RATE = 0.05
_NOISE_RATE = 0.02
_ACCEPT_STEPS = 32
_DIP_WEIGHT = 1.8
_DIFFERENCE_TO_SD = math.sqrt(math.pi) / 2
_RISE_TO_SD = math.sqrt(2 * math.pi)
_MAD_TO_SD = math.sqrt(math.pi / 2)
_FIRST_NOISE = 0.05
_INFLUENCE = 3.0


class LevelState(NamedTuple):
    """What is normal for each signal; all fields have the shape of the signals.

    Attributes:
      level: float32, the level m.
      spread: float32, the noise d.
      rise: float32, the noise u above the level.
      last: float32, the newest usable value.
      dips: float32, depth of recent dips that came back up, in deviations; decays.
      dip: float32, depth of the present dip; <= 0.
      prior: float32, the level before the newest accepted shift; inf if none.
      candidate: float32, the level of the present excursion.
      wobble: float32, mean absolute deviation from the candidate.
      earlier: float32, the candidate 16 steps ago.
      observed: int32, usable values seen.
      excursion: int32, steps of the present excursion; 0 outside of one.
      lows: int32, steps in a row far below the level.
    """

    level: jax.Array
    spread: jax.Array
    rise: jax.Array
    last: jax.Array
    dips: jax.Array
    dip: jax.Array
    prior: jax.Array
    candidate: jax.Array
    wobble: jax.Array
    earlier: jax.Array
    observed: jax.Array
    excursion: jax.Array
    lows: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> LevelState:
        """A level that has seen nothing; every leaf has its own buffer."""
        start = {name: 0.0 for name in cls._fields}
        start |= {"spread": _FIRST_NOISE, "prior": jnp.inf}
        counters = ("observed", "excursion", "lows")
        return cls(
            **{
                name: jnp.full(shape, x, jnp.int32 if name in counters else jnp.float32)
                for name, x in start.items()
            }
        )


class Height(NamedTuple):
    """How high each signal stands; all fields have the shape of the signals.

    Attributes:
      score: float32, z; 0 where the value is not usable or the warm-up has not ended.
      jump: float32, value minus level, 0 likewise.
      armed: bool, whether score and jump mean anything.
      accepted: bool, whether a candidate became the level in this step.
    """

    score: jax.Array
    jump: jax.Array
    armed: jax.Array
    accepted: jax.Array


def follow(
    state: LevelState,
    value: jax.Array,
    *,
    floor: jax.Array | float,
    threshold: float,
    warmup_steps: int = 20,
    longest_steps: int = 200,
) -> tuple[LevelState, Height]:
    """Scores values and takes them in; those that are not finite change nothing.

    Args:
      state: what was normal so far.
      value: float32, any shape, that of the state.
      floor: float32, the smallest standard deviation to believe.
      threshold: score that begins an excursion.
      warmup_steps: values to see before a signal is judged.
      longest_steps: steps after which an excursion becomes the level, flat or not.

    Returns:
      The new state and the `Height` of the values over the old one.
    """
    s = state
    usable = jnp.isfinite(value)
    x = jnp.where(usable, value, s.level)
    before = jnp.maximum(s.observed, 1).astype(jnp.float32)
    noise = jnp.maximum(jnp.maximum(s.spread, s.rise), floor) * (1 + 4 / before)
    jump = x - s.level
    armed = usable & (s.observed >= warmup_steps)
    shrink = threshold / jnp.maximum(threshold, _DIP_WEIGHT * s.dips)
    score = jnp.where(armed, jump / noise * shrink, 0.0)
    out = (score > threshold) | ((s.excursion > 0) & (score > _RETURN))

    high, accepted = _excursion(s, x, jump, noise, longest_steps)
    first = s.observed == 0
    quiet = _quiet(s, x, jump, noise, score, armed)
    new = LevelState(*(jnp.where(out, h, q) for h, q in zip(high, quiet, strict=True)))
    start = LevelState.empty(jnp.shape(x))._replace(level=x, last=x)
    new = LevelState(*(jnp.where(first, a, b) for a, b in zip(start, new, strict=True)))
    top = jnp.iinfo(jnp.int32).max - 1
    new = new._replace(observed=jnp.minimum(s.observed + 1, top), last=x)
    kept = LevelState(*(jnp.where(usable, n, o) for n, o in zip(new, s, strict=True)))
    jump = jnp.where(armed, jump, 0.0)
    return kept, Height(score, jump, armed, armed & out & accepted)


def _excursion(
    s: LevelState, x: jax.Array, jump: jax.Array, noise: jax.Array, longest: int
) -> tuple[LevelState, jax.Array]:
    """The state after a step inside an excursion, and whether it is accepted."""
    steps = s.excursion + 1
    rate = jnp.maximum(1 / steps.astype(jnp.float32), 0.1)
    away = x - s.candidate
    begins = steps == 1
    candidate = jnp.where(begins, x, s.candidate + rate * away)
    wobble = jnp.where(begins, 0.0, s.wobble + rate * (jnp.abs(away) - s.wobble))
    half = _ACCEPT_STEPS // 2
    due = (steps >= _ACCEPT_STEPS) & (steps % half == 0)
    moved = jnp.abs(candidate - s.earlier)
    flat = due & (moved <= jnp.maximum(2 * noise, wobble))
    accepted = flat | (steps >= longest)

    early, bound = steps <= 2, _INFLUENCE * noise
    difference = jnp.minimum(jnp.abs(x - s.last) * _DIFFERENCE_TO_SD, bound)
    learn = jnp.where(early, _NOISE_RATE, 0.0)
    level = s.level + jnp.where(early, _LEVEL_RATE, 0.0) * jnp.minimum(jump, bound)
    spread = s.spread + learn * (difference - s.spread)
    rise = s.rise + learn * (_RISE_TO_SD * bound - s.rise)
    noise_there = _MAD_TO_SD * wobble
    widest = jnp.where(flat, noise_there, jnp.maximum(spread, noise_there))
    state = s._replace(
        level=jnp.where(accepted, candidate, level),
        spread=jnp.where(accepted, widest, spread),
        rise=jnp.where(accepted, noise_there, rise),
        prior=jnp.where(accepted, level, s.prior),
        candidate=candidate,
        wobble=wobble,
        earlier=jnp.where(due | (steps == half), candidate, s.earlier),
        excursion=jnp.where(accepted, 0, steps),
    )
    return state, accepted


def _quiet(
    s: LevelState,
    x: jax.Array,
    jump: jax.Array,
    noise: jax.Array,
    score: jax.Array,
    armed: jax.Array,
) -> LevelState:
    """The state after a step outside of an excursion, or of the warm-up."""
    seen = (s.observed + 1).astype(jnp.float32)
    rate = jnp.maximum(1 / seen, _NOISE_RATE)
    bound = jnp.where(armed, _INFLUENCE * noise, jnp.inf)
    difference = jnp.minimum(jnp.abs(x - s.last) * _DIFFERENCE_TO_SD, bound)
    learn = jnp.where(x == s.last, 0.0, rate)
    above = _RISE_TO_SD * jnp.clip(jump, 0.0, bound)

    low = score < -_RETURN
    lows = jnp.where(low & (score < -2 * _RETURN), s.lows + 1, 0)
    near = jnp.minimum(2 * _INFLUENCE * noise, 0.5 * jnp.abs(jump))
    back = low & (jnp.abs(x - s.prior) <= near)
    held = jnp.where(low, jnp.maximum(jump, -bound), jnp.minimum(jump, bound))
    step = jnp.where(low & (lows >= 3), 0.3 * jump, _LEVEL_RATE * held)
    level = s.level + jnp.where(armed, step, jump / seen)
    dips = jnp.where(armed, s.dips * (1 - _NOISE_RATE), s.dips)
    came_up = ~low & (score > -1)
    return s._replace(
        level=jnp.where(back, s.prior, level),
        spread=s.spread + learn * (difference - s.spread),
        rise=s.rise + rate * (above - s.rise),
        dips=jnp.where(came_up, jnp.maximum(dips, -s.dip), dips),
        dip=jnp.where(low, jnp.minimum(s.dip, score), 0.0),
        prior=jnp.where(back, jnp.inf, s.prior),
        excursion=jnp.zeros_like(s.excursion),
        lows=lows,
    )
