"""One verdict per step, joined from loss, gradients, moments and activations.

Signals stand in vectors: global gradient norm, norm of each gradient leaf and size of
each leaf's moments in one, magnitude of each row of the readings in another, all on
their logarithm. The loss has a judge of its own.

Severity by rule:
  BLOCK  something is not finite; an activation jumps, and by that passes 100 times its
         level at the end of the warm-up, or does so while loss or gradient spike; the
         moments of one leaf leap out of line with all others (they are damaged)
  WARN   a loss that rises and stays, a level of loss or gradient norm that was
         re-learnt, a norm too large to square, an activation that grew past its limit
         slowly (the limit then starts afresh)
  WATCH  a single spike of the loss, of the gradient or of an activation
Every finite BLOCK ends by itself: after `max_consecutive_steps` the level is re-learnt.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors import _findings
from stabil.detectors._baseline import BaselineState, deviate, observe
from stabil.detectors._findings import Evidence
from stabil.detectors._loss import LossState, judge_loss
from stabil.vocabulary import Readings, Severity, Verdict

_DECAY = 0.98
_LOG_FLOOR = 0.05  # 5 % of the signal: norms closer than this are the same
_FIRST_LOG_DEVIATION = 0.5


class JudgeState(NamedTuple):
    """What the judge remembers, with G gradient leaves and room for R rows.

    Attributes:
      loss: `LossState`.
      signals: `BaselineState` over `[1 + 2 G]`: the logs of the global gradient norm,
        of each gradient leaf's norm and of each leaf's moments.
      activations: `BaselineState` over `[R]`: the log of each row's magnitude.
      rows: uint32 scalar, fingerprint of the readings' row names; the rows' baseline
        starts again when it changes.
    """

    loss: LossState
    signals: BaselineState
    activations: BaselineState
    rows: jax.Array

    @classmethod
    def empty(cls, leaves: int, max_readings: int) -> JudgeState:
        """A judge that has seen nothing."""
        return cls(
            LossState.empty(),
            BaselineState.empty(1 + 2 * leaves),
            BaselineState.empty(max_readings),
            jnp.zeros([], jnp.uint32),
        )


class Judgement(NamedTuple):
    """A verdict and what follows from it.

    Attributes:
      verdict: the `Verdict`.
      state: the next `JudgeState`.
      damaged: bool `[G]`, leaves whose moments are damaged.
    """

    verdict: Verdict
    state: JudgeState
    damaged: jax.Array


def read_rows(readings: Readings | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Magnitudes float32 `[size]` and non-finite marks bool `[size]` of the rows."""
    values = jnp.full([size], jnp.nan, jnp.float32)
    marks = jnp.zeros([size], bool)
    if readings is None:
        return values, marks
    rows = len(readings.names)
    for statistic in ("absmax", "rms"):
        if statistic in readings:
            values = values.at[:rows].set(readings[statistic].astype(jnp.float32))
            break
    for statistic in ("nan_count", "inf_count"):
        if statistic in readings:
            marks = marks.at[:rows].set(marks[:rows] | (readings[statistic] > 0))
    return values, marks


def _log(x: jax.Array) -> jax.Array:
    """Logarithm of a positive finite signal, NaN for anything else."""
    usable = jnp.isfinite(x) & (x > 0)
    return jnp.where(usable, jnp.log(jnp.where(usable, x, 1.0)), jnp.nan)


def _where(pred: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(pred, n, o), new, old)


# Compiled as one piece, so that an eager `update` does not compile it op by op.
@functools.partial(
    jax.jit, static_argnames=("threshold", "warmup_steps", "max_consecutive_steps")
)
def judge(
    state: JudgeState,
    evidence: Evidence,
    *,
    threshold: float,
    warmup_steps: int,
    max_consecutive_steps: int,
    rows_fingerprint: jax.Array,
) -> Judgement:
    """Judges one step; pure, with no host read.

    Args:
      state: what was normal so far.
      evidence: the signals of this step.
      threshold: robust standard deviations beyond which the loss or the global gradient
        norm is a spike.
      warmup_steps: steps during which only finiteness judges.
      max_consecutive_steps: outliers in a row before a level is re-learnt.
      rows_fingerprint: uint32 scalar that names the rows of the readings.
    """
    e, base = evidence, state.signals
    sums = jnp.concatenate([jnp.sum(e.gradient_sums)[None], e.gradient_sums])
    x = _log(jnp.concatenate([jnp.sqrt(sums), e.moment_levels]))
    log_floor = jnp.float32(_LOG_FLOOR)
    d = deviate(base, x, floor=log_floor, warmup_steps=warmup_steps)
    loss, spoken = judge_loss(
        state.loss,
        jnp.where(e.loss_given, e.loss, jnp.nan),
        d.score[0],
        steps=state.loss.waited + 1,
        norm_given=d.usable[0],
        threshold=threshold,
        warmup_steps=warmup_steps,
    )
    waited = jnp.where(e.loss_given, 0, jnp.minimum(state.loss.waited, 1 << 20) + 1)

    known = state.rows == rows_fingerprint
    rows = _where(known, state.activations, BaselineState.empty(e.magnitudes.shape[0]))
    y = _log(e.magnitudes)
    dy = deviate(rows, y, floor=log_floor, warmup_steps=warmup_steps)

    limits = _findings.past_limit(dy, y, rows)
    found = _findings.find(e, x, d, base.location, dy, limits, spoken.spike, threshold)
    memory = dict(
        threshold=threshold,
        decay=_DECAY,
        warmup_steps=warmup_steps,
        max_consecutive_steps=max_consecutive_steps,
    )
    start = jnp.float32(_FIRST_LOG_DEVIATION)
    new, rises = observe(base, x, d, first_deviation=start, **memory)
    new_rows, _ = observe(rows, y, dy, first_deviation=start, **memory)
    # A limit that was reached without a jump is one event: the limit starts afresh.
    grown = limits & ~found.row_jumps
    reference = jnp.where(grown, new_rows.location, new_rows.reference)
    new_rows = new_rows._replace(reference=reference)

    risen = rises[0] | spoken.shifted
    lasting = spoken.severity >= int(Severity.WARN)
    score = jnp.maximum(jnp.max(d.score), jnp.max(dy.score, initial=0.0))
    score = jnp.maximum(score, spoken.score)
    verdict = Verdict(
        flags=_findings.union(found, risen),
        severity=_findings.severity(found, lasting, risen),
        first=_findings.first_signal(found, d),
        score=jnp.maximum(score, 0.0),
    )
    # A step with a non-finite value says nothing of what is normal.
    new = _where(found.nonfinite, base, new)
    new_rows = _where(found.nonfinite, rows, new_rows)
    loss = _where(found.nonfinite, state.loss, loss)._replace(waited=waited)
    return Judgement(
        verdict,
        JudgeState(loss, new, new_rows, rows_fingerprint),
        found.wild_moments | found.bad_moments,
    )
