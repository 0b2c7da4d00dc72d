"""The default clip: bounds a gradient norm that leaves its own recent range."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.detectors import BaselineState, deviate, observe
from stabil.transforms import _check
from stabil.vocabulary import Cause, Measures, Severity, Tally, Verdict

_FLOOR = 0.05  # norms within 5 % of each other are the same
# While held, the norm may rise by this share above its mean, which forgets so fast.
_HELD_RISE, _HELD_DECAY = 1.1, 0.95


class SpikeAwareState(NamedTuple):
    """State of `spike_aware`.

    Attributes:
      baseline: `BaselineState` of one signal, the log of the global gradient norm.
      verdict: `Verdict` of the newest step.
      tally: `Tally` since the run began.
      measures: `Measures` of the newest step.
      clip_factor: float32 scalar, what the newest gradient was multiplied by.
      threshold_norm: float32 scalar, norm above which the newest gradient would have
        been clipped; inf during the warm-up.
      held_steps: int32 scalar, further steps whose norm is held down.
      held_norm: float32 scalar, mean of the norms let through while it is; else the
        level, inf during the warm-up.
    """

    baseline: BaselineState
    verdict: Verdict
    tally: Tally
    measures: Measures
    clip_factor: jax.Array
    threshold_norm: jax.Array
    held_steps: jax.Array
    held_norm: jax.Array


def spike_aware(
    *,
    threshold: float = 6.0,
    decay: float = 0.98,
    warmup_steps: int = 20,
    max_consecutive_steps: int = 5,
    least_ratio: float = 4.0,
    hold_steps: int = 1000,
    max_norm: float = float("inf"),
) -> optax.GradientTransformationExtraArgs:
    r"""Clips a gradient whose norm spikes, by a robust rule on the log of the norm.

    With n the global L2 norm in float32, m and s the robust level and standard
    deviation of log n (`stabil.detectors`):

      limit = exp(m + threshold * s)
      g <- g * limit / n   where n > max(limit, least_ratio * exp(m))
      g <- g * 1.1 h / n   where n > 1.1 h, for hold_steps after an alarm
      g <- g * min(1, max_norm / n)

    Healthy norms have heavy tails: of 154,000 steps of eight public GPT-2 runs 316
    leave six deviations, and 20 of these four times their level as well. The others are
    told as spikes and not touched. A spike enters m and s as if it were 3 s away, so
    that it neither hides the next one nor raises the limit. A lasting change of the
    norm is taken as the new level after `max_consecutive_steps` spikes in a row. A
    gradient with a NaN or an infinity becomes zero and changes no statistic. A finite
    gradient whose norm leaves float32 (1.8e19) is brought within the limit, or to at
    most 1 before there is one.
    Quiet gradients pass unchanged.

    An alarm is a spike of the loss that the `stabil.guard` around it calls a WARN, or
    refuses, or whose step has a norm of `least_ratio` times its level. What the batches
    ask for has then changed, or the run is near an edge, and Adam's second moment
    remembers the time before. h is the mean of the norms that were let through since,
    with a decay of 0.95 from exp(m) on: it falls with the norms, and rises by at most
    0.5 % a step. So runs that meet bursts of bad batches or a change of the data end
    lower (`docs/methods.md`). In 154,000 steps of eight public GPT-2 runs one is an
    alarm.

    Place: first in `optax.chain`, or `clip=` of `stabil.guard`. Does not: stop the
    momentum or the weight decay of the optimizer after it on a step that it zeroes;
    `stabil.guard` does. Does not: hold the norm without a guard, since one link knows
    nothing of the loss. Does not: save a run whose learning rate is too high, whose
    norms stay in their range until it is lost; `max_norm=1.0` delays that, and a
    `stabil.Session` ends it. Cost: one read of the gradient.

    Args:
      threshold: robust standard deviations above the level, where a spike begins and
        what it is clipped to; dimensionless, > 0.
      decay: memory of the level, per step; in [0, 1).
      warmup_steps: steps at the start that only `max_norm` clips; >= 1.
      max_consecutive_steps: spikes in a row that re-learn the level; >= 1.
      least_ratio: a norm of less than so many times its level is not clipped, however
        many deviations that is; dimensionless, > 0.
      hold_steps: steps from an alarm on whose norm is held down, about the memory of
        Adam's second moment at b2 = 0.999; 0 for none.
      max_norm: an ordinary constant limit on the norm as well; > 0, inf for none.

    Returns:
      Transformation; updates keep shape and dtype. State: `SpikeAwareState`, scalars
      only. Extra arguments are accepted and ignored, but for `norms`: float32
      `[leaves]`, L2 norms of the gradient's floating leaves if already known, and
      `verdict`: the `Verdict` of this step, which `stabil.guard` hands over.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp, optax, stabil
      >>> tx = optax.chain(stabil.spike_aware(warmup_steps=2), optax.sgd(1.0))
      >>> state = tx.init(jnp.ones(4))
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.ones(4), state)
      >>> updates, state = tx.update(1e6 * jnp.ones(4), state)
      >>> bool(jnp.max(jnp.abs(updates)) < 1e3)
      True
      >>> int(stabil.vitals(state).tally.clipped_steps)
      1

    Source: our own rule. Logarithms because gradient norms are close to lognormal and
    spikes multiply; bounded influence after Huber, Robust Estimation of a Location
    Parameter, 1964. ZClip (arXiv:2504.02507) clips on a z-score too; we differ: (1) on
    the log of the norm, (2) with mean absolute deviation instead of the variance, (3)
    with an end to every refusal, (4) statistics that no NaN can enter. The norm is held
    after an alarm as AdaGC (arXiv:2502.11034) holds that of every tensor on all steps.
    """
    _check.positive(
        "spike_aware", threshold=threshold, least_ratio=least_ratio, max_norm=max_norm
    )
    _check.fraction("spike_aware", decay=decay)
    _check.at_least(
        "spike_aware",
        1,
        warmup_steps=warmup_steps,
        max_consecutive_steps=max_consecutive_steps,
    )
    _check.at_least("spike_aware", 0, hold_steps=hold_steps)

    def init(params: Any) -> SpikeAwareState:
        del params
        return SpikeAwareState(
            baseline=BaselineState.empty(1),
            verdict=Verdict.clear(),
            tally=Tally.zero(),
            measures=Measures.unmeasured(),
            clip_factor=jnp.ones([], jnp.float32),
            threshold_norm=jnp.full([], jnp.inf, jnp.float32),
            held_steps=jnp.zeros([], jnp.int32),
            held_norm=jnp.full([], jnp.inf, jnp.float32),
        )

    def update(
        updates: Any, state: SpikeAwareState, params: Any = None, **extra: Any
    ) -> tuple[Any, SpikeAwareState]:
        del params
        norms = extra.get("norms")
        if norms is None:
            norms = jnp.sqrt(_tree.sums_of_squares(updates))
        norm = jnp.sqrt(jnp.sum(jnp.square(norms)))
        finite, overflow = ~jnp.isnan(norm), jnp.isposinf(norm)
        x = jnp.where(jnp.isfinite(norm) & (norm > 0), jnp.log(norm), jnp.nan)[None]
        d = deviate(
            state.baseline, x, floor=jnp.float32(_FLOOR), warmup_steps=warmup_steps
        )
        armed = state.baseline.observed[0] >= warmup_steps
        level = jnp.where(armed, jnp.exp(state.baseline.location[0]), jnp.inf)
        edge = level * jnp.exp(threshold * d.scale[0])
        large = least_ratio * level
        alarm = _is_alarm(extra.get("verdict"), norm > large)
        held_steps = jnp.where(alarm, hold_steps, state.held_steps)
        held = held_steps > 0
        was_held = (state.held_steps > 0) & jnp.isfinite(state.held_norm)
        usual = jnp.where(was_held, state.held_norm, level)
        held_limit = _HELD_RISE * usual
        far = jnp.where(held, held_limit, jnp.maximum(edge, large))
        down_to = jnp.where(held, held_limit, edge)
        limit = jnp.minimum(jnp.where(norm > far, down_to, jnp.inf), max_norm)
        over = finite & (norm > limit)
        factor = jnp.where(over, limit / jnp.where(over, norm, 1.0), 1.0)
        # Entries are bounded by LARGEST then, which bounds the norm as well.
        bound = _tree.LARGEST * jnp.sqrt(jnp.sum(_tree.sizes(updates)))
        most = jnp.where(jnp.isfinite(limit), limit, 1.0)
        factor = jnp.where(overflow, most / bound, factor)
        gap = jnp.minimum(norm, limit) - usual
        let_through = usual + (1 - _HELD_DECAY) * gap
        baseline, risen = observe(
            state.baseline,
            x,
            d,
            threshold=threshold,
            decay=decay,
            warmup_steps=warmup_steps,
            max_consecutive_steps=max_consecutive_steps,
            first_deviation=jnp.float32(0.5),
        )
        spike = d.score[0] > threshold
        verdict = _verdict(finite, spike, risen[0], overflow, norms, d.score[0])
        new = SpikeAwareState(
            baseline=baseline,
            verdict=verdict,
            tally=count(state.tally, verdict, factor < 1),
            measures=Measures.unmeasured()._replace(
                grad_norm=norm, clip_factor=jnp.where(finite, factor, 0.0)
            ),
            clip_factor=jnp.where(finite, factor, 0.0),
            threshold_norm=jnp.minimum(far, max_norm),
            held_steps=jnp.maximum(held_steps - 1, 0),
            held_norm=jnp.where(jnp.isfinite(let_through) & held, let_through, usual),
        )
        return _tree.rescale(updates, factor, finite), new

    return optax.GradientTransformationExtraArgs(init, update)


def _is_alarm(verdict: Verdict | None, large: jax.Array) -> jax.Array:
    """Whether the guard says that training is at risk: a gradient alone does not."""
    if verdict is None:
        return jnp.bool_(False)
    harms = (verdict.flags & int(Cause.LOSS_SPIKE)) != 0
    return harms & ((verdict.severity >= int(Severity.WARN)) | large)


def _verdict(
    finite: jax.Array,
    spike: jax.Array,
    risen: jax.Array,
    overflow: jax.Array,
    norms: jax.Array,
    score: jax.Array,
) -> Verdict:
    zero = jnp.int32(0)
    flags = jnp.where(finite, zero, jnp.int32(Cause.NONFINITE_GRADIENT))
    flags |= jnp.where(spike, jnp.int32(Cause.GRADIENT_SPIKE), zero)
    flags |= jnp.where(risen, jnp.int32(Cause.LEVEL_SHIFT), zero)
    flags |= jnp.where(overflow, jnp.int32(Cause.NORM_OVERFLOW), zero)
    warn = risen | overflow
    severity = jnp.where(spike, jnp.int32(Severity.WATCH), jnp.int32(Severity.OK))
    severity = jnp.where(warn, jnp.int32(Severity.WARN), severity)
    severity = jnp.where(finite, severity, jnp.int32(Severity.BLOCK))
    bad = jnp.isnan(norms)
    leaf = jnp.argmax(bad).astype(jnp.int32) + jnp.int32(1) if bad.size else zero
    first = jnp.where(spike | warn, zero, jnp.int32(-1))
    first = jnp.where(finite, first, leaf)
    return Verdict(flags, severity, first, jnp.maximum(score, 0.0))


def count(
    tally: Tally, verdict: Verdict, clipped: jax.Array, resets: jax.Array | int = 0
) -> Tally:
    """The tally after one more step with this verdict."""
    blocked = verdict.severity >= int(Severity.BLOCK)
    bits = jnp.asarray([int(c) for c in Cause], jnp.int32)
    raised = (verdict.flags & bits) != 0

    def add(counter: jax.Array, amount: jax.Array | int) -> jax.Array:
        top = jnp.iinfo(jnp.int32).max
        amount = jnp.asarray(amount).astype(jnp.int32)
        return jnp.where(counter > top - amount, top, counter + amount)

    return Tally(
        judged_steps=add(tally.judged_steps, 1),
        blocked_steps=add(tally.blocked_steps, blocked),
        blocked_in_a_row=jnp.where(blocked, add(tally.blocked_in_a_row, 1), 0),
        clipped_steps=add(tally.clipped_steps, clipped & ~blocked),
        resets=add(tally.resets, resets),
        by_cause=add(tally.by_cause, raised),
    )
