"""A wrapper that lets no bad step through to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.detectors import JudgeState, judge, limits_for, read_ranges
from stabil.transforms import _check, _controlled, _evidence
from stabil.transforms._moment_levels import moment_levels
from stabil.transforms._moments import restart_moments
from stabil.transforms._parameter_watch import (
    ParameterSizes,
    watch_parameters,
    with_parameters,
)
from stabil.transforms._selective import selective_update
from stabil.transforms._spike_aware import count, spike_aware
from stabil.vocabulary import (
    Cause,
    Controls,
    Measures,
    Readings,
    Severity,
    Tally,
    Verdict,
)


class GuardState(NamedTuple):
    """State of `guard`.

    Attributes:
      inner_state: state of the guarded optimizer.
      clip_state: state of the clip.
      judge_state: `JudgeState`, what is normal for every signal.
      verdict: `Verdict` of the newest step.
      tally: `Tally` since the run began.
      measures: `Measures` of the newest step.
      parameter_sizes: `ParameterSizes`, how large each parameter leaf is.
    """

    inner_state: Any
    clip_state: Any
    judge_state: JudgeState
    verdict: Verdict
    tally: Tally
    measures: Measures
    parameter_sizes: ParameterSizes


def guard(
    inner: optax.GradientTransformation,
    *,
    clip: optax.GradientTransformation | None | str = "spike_aware",
    reset: bool = True,
    threshold: float = 6.0,
    warmup_steps: int = 20,
    max_consecutive_steps: int = 5,
    max_loss_steps: int = 16,
    max_readings: int = 256,
    shadow: Sequence[float] = (4.0, 8.0, 12.0),
    calibration: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Judges every step before the optimizer acts, and blocks the bad ones.

    A blocked step returns zero updates and leaves the optimizer's state (moments,
    counters, schedules) bit-identical, by select. What blocks: a loss, gradient,
    activation, parameter or moment that is not finite, the jumps named in
    `stabil.detectors`, and a parameter leaf whose size leaps between two steps as no
    update makes it leap: memory that was overwritten.
    A spike of the gradient alone is not blocked, and clipped from four times the level
    on; a leap in the warm-up, where there is no limit to clip to, is blocked. A loss
    that leaps (to 2.5 times its level and by ten deviations, or to 1.2 times and stays)
    is blocked, at most `max_loss_steps` in a row and about 32 in 1,000: bad batches end
    by then, new data go on. A spike of the loss that lasts, is blocked or comes with a
    large gradient makes the default clip hold norms down for a while, see
    `spike_aware`. Other blocks for finite values end after `max_consecutive_steps`,
    when the new level is taken as normal; blocks for non-finite values last as long as
    their cause: watch `tally.blocked_in_a_row`. Quiet gradients pass unchanged.

    Place: outermost, around the whole chain, inside `optax.MultiSteps`. Does not: guard
    state outside the optimizer, such as batch statistics; select it yourself with
    `stabil.select(stabil.vitals(opt_state), new, old)`. Does not: see every entry of
    the moments and parameters; it reads a few columns of each, which keeps the cost of
    clipping. Does not: tell damage from a change that you make yourself: a leaf that
    you more than double in size, or cut to a quarter, is refused like damage, for
    `max_consecutive_steps - 1` steps. Parameters that you put in between `init` and the
    first step are not, unless they are a single leaf, 20 times as large as before.
    With no anomaly, params and inner state equal those of an unguarded run bit for bit;
    tested on CPU for Adam, AdamW, Lion and SGD with momentum. Of other optimizers the
    last bits of a parameter may differ: XLA may contract the closing multiply and add
    of the unguarded program, which no wrapper can see (AdaGrad, RMSProp, JAX 0.12).

    Args:
      inner: the optimizer to guard.
      clip: transformation that bounds the gradient before `inner`; `"spike_aware"` for
        `stabil.spike_aware` with this guard's `threshold`, `warmup_steps` and
        `max_consecutive_steps`, or None for no clipping.
      reset: whether to restart the moments of a leaf that leap out of line with those
        of all other leaves, or are not finite, on the step that is blocked for it:
        first moments become 0, second moments the leaf's present mean square.
      threshold: robust standard deviations beyond which the loss or the gradient norm
        is a spike; > 0.
      warmup_steps: steps during which only finiteness, leaps to a hundred times the
        level so far and sizes of parameters judge; >= 1.
      max_consecutive_steps: finite refusals in a row before the level is re-learnt.
      max_loss_steps: refusals in a row for a loss that stays high; 0 never refuses a
        step for a finite loss.
      max_readings: rows of `readings` to make room for in the state; >= 0.
      shadow: other thresholds, in robust standard deviations, that are only counted:
        `stabil.vitals(opt_state).shadow` says how often each would have fired.
      calibration: file written by `stabil calibrate`, or what `stabil.curves.calibrate`
        returned: a signal beyond its limit is a WARN from the first step on, and a
        signal that is noisy by nature is judged by that noise.

    Returns:
      Transformation. `update` takes these extra arguments, all optional: `loss`, a
      scalar of any floating dtype; `readings`, `stabil.Readings` of this step;
      `controls`, `stabil.Controls` (a step that is asked to restart the moments returns
      zero updates). They and any others are also passed to `inner`.
      Updates keep shape and dtype. State: `GuardState`, fixed shapes.

    Raises:
      ValueError: a hyperparameter is out of range; at trace time, a loss that is no
        scalar, or readings with more rows than `max_readings`.
      TypeError: `inner` or `clip` is no gradient transformation, or `calibration` is
        neither a path nor a mapping.

    Examples:
      >>> import jax.numpy as jnp, optax, stabil
      >>> tx = stabil.guard(optax.adam(0.1))
      >>> state = tx.init(jnp.ones(3))
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan, 1.0]), state)
      >>> print(updates)
      [0. 0. 0.]
      >>> stabil.vitals(state).causes
      ('nonfinite_gradient',)
    """
    _check.positive("guard", threshold=threshold)
    _check.at_least(
        "guard",
        1,
        warmup_steps=warmup_steps,
        max_consecutive_steps=max_consecutive_steps,
    )
    _check.at_least(
        "guard", 0, max_readings=max_readings, max_loss_steps=max_loss_steps
    )
    others = _check.thresholds("guard", shadow)
    ranges = read_ranges(calibration)
    if isinstance(clip, str) and clip == "spike_aware":
        clip = spike_aware(
            threshold=threshold,
            warmup_steps=warmup_steps,
            max_consecutive_steps=max_consecutive_steps,
        )
    clip = optax.identity() if clip is None else clip
    for name, value in (("inner", inner), ("clip", clip)):
        if not isinstance(value, optax.GradientTransformation):
            raise TypeError(
                f"guard: needed an optax.GradientTransformation for {name}, got "
                f"{value!r}; write stabil.guard(optax.adamw(3e-4), "
                "clip=stabil.spike_aware())"
            )
    inner = optax.with_extra_args_support(inner)
    clip = optax.with_extra_args_support(clip)

    def init(params: Any) -> GuardState:
        return GuardState(
            inner_state=inner.init(params),
            clip_state=clip.init(params),
            judge_state=JudgeState.empty(
                len(_tree.measured_names(params)), max_readings, others
            ),
            verdict=Verdict.clear(),
            tally=Tally.zero(),
            measures=Measures.unmeasured(),
            parameter_sizes=ParameterSizes.of(params),
        )

    def update(
        updates: Any,
        state: GuardState,
        params: Any = None,
        *,
        loss: Any = None,
        readings: Readings | None = None,
        controls: Controls | None = None,
        **extra: Any,
    ) -> tuple[Any, GuardState]:
        grads = updates
        sums = _tree.sums_of_squares(grads)
        moments = moment_levels(state.inner_state, grads)
        found = judge(
            state.judge_state,
            _evidence.gather(sums, moments, loss, readings, max_readings),
            rows_fingerprint=_evidence.mark(state.judge_state.rows, readings),
            threshold=threshold,
            warmup_steps=warmup_steps,
            max_consecutive_steps=max_consecutive_steps,
            max_loss_steps=max_loss_steps,
            groups=_evidence.sibling_groups(grads, readings, max_readings),
            names=0 if readings is None else len(readings.names),
            limits=limits_for(
                ranges, _tree.measured_names(grads), readings, max_readings
            ),
        )
        leapt, bad, parameter_sizes = watch_parameters(
            state.parameter_sizes, params, max_consecutive_steps=max_consecutive_steps
        )
        found = found._replace(verdict=with_parameters(found.verdict, leapt, bad))
        ok = found.verdict.severity < int(Severity.BLOCK)
        asked = jnp.bool_(False) if controls is None else controls.reset_moments
        restart = (found.damaged & jnp.asarray(reset)) | asked
        # A step that restarts moments is refused too: they have nothing to say yet.
        proceed = ok & ~asked
        inward = None if controls is None else _controlled.inward(controls)
        passed = dict(extra, loss=loss, readings=readings, controls=inward)
        passed = {k: v for k, v in passed.items() if v is not None}
        told = _with_missed(state.verdict, found.verdict)
        # The clip takes the same norms again; XLA computes them once.
        clipped, clip_state = clip.update(
            grads, state.clip_state, params, verdict=told, **passed
        )
        refused = restart_moments(
            state.inner_state, grads, restart, sums / _tree.sizes(grads)
        )

        def run_inner(grads: Any, state: Any, params: Any, extra: Any) -> Any:
            try:
                return inner.update(grads, state, params, **extra)
            except ValueError as error:
                if params is not None or "params" not in str(error):
                    raise
                raise ValueError(
                    "guard: needed the parameters, which the guarded optimizer uses, "
                    "got params=None; write tx.update(grads, opt_state, params)"
                ) from error

        updates, inner_state = selective_update(
            "guard",
            run_inner,
            proceed,
            (clipped, state.inner_state, params, passed),
            refused,
        )
        factor = _clip_factor(clip_state)
        new = GuardState(
            inner_state=inner_state,
            clip_state=_tree.select(ok, clip_state, state.clip_state),
            judge_state=found.state,
            verdict=found.verdict,
            tally=count(state.tally, found.verdict, factor < 1, jnp.sum(restart)),
            measures=Measures(
                loss=_evidence.scalar(loss),
                grad_norm=jnp.sqrt(jnp.sum(sums)),
                clip_factor=factor,
                update_rms=moments.rms,
            ),
            parameter_sizes=parameter_sizes,
        )
        scale = _controlled.scale(controls, found.verdict)
        updates = _controlled.slowed(updates, scale)
        return _tree.zeros_unless(proceed, updates), new

    return optax.GradientTransformationExtraArgs(init, update)


def _with_missed(before: Verdict, now: Verdict) -> Verdict:
    """What the clip is told: its state misses refused steps, so it hears of a leap of
    the loss on the step after.
    """
    leapt = (before.flags & int(Cause.LOSS_SPIKE)) != 0
    missed = leapt & (before.severity >= int(Severity.BLOCK))
    flags = now.flags | jnp.where(missed, jnp.int32(Cause.LOSS_SPIKE), jnp.int32(0))
    least = jnp.where(missed, jnp.int32(Severity.WARN), now.severity)
    return now._replace(flags=flags, severity=jnp.maximum(now.severity, least))


def _clip_factor(clip_state: Any) -> jax.Array:
    """The smallest factor that any clip in the state reports; 1 where none does."""
    found = optax.tree.get_all_with_path(clip_state, "clip_factor")
    factor = jnp.ones([], jnp.float32)
    for _, value in found:
        factor = jnp.minimum(factor, value)
    return factor
