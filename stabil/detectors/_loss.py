"""What the loss says of a step: the rules of `stabil.curves.Judge`, compiled.

The loss is judged on its logarithm, and from the first negative loss on as it is.
Severity by rule:
  BLOCK  1.2 times the level on a WARN, or by eight deviations for the second time in a
         row; 2.5 times the level and ten deviations; a WARN of the warm-up; the first
         negative loss, if it is as far below zero as the warm-up ever was above.
         Bounded: a lasting change of the data or of the loss looks the same
  WARN   the loss rises and stays (the sum of min(z, 6) - 2 over its steps, which a step
         below the level sets to 0, reaches 9) by 5 % or more; or it stays for two steps
         at 2.5 times its level, or at 1.5 times with a spike of the gradient norm; or
         it jumps in the warm-up to 1.5 times its highest value (2.5 times in the first
         steps) and by more than its range so far; a spike that goes on
  WATCH  a single high loss
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._level import Height, LevelState, follow
from stabil.vocabulary import Severity

_FLOOR = 0.005
_LARGEST = 2.0**60  # losses beyond count as this, so that no sum overflows
_DRIFT = 2.0
_EVIDENCE = 9.0
_SPARSE_STEPS = 3
_EVIDENCE_SPARSE = 7.0
_ALONE = 16.0
_SUPPORT = 4.0
_JOINT_NORM = 6.0
_LEAST_RISE = math.log(1.05)
_LARGE_JUMP = math.log(1.5)
_HUGE_JUMP = math.log(2.5)
_HUGE_SCORE = 20.0
_EARLY_VALUES = 8
_RETURN = 3.0
_LEAST_LEAP = math.log(1.2)
_LEAP_SCORE, _SECOND_SCORE = 10.0, 8.0
# At most so many steps are refused of about 1,000, or data that come back again and
# again would never be learnt.
_MOST_REFUSED, _REFUSED_DECAY = 32.0, 0.999


class LossState(NamedTuple):
    """What the judge remembers of the loss.

    Attributes:
      level: `LevelState` of the logarithm of the loss, or of the loss if `linear`.
      linear: bool scalar, whether a negative loss was seen.
      loss: float32 scalar, the newest usable loss; NaN before.
      evidence: float32 scalar, how much speaks for a lasting rise.
      rises: float32 `[2]`, the jumps of the two steps before.
      rising: bool scalar, whether a spike that was a WARN goes on.
      highest: float32 scalar, largest value of the warm-up but for blow-ups.
      lowest: float32 scalar, smallest value of the warm-up.
      distinct: int32 scalar, values of the warm-up that differ from the one before.
      waited: int32 scalar, steps since a loss was given.
      refused: float32 scalar, leaps of about the last 1,000 losses.
    """

    level: LevelState
    linear: jax.Array
    loss: jax.Array
    evidence: jax.Array
    rises: jax.Array
    rising: jax.Array
    highest: jax.Array
    lowest: jax.Array
    distinct: jax.Array
    waited: jax.Array
    refused: jax.Array

    @classmethod
    def empty(cls) -> LossState:
        """No loss was seen yet; every leaf has its own buffer."""
        return cls(
            level=LevelState.empty(),
            linear=jnp.zeros([], bool),
            loss=jnp.full([], jnp.nan, jnp.float32),
            evidence=jnp.zeros([], jnp.float32),
            rises=jnp.zeros([2], jnp.float32),
            rising=jnp.zeros([], bool),
            highest=jnp.full([], -jnp.inf, jnp.float32),
            lowest=jnp.full([], jnp.inf, jnp.float32),
            distinct=jnp.zeros([], jnp.int32),
            waited=jnp.zeros([], jnp.int32),
            refused=jnp.zeros([], jnp.float32),
        )


class LossFinding(NamedTuple):
    """What the loss of one step says.

    Attributes:
      severity: int32 scalar, `Severity` OK, WATCH or WARN.
      score: float32 scalar, robust standard deviations above the level.
      spike: bool scalar, whether the loss is out of line.
      shifted: bool scalar, whether a higher level was accepted as normal.
      leap: bool scalar, whether the loss is so far off that the step is refused.
    """

    severity: jax.Array
    score: jax.Array
    spike: jax.Array
    shifted: jax.Array
    leap: jax.Array


def judge_loss(
    state: LossState,
    loss: jax.Array,
    norm_score: jax.Array,
    *,
    steps: jax.Array | int = 1,
    norm_given: jax.Array | bool = True,
    threshold: float = 6.0,
    warmup_steps: int = 20,
    longest_steps: int = 200,
    max_leaps: int = 16,
) -> tuple[LossState, LossFinding]:
    """Judges a loss, float32 scalar; one that is not finite changes nothing.

    A loss of exactly 0 says nothing while no negative loss was seen.

    Args:
      state: what was normal so far.
      loss: float32 scalar.
      norm_score: float32 scalar, robust deviations of the gradient norm.
      steps: int32 scalar, steps since the loss before; 3 or more is sparse.
      norm_given: bool scalar, whether there is a gradient norm at all.
      threshold: deviations beyond which the loss is out of line.
      warmup_steps: losses to see before more than a blow-up is judged.
      longest_steps: steps after which a high loss is taken as normal.
      max_leaps: leaps in a row, after which the next is none; 0 for none at all.
    """
    fallen = (loss < -jnp.exp(state.highest)) & jnp.isfinite(loss) & ~state.linear
    most = min(max_leaps, _MOST_REFUSED)
    fallen &= (state.level.observed > 1) & (state.refused < most)
    finite = jnp.isfinite(loss) & ~fallen
    state = _turn_linear(state, finite & (loss < 0))
    x = jnp.where(loss > 0, jnp.log(jnp.where(loss > 0, loss, 1.0)), jnp.nan)
    x = jnp.where(state.linear, jnp.clip(loss, -_LARGEST, _LARGEST), x)
    x = jnp.where(finite, x, jnp.nan)
    usable = jnp.isfinite(x)
    size = jnp.abs(state.level.level)
    unit = jnp.where(state.linear & (size > 0), size, 1.0)
    level, height = follow(
        state.level,
        x,
        floor=_FLOOR * unit,
        threshold=threshold,
        warmup_steps=warmup_steps,
        longest_steps=longest_steps,
    )
    sparse = (jnp.asarray(steps) >= _SPARSE_STEPS) & (state.level.observed > 0)
    new, warn = _weigh(
        state, loss, height, level, unit, norm_score, norm_given, sparse, threshold
    )
    early, warmed = _warm(state, x, unit)
    new = jax.tree.map(lambda a, b: jnp.where(height.armed, a, b), new, warmed)
    high = (height.score > threshold) | (level.excursion > 0) & height.armed
    warn = jnp.where(height.armed, warn, early & usable) | fallen
    leap = _leaps(state, height, level, unit, warn, max_leaps)
    new = new._replace(level=level, loss=loss)
    kept = jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, state)
    refused = _REFUSED_DECAY * state.refused + leap.astype(jnp.float32)
    kept = kept._replace(refused=jnp.where(usable | fallen, refused, state.refused))

    severity = jnp.where(high, jnp.int32(Severity.WATCH), jnp.int32(Severity.OK))
    severity = jnp.where(warn, jnp.int32(Severity.WARN), severity)
    finding = LossFinding(
        severity=severity,
        score=height.score,
        spike=severity > int(Severity.OK),
        shifted=height.accepted,
        leap=leap,
    )
    return kept, finding


def _leaps(
    state: LossState,
    height: Height,
    level: LevelState,
    unit: jax.Array,
    warn: jax.Array,
    max_leaps: int,
) -> jax.Array:
    """Whether a loss is so far out of line that its step had better not be taken."""
    jump = height.jump / unit
    again = (state.level.excursion > 0) & (height.score > _SECOND_SCORE)
    leap = (warn | again) & (jump > _LEAST_LEAP)
    leap |= (height.score > _LEAP_SCORE) & (jump > _HUGE_JUMP)
    leap &= (level.excursion > 0) & (level.excursion <= max_leaps)
    # The warm-up, which ends by itself, or a loss that has fallen far below zero.
    leap = jnp.where(height.armed, leap, warn & (max_leaps > 0))
    return leap & (state.refused < _MOST_REFUSED)


def _weigh(
    state: LossState,
    loss: jax.Array,
    height: Height,
    level: LevelState,
    unit: jax.Array,
    norm: jax.Array,
    norm_given: jax.Array | bool,
    sparse: jax.Array,
    threshold: float,
) -> tuple[LossState, jax.Array]:
    """Adds up what speaks for a rise; the state and whether it is a WARN."""
    score, jump = height.score, height.jump / unit
    gain = jnp.minimum(score, threshold) - _DRIFT
    limit = jnp.where(sparse, _EVIDENCE_SPARSE, _EVIDENCE)
    evidence = jnp.clip(state.evidence + gain, 0.0, limit + threshold - _DRIFT)
    evidence = jnp.where(score < 0, 0.0, evidence)
    # A value that repeats exactly is held over, and no new evidence.
    evidence = jnp.where(loss == state.loss, state.evidence, evidence)

    out, high = score > threshold, score > _RETURN
    least = jnp.minimum(jnp.min(state.rises), jump)
    lasting = high & (evidence >= limit) & (sparse | (least >= _LEAST_RISE))
    again = (state.level.excursion > 0) | sparse
    warn = (out & state.rising) | lasting
    warn |= again & out & (jump > _LARGE_JUMP) & (norm > threshold)
    warn |= again & (score > _HUGE_SCORE) & (jump > _HUGE_JUMP)
    warn |= sparse & high & ((norm > _JOINT_NORM) | (jump > _HUGE_JUMP))
    alone = (norm > _SUPPORT) | (jump > _LARGE_JUMP) | (score > _ALONE)
    warn |= sparse & out & (alone | ~jnp.asarray(norm_given))
    new = state._replace(
        evidence=evidence,
        rises=jnp.stack([state.rises[1], jump]),
        rising=(level.excursion > 0) & (warn | state.rising),
    )
    return new, warn


def _warm(
    state: LossState, x: jax.Array, unit: jax.Array
) -> tuple[jax.Array, LossState]:
    """Whether a loss of the warm-up blows up, and the state after it."""
    distinct = state.distinct + (x != state.level.last).astype(jnp.int32)
    least = jnp.where(distinct > _EARLY_VALUES, _LARGE_JUMP, _HUGE_JUMP) * unit
    limit = state.highest + jnp.maximum(least, state.highest - state.lowest)
    early = (state.level.observed > 1) & (x > limit)
    new = state._replace(
        highest=jnp.where(early, state.highest, jnp.maximum(x, state.highest)),
        lowest=jnp.where(early, state.lowest, jnp.minimum(x, state.lowest)),
        distinct=distinct,
    )
    return early, new


def _turn_linear(state: LossState, negative: jax.Array) -> LossState:
    """The state for values where it was one for logarithms, at the first negative."""
    turns = negative & ~state.linear
    s = state.level
    factor = jnp.exp(s.level)
    level = s._replace(
        level=factor,
        spread=factor * s.spread,
        rise=factor * s.rise,
        wobble=factor * s.wobble,
        last=jnp.exp(s.last),
        prior=jnp.exp(s.prior),
        candidate=jnp.exp(s.candidate),
        earlier=jnp.exp(s.earlier),
    )
    level = jax.tree.map(
        lambda n, o: jnp.where(turns & (s.observed > 0), n, o), level, s
    )
    return state._replace(
        level=level,
        linear=state.linear | negative,
        highest=jnp.where(turns, jnp.exp(state.highest), state.highest),
        lowest=jnp.where(turns, jnp.exp(state.lowest), state.lowest),
    )
