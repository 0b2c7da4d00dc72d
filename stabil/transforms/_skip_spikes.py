"""Skips a step whose loss or gradient norm spikes, by a window of recent values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leaves, _scaling, _skip, _skip_rules
from stabil.transforms._selective import update_if
from stabil.transforms._window import Window
from stabil.vocabulary import Cause


class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
      inner_state: of the wrapped transformation.
      record: `SkipRecord`; what was seen and done.
      losses: `Window`, float32 `[window]`.
      norms: `Window`, float32 `[window]`; gradient norms.
      loss_score: float32; deviations of the newest loss above its window; 0 while the
        window fills.
      norm_score: float32; the same for the norm.
      threshold: float32; the norm above which the newest step was a spike; 0 while the
        window fills.
      spikes_in_a_row: int32; steps refused for a finite spike; non-finite and empty
        ones between them do not count and do not end the run.
      level_shifts: int32; how often that run reached its limit and became the level.
    """

    inner_state: Any
    record: _skip.SkipRecord
    losses: Window
    norms: Window
    loss_score: jax.Array
    norm_score: jax.Array
    threshold: jax.Array
    spikes_in_a_row: jax.Array
    level_shifts: jax.Array


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    window: int = 128,
    deviations: float = 6.0,
    rule: Literal["robust", "olmo", "maxtext", "levanter", "llmc"] = "robust",
    max_consecutive_steps: int = 5,
) -> optax.GradientTransformationExtraArgs:
    """Leaves everything as it was on a step whose loss or gradient norm spikes.

    With median and MAD over the last W values before step t, and s = 1.4826 MAD:
    spike if loss_t > med + k max(s, 0.01 |med|), or
    log n_t > med(log n) + k max(s(log n), 0.05). One-sided. Every finite value enters
    the window, skipped or not; a non-finite one is skipped and never enters.

    On a skipped step the update is zero, and moments, counters and schedules inside
    `inner` are bit-identical to before. Quiet gradients pass unchanged.

    Place: outside of the whole chain. Cost: one read of the gradient, four sorts of
    `window` numbers. Does not: judge before half of the window is filled, save a run
    whose parameters are damaged (see `record.escalation`), or find the bad tensor.

    Args:
      inner: the optimizer; it sees all keywords of `update`.
      window: W; steps, >= 2.
      deviations: k; > 0.
      rule: "robust", or a published rule to the letter, faults included: "olmo" (mean +
        k unbiased deviations; a skip multiplies by 0, so NaN passes; a NaN in the
        window skips all W steps after it), "maxtext" (the same, selected), "levanter"
        (population deviation, floor 1e-6, updates times 0), "llmc" (the window holds
        the value itself, so z <= (W - 1) / sqrt(W); after a NaN nothing is ever
        skipped).
      max_consecutive_steps: spikes in a row after which the step is taken and the run
        becomes the new window; >= 1. Robust rule only; a non-finite step is never
        taken.

    Returns:
      Transformation. `update` takes the optional keywords `loss` (scalar), `grad_norm`
      (the norm to judge, when the gradient at hand has been clipped), `tokens` (0 means
      an empty batch), `norms` (per-leaf norms, float32 `[leaves]`) and `scale` (loss
      scale that the gradient carries). State: `SkipSpikesState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = skip_spikes(optax.sgd(1.0), window=4)
      >>> state = tx.init(jnp.ones(1))
      >>> for loss in (2.0, 2.0, 2.0, 9.0):
      ...     updates, state = tx.update(jnp.ones(1), state, loss=jnp.array(loss))
      >>> print(updates, int(state.record.skipped_steps))
      [0.] 1

    Source: W = 128 and k = 6 of OLMo 2 (arXiv 2501.00656), SkipStepOptimizer of
    OLMo-core, after llm.c's outlier detector; median and MAD after Huber, Robust
    Statistics. We differ from those: (1) median and MAD: of five equal spikes in a row
    a mean and deviation see the first. (2) Logarithms of norms, floors of the scale.
    (3) Non-finite values are skipped, whatever the window says, and never stored. (4)
    Selected, never multiplied. (5) The refusal ends; the level is learnt anew.
    """
    _check.at_least("skip_spikes", 2, window=window)
    _check.positive("skip_spikes", deviations=deviations)
    _check.at_least("skip_spikes", 1, max_consecutive_steps=max_consecutive_steps)
    _leaves.one_of("skip_spikes", tuple(_skip_rules.JUDGES), rule=rule)
    inner = optax.with_extra_args_support(inner)
    judge = _skip_rules.JUDGES[rule]
    robust = rule == "robust"

    def init(params: Any) -> SkipSpikesState:
        dtype = _leaves.statistics_dtype(params)
        return SkipSpikesState(
            inner.init(params),
            _skip.SkipRecord.empty(dtype),
            Window.empty(window, dtype=dtype),
            Window.empty(window, dtype=dtype),
            jnp.zeros([], dtype),
            jnp.zeros([], dtype),
            jnp.zeros([], dtype),
            _leaves.zero_int(),
            _leaves.zero_int(),
        )

    def decide(
        seen: _skip.Seen, state: SkipSpikesState, has_loss: bool
    ) -> tuple[jax.Array, jax.Array, SkipSpikesState]:
        """Why, whether to skip, and the state with its statistics advanced."""
        hot, norm_score, limit, norms = judge(
            seen.norm, state.norms, deviations, True, seen.empty
        )
        reason = _skip.bits(Cause.GRADIENT_SPIKE, hot)
        loss_score, losses = state.loss_score, state.losses
        if has_loss:
            hot, loss_score, _, losses = judge(
                seen.loss, state.losses, deviations, False, seen.empty
            )
            reason |= _skip.bits(Cause.LOSS_SPIKE, hot)
        if not robust:
            return (
                reason,
                reason != 0,
                state._replace(
                    norms=norms,
                    losses=losses,
                    norm_score=norm_score,
                    loss_score=loss_score,
                    threshold=limit,
                ),
            )
        blocked = seen.reason != 0
        reason = jnp.where(blocked, seen.reason, reason)
        spike = (reason != 0) & ~blocked
        run = jnp.where(spike, state.spikes_in_a_row + 1, 0)
        run = jnp.where(blocked, state.spikes_in_a_row, run)
        shift = run > max_consecutive_steps
        reason |= _skip.bits(Cause.LEVEL_SHIFT, shift)
        restart = jax.tree.map(
            lambda new, old: jnp.where(shift, new, old),
            (norms.newest(run), losses.newest(run)),
            (norms, losses),
        )
        return (
            reason,
            (reason != 0) & ~shift,
            state._replace(
                norms=restart[0],
                losses=restart[1],
                norm_score=norm_score,
                loss_score=loss_score,
                threshold=limit,
                spikes_in_a_row=jnp.where(shift, 0, run),
                level_shifts=_leaves.one_more(state.level_shifts, shift),
            ),
        )

    def update(
        updates: Any, state: SkipSpikesState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SkipSpikesState]:
        seen = _skip.look(updates, state.record.norm.dtype, extra_args)
        has_loss = extra_args.get("loss") is not None
        reason, skipped, new_state = decide(seen, state, has_loss)
        record = _skip.record(
            state.record, seen, reason, skipped, params, max_consecutive_steps
        )
        skipped, arguments = record.skipped, (updates, state.inner_state, params)
        factor = jnp.where(skipped, 0.0, 1.0)
        if rule in ("olmo", "levanter"):
            # Selected after the fact, so that a NaN comes out as in those codes.
            new, inner_state = inner.update(*arguments, **extra_args)
            new = _scaling.multiply(new, factor)
            if rule == "olmo":
                inner_state = _blend(state.inner_state, inner_state, factor)
            else:
                inner_state = _tree.select(skipped, state.inner_state, inner_state)
        else:
            new, inner_state = update_if(
                "skip_spikes", inner, ~skipped, arguments, extra_args
            )
            new = _tree.zeros_unless(~skipped, new)
        return new, new_state._replace(inner_state=inner_state, record=record)

    return optax.GradientTransformationExtraArgs(init, update)


def _blend(old: Any, new: Any, factor: jax.Array) -> Any:
    """Moves the state by `factor`, which lets a NaN in even when that is 0."""

    def one(a: Any, b: Any) -> Any:
        if not _tree.is_measured(a):
            return jnp.where(factor > 0, b, a)
        return a + (b - a) * factor.astype(jnp.asarray(a).dtype)

    return jax.tree.map(one, old, new)
