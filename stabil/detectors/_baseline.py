"""A robust level and spread for many signals at once: neither locks nor goes blind.

Every signal keeps a location m and a mean absolute deviation d. A new value x scores
z = (x - m) / s with s = max(1.2533 d, floor) (1 + 4 / n), where 1.2533 = sqrt(pi / 2)
turns d into a standard deviation for Gaussian noise and n counts the values seen.

  m <- m + a clip(x - m, -3 s, 3 s)        bounded influence: an outlier enters clipped
  d <- d + a (min(|x - m|, 3 s) - d)       a = max(1 / n, 1 - decay)

The clamp at 3 s exceeds s, so d can still grow: the rule cannot lock itself shut. After
`max_consecutive` outliers on one side the level is re-learnt from the newest raw value,
so that a lasting shift is one event; if the signal then falls back to the level before
the shift, that level is restored at once, so that a burst does not blind the detector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_INFLUENCE = 3.0  # an outlier moves the level like a value 3 deviations away
_MAD_TO_SD = 1.2533141373155003  # sqrt(pi / 2)
# Values to see before a leap is told in the warm-up, and what is one.
_LEAP_AFTER, _EARLY_LEAP = 3, math.log(100.0)


class BaselineState(NamedTuple):
    """What is normal for each of S signals.

    Attributes:
      location: float32 `[S]`, the level.
      deviation: float32 `[S]`, mean absolute deviation from the level.
      reference: float32 `[S]`, the level when the warm-up ended; fixed from then on.
      prior: float32 `[S]`, the level before the last re-learnt rise; inf if none.
      observed: int32 `[S]`, finite values seen.
      streak: int32 `[S]`, outliers in a row; negative for low ones.
    """

    location: jax.Array
    deviation: jax.Array
    reference: jax.Array
    prior: jax.Array
    observed: jax.Array
    streak: jax.Array

    @classmethod
    def empty(cls, signals: int) -> BaselineState:
        """A baseline that has seen nothing."""
        # One buffer each: a state whose leaves share a buffer cannot be donated.
        return cls(
            location=jnp.zeros([signals], jnp.float32),
            deviation=jnp.zeros([signals], jnp.float32),
            reference=jnp.zeros([signals], jnp.float32),
            prior=jnp.full([signals], jnp.inf, jnp.float32),
            observed=jnp.zeros([signals], jnp.int32),
            streak=jnp.zeros([signals], jnp.int32),
        )


class Deviation(NamedTuple):
    """How far each of S signals is from its baseline.

    Attributes:
      score: float32 `[S]`, robust standard deviations above the level; 0 where the
        value is not usable or the warm-up has not ended.
      jump: float32 `[S]`, value minus level, 0 likewise.
      scale: float32 `[S]`, one robust standard deviation.
      armed: bool `[S]`, whether score and jump mean anything.
      usable: bool `[S]`, whether the value was finite.
      early: bool `[S]`, whether a logarithm leaps in the warm-up: a hundred times the
        level so far. The level follows, so that this ends by itself in a few steps.
    """

    score: jax.Array
    jump: jax.Array
    scale: jax.Array
    armed: jax.Array
    usable: jax.Array
    early: jax.Array


def deviate(
    baseline: BaselineState, value: jax.Array, *, floor: jax.Array, warmup_steps: int
) -> Deviation:
    """Scores `value` float32 `[S]` against the baseline, without changing it.

    Args:
      baseline: state over S signals.
      value: float32 `[S]`; non-finite entries are not usable and score 0.
      floor: float32 `[S]` or scalar, the smallest standard deviation to believe.
      warmup_steps: values to see before a signal is judged.
    """
    usable = jnp.isfinite(value)
    armed = usable & (baseline.observed >= warmup_steps)
    seen = jnp.maximum(baseline.observed, 1).astype(jnp.float32)
    scale = jnp.maximum(_MAD_TO_SD * baseline.deviation, floor) * (1 + 4 / seen)
    gap = value - baseline.location
    jump = jnp.where(armed, gap, 0.0)
    early = usable & ~armed & (baseline.observed >= _LEAP_AFTER) & (gap > _EARLY_LEAP)
    return Deviation(jump / scale, jump, scale, armed, usable, early)


def observe(
    baseline: BaselineState,
    value: jax.Array,
    deviation: Deviation,
    *,
    threshold: float,
    decay: float,
    warmup_steps: int,
    max_consecutive_steps: int,
    first_deviation: jax.Array,
) -> tuple[BaselineState, jax.Array]:
    """Takes `value` into the baseline; non-finite entries change nothing.

    Args:
      baseline: state over S signals.
      value: float32 `[S]`.
      deviation: what `deviate` said of the same value.
      threshold: score beyond which a value counts as an outlier, on either side.
      decay: memory of the level, per step; in [0, 1).
      warmup_steps: values after which `reference` is fixed.
      max_consecutive_steps: outliers on one side before the level is re-learnt.
      first_deviation: float32 `[S]` or scalar, deviation to start from.

    Returns:
      The new state, and bool `[S]`: signals whose level was re-learnt upwards now.
    """
    b, usable = baseline, deviation.usable
    x = jnp.where(usable, value, b.location)
    seen = b.observed + usable.astype(jnp.int32)
    rate = jnp.maximum(1 / jnp.maximum(seen, 1).astype(jnp.float32), 1 - decay)
    bound = _INFLUENCE * deviation.scale
    gap = x - b.location
    first = b.observed == 0
    location = jnp.where(first, x, b.location + rate * jnp.clip(gap, -bound, bound))
    spread = b.deviation + rate * (jnp.minimum(jnp.abs(gap), bound) - b.deviation)
    spread = jnp.where(first, first_deviation, spread)

    side = jnp.sign(gap).astype(jnp.int32)
    outlier = deviation.armed & (jnp.abs(deviation.score) > threshold)
    same_side = side == jnp.sign(b.streak)
    streak = jnp.where(outlier, jnp.where(same_side, b.streak + side, side), 0)
    relearn = jnp.abs(streak) >= max_consecutive_steps
    rise = relearn & (side > 0)
    back = outlier & (side < 0) & (jnp.abs(x - b.prior) <= bound)
    location = jnp.where(relearn, x, jnp.where(back, b.prior, location))
    prior = jnp.where(rise, b.location, jnp.where(back, jnp.inf, b.prior))
    new = BaselineState(
        location=location,
        deviation=spread,
        reference=jnp.where(seen <= warmup_steps, location, b.reference),
        prior=prior,
        observed=jnp.minimum(seen, jnp.iinfo(jnp.int32).max - 1),
        streak=jnp.where(relearn | back, 0, streak),
    )
    kept = jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, b)
    return kept, rise & usable
