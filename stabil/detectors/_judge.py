"""One verdict per step, joined from loss, gradients, moments, updates and activations.

Signals stand in vectors: global gradient norm, norm of each gradient leaf, size of each
leaf's moments and of the update in one, four numbers of each row of the readings in
another, all on their logarithm. The loss has a judge of its own.

Severity by rule:
  BLOCK  something is not finite; the loss leaps (`_loss.py`); an activation jumps, and
         by that passes 100 times its level at the end of the warm-up, or does so while
         loss or gradient spike; the moments of one leaf leap out of line with all
         others (they are damaged); in the warm-up, from the fourth step on, the
         gradient norm or an activation leaps to a hundred times its level so far
  WARN   a loss that rises and stays or drifts up, a level of loss or gradient norm that
         was re-learnt, a norm too large to square, an activation that grew past its
         limit slowly (100 times; 10 times for attention logits) or whose standard
         deviation fell to a hundredth, a layer that has been away from its siblings for
         50 steps or dead for as long, a device that has differed from the others for 20
  WATCH  a single spike of the loss, of the gradient, of the update or of an activation,
         a heavier tail, a lower rank, a value that leaves a number format, a layer that
         begins to depart, a drift of the gradient norm or of the update
Every finite BLOCK ends by itself: after `max_consecutive_steps` the level is re-learnt,
after `max_loss_steps` a loss that stays high lets its steps pass.
What is slow is one event: it is told on one step, and is then the level.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors import _findings
from stabil.detectors._baseline import BaselineState, Deviation, deviate, observe
from stabil.detectors._calibrated import Limits
from stabil.detectors._drift import drift
from stabil.detectors._findings import Evidence, Findings
from stabil.detectors._judge_state import JudgeState
from stabil.detectors._loss import judge_loss
from stabil.detectors._replicas import compare_replicas
from stabil.detectors._rows import Followed, follow_rows, pass_limit, unseen
from stabil.detectors._shadow import count_shadow
from stabil.detectors._siblings import Departed, SiblingState, compare
from stabil.vocabulary import Severity, Verdict

_DECAY = 0.98
_LOG_FLOOR = 0.05  # 5 % of the signal: norms closer than this are the same
_FIRST_LOG_DEVIATION = 0.5


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


def _log(x: jax.Array) -> jax.Array:
    """Logarithm of a positive finite signal, NaN for anything else."""
    usable = jnp.isfinite(x) & (x > 0)
    return jnp.where(usable, jnp.log(jnp.where(usable, x, 1.0)), jnp.nan)


# Compiled as one piece, so that an eager `update` does not compile it op by op.
@functools.partial(
    jax.jit,
    static_argnames=(
        "threshold",
        "warmup_steps",
        "max_consecutive_steps",
        "max_loss_steps",
        "groups",
        "names",
    ),
)
def judge(
    state: JudgeState,
    evidence: Evidence,
    *,
    threshold: float,
    warmup_steps: int,
    max_consecutive_steps: int,
    max_loss_steps: int = 16,
    rows_fingerprint: jax.Array,
    groups: tuple[int, ...] = (),
    names: int = 0,
    limits: Limits | None = None,
) -> Judgement:
    """Judges one step; pure, with no host read.

    Args:
      state: what was normal so far.
      evidence: the signals of this step.
      threshold: robust standard deviations beyond which the loss or the global gradient
        norm is a spike.
      warmup_steps: steps during which only finiteness and huge leaps judge.
      max_consecutive_steps: outliers in a row before a level is re-learnt.
      max_loss_steps: steps in a row that a leap of the loss blocks.
      rows_fingerprint: uint32 scalar that names the rows of the readings.
      groups: one number for each of `G + R` gradient leaves and rows, static; those
        with the same number are siblings. Empty where there are none.
      names: rows that have a name, static; 0 leaves all that rows could say out.
      limits: calibrated `Limits`, or None.
    """
    e = evidence
    leaves = e.gradient_sums.shape[0]
    state = state.for_rows(rows_fingerprint)
    base = state.signals
    memory = dict(
        threshold=threshold,
        decay=_DECAY,
        warmup_steps=warmup_steps,
        max_consecutive_steps=max_consecutive_steps,
    )
    start, floor = jnp.float32(_FIRST_LOG_DEVIATION), jnp.float32(_LOG_FLOOR)
    noise, row_noise = (floor, floor) if limits is None else limits[3:]
    sums = jnp.concatenate([jnp.sum(e.gradient_sums)[None], e.gradient_sums])
    sizes = jnp.concatenate([jnp.sqrt(sums), e.moment_levels, e.update_rms[None]])
    x = _log(sizes)
    d = deviate(base, x, floor=noise, warmup_steps=warmup_steps)
    signals, rises = observe(base, x, d, first_deviation=start, **memory)
    spikes = _findings.spikes(e, x, d, base.location, threshold)

    value = jnp.where(e.loss_given, e.loss, jnp.nan)
    loss, spoken = judge_loss(
        state.loss,
        value,
        d.score[0],
        steps=state.loss.waited + 1,
        norm_given=d.usable[0],
        threshold=threshold,
        warmup_steps=warmup_steps,
        max_leaps=max_loss_steps,
    )
    past, too_high = jnp.zeros(x.shape, bool), jnp.zeros([], bool)
    if limits is not None:
        signals, past = pass_limit(signals, base, x, limits.signals)
        too_high = value > limits.loss
    drifted, drifts = drift(
        state.drift,
        jnp.stack([_log(value), x[0], x[-1]]),
        jnp.stack([spoken.shifted, rises[0], rises[-1]]),
    )

    activations, rows = state.activations, unseen(e.rows.magnitudes.shape[0])
    if names:
        activations, rows = follow_rows(
            activations,
            e.rows,
            floor=row_noise,
            first=start,
            largest=None if limits is None else limits.rows,
            **memory,
        )
    known = signals.observed[1 : 1 + leaves] >= warmup_steps
    siblings, layers = _layers(
        state.siblings, e, signals, d, spikes["leaf_spikes"], known, rows, groups
    )
    replicas, outsider = compare_replicas(
        state.replicas, e.rows.shards, e.rows.ill_shards
    )
    found = Findings(
        bad_loss=~jnp.isfinite(e.loss) & e.loss_given,
        bad_gradients=jnp.isnan(e.gradient_sums),
        bad_moments=e.bad_moments,
        bad_rows=e.rows.nonfinite,
        loss_leap=spoken.leap,
        loss_spike=spoken.spike | too_high,
        loss_lasts=(spoken.severity >= int(Severity.WARN)) | too_high,
        row_jumps=rows.jumps,
        row_shapes=rows.shapes,
        row_limits=rows.limits,
        slopes=rows.slopes,
        crowded=e.rows.crowded & ~state.crowded,
        layers=layers,
        outsider=outsider,
        beyond=past,
        risen=rises[0] | spoken.shifted,
        drifts=drifts,
        **spikes,
    )
    scores = (
        spoken.score,
        d.score[0],
        jnp.max(d.score[1 : 1 + leaves], initial=0.0),
        jnp.max(d.score[1 + leaves : -1], initial=0.0),
        rows.score,
    )
    verdict = Verdict(
        flags=_findings.union(found),
        severity=_findings.severity(found),
        first=_findings.first_signal(found, d, names),
        score=jnp.maximum(jnp.max(jnp.stack([*scores, d.score[-1]])), 0.0),
    )
    read = jnp.isfinite(e.rows.magnitudes)
    new = state._replace(
        loss=loss,
        signals=signals,
        activations=activations,
        siblings=siblings,
        replicas=replicas,
        crowded=jnp.where(read, e.rows.crowded, state.crowded),
        drift=drifted,
    )
    # A step with a non-finite value says nothing of what is normal.
    new = jax.tree.map(lambda n, o: jnp.where(found.nonfinite, o, n), new, state)
    waited = jnp.where(e.loss_given, 0, jnp.minimum(state.loss.waited, 1 << 20) + 1)
    new = new._replace(
        loss=new.loss._replace(waited=waited),
        shadow=count_shadow(state.shadow, scores),
    )
    return Judgement(verdict, new, found.wild_moments | found.bad_moments)


def _layers(
    state: SiblingState,
    e: Evidence,
    signals: BaselineState,
    d: Deviation,
    leaf_spikes: jax.Array,
    alive: jax.Array,
    rows: Followed,
    groups: tuple[int, ...],
) -> tuple[SiblingState, Departed]:
    """Compares gradient leaves and rows with their siblings, in one vector."""
    leaves = slice(1, 1 + e.gradient_sums.shape[0])
    armed = d.armed[leaves]

    def both(of_leaves: jax.Array, of_rows: jax.Array) -> jax.Array:
        return jnp.concatenate([of_leaves, of_rows])

    still = (e.rows.shapes[0] == 0) & rows.alive
    return compare(
        state,
        level=both(jnp.where(armed, signals.location[leaves], jnp.nan), rows.level),
        jump=both(jnp.where(armed, d.jump[leaves], jnp.nan), rows.jump),
        noise=both(d.scale[leaves], rows.noise),
        spikes=both(leaf_spikes, rows.jumps),
        values=both(e.gradient_sums, jnp.where(still, 0.0, e.rows.magnitudes)),
        alive=both(alive, rows.alive),
        groups=groups,
    )
