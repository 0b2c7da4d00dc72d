"""A bounded cut of the learning rate on a verdict, with a gradual return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leafwise, _leaves
from stabil.transforms._on_verdict import asks, check_wrapper, sound
from stabil.vocabulary import Cause, Controls, Severity, Verdict

# Decay of the smoothed loss: a memory of ten steps hides the noise of one batch.
LOSS_DECAY = 0.9


class BackoffState(NamedTuple):
    """State of `backoff`.

    Attributes:
      inner_state: state of the wrapped optimizer.
      age: int32 scalar, steps since the newest cut; 0 on that step.
      depth: float32 scalar, what the newest cut brought the scale down to.
      scale: float32 scalar, what the newest update was multiplied by, `controls`
        included.
      cuts: int32 scalar, cuts since the run began.
      loss: float32 scalar, smoothed loss; 0 before the first.
      losses: int32 scalar, losses in it.
      loss_at_cut: float32 scalar, the smoothed loss at the newest cut.
    """

    inner_state: Any
    age: jax.Array
    depth: jax.Array
    scale: jax.Array
    cuts: jax.Array
    loss: jax.Array
    losses: jax.Array
    loss_at_cut: jax.Array


def backoff(
    inner: optax.GradientTransformation,
    *,
    factor: float = 0.5,
    floor: float = 0.1,
    incident_steps: int = 100,
    return_steps: int = 1000,
    on: Severity | Cause | None = Cause.LOSS_SPIKE | Cause.UPDATE_SPIKE,
) -> optax.GradientTransformationExtraArgs:
    """Cuts the learning rate of `inner` on a verdict, and gives it back slowly.

    The update is multiplied by `scale`. A cut sets `scale <- max(factor scale, floor)`;
    the scale holds for `incident_steps`, then returns to 1 along
    `depth ** (1 - (age - incident_steps) / return_steps)`. A verdict asks for a cut
    when it is at least `on` (a `Severity`) or shares a flag with it (`Cause`s). It is
    answered at most once in `incident_steps`; and while an earlier cut is in force,
    only if the smoothed loss is not below what it was at that cut. The cut acts on
    the update of its own step.

    The scale is this wrapper's own state and multiplies what `inner` returns, so that
    no schedule and no `optax.inject_hyperparams` undoes it, and a checkpoint keeps it.
    `controls.learning_rate_scale` multiplies on top. A gradient that is not finite
    gives updates of 0 and leaves the state of `inner` as it was, unless `inner` holds a
    `stabil.guard` or another part that answers it.

    Quiet gradients pass unchanged.

    Cost: one product over the updates. Place: outermost, also around `stabil.guard`,
    whose verdict of the step before it then reads. Does not: change the gradient, the
    moments, or the learning rate that `inner` shows in its own state; the weight decay
    of `inner` is scaled with the update.

    Args:
      inner: the optimizer.
      factor: what one cut multiplies the scale by; in (0, 1).
      floor: the least scale that cuts lead to; in (0, 1].
      incident_steps: steps after a cut in which no further cut happens; >= 1.
      return_steps: steps of the way back to 1; >= 1.
      on: the least severity, or the causes, that ask for a cut; None for none.

    Returns:
      Transformation. `update` takes `loss` (scalar), `verdict` (`stabil.Verdict`; the
      default is the one in the state of `inner`) and `controls`, all optional and
      passed on to `inner`, `controls` with a learning-rate scale of 1. Updates keep
      shape and dtype. State: `BackoffState`.

    Raises:
      ValueError: a hyperparameter is out of range.
      TypeError: `inner` is no gradient transformation, `on` neither severity nor cause.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from stabil.vocabulary import Cause, Verdict
      >>> tx = backoff(optax.sgd(1.0), factor=0.5)
      >>> spike = Verdict.clear()._replace(flags=jnp.int32(Cause.LOSS_SPIKE))
      >>> _, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), verdict=spike)
      >>> update, state = tx.update(jnp.ones(1), state, verdict=spike)
      >>> print(update, state.cuts)  # one incident, one cut
      [-0.5] 1

    Source: ours; runs that cut the learning rate by hand are OPT-175B (to two thirds)
    and GLM-130B (to a half). The defaults are ours and not tuned.
    """
    name = "backoff"
    check_wrapper(name, inner, on)
    _check.positive(name, factor=factor, floor=floor)
    _check.fraction(name, factor=factor)
    if floor > 1:
        raise ValueError(f"{name}: needed 0 < floor <= 1, got {floor!r}")
    _check.at_least(name, 1, incident_steps=incident_steps, return_steps=return_steps)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> BackoffState:
        # Every field has its own buffer, so that the state can be donated.
        return BackoffState(
            inner_state=inner.init(params),
            age=jnp.full([], jnp.iinfo(jnp.int32).max, jnp.int32),
            depth=jnp.ones([], jnp.float32),
            scale=jnp.ones([], jnp.float32),
            cuts=jnp.zeros([], jnp.int32),
            loss=jnp.zeros([], jnp.float32),
            losses=jnp.zeros([], jnp.int32),
            loss_at_cut=jnp.zeros([], jnp.float32),
        )

    def come_back(depth: jax.Array, age: jax.Array) -> jax.Array:
        way = (age - incident_steps).astype(jnp.float32) / return_steps
        scale = jnp.exp(jnp.log(depth) * (1 - jnp.clip(way, 0.0, 1.0)))
        return jnp.where(way >= 1, 1.0, jnp.where(way <= 0, depth, scale))

    def update(
        updates: Any,
        state: BackoffState,
        params: Any = None,
        *,
        loss: Any = None,
        verdict: Verdict | None = None,
        controls: Controls | None = None,
        **extra: Any,
    ) -> tuple[Any, BackoffState]:
        ok = sound(updates, state.inner_state)
        smooth, losses = _smoothed(state.loss, state.losses, loss)
        age = _leaves.one_more(state.age)
        scale = come_back(state.depth, age)
        improving = (losses > 0) & (smooth < state.loss_at_cut)
        allowed = (age >= incident_steps) & ((scale == 1) | ~improving)
        cut = allowed & asks(verdict, state.inner_state, on)
        lower = jnp.minimum(scale, jnp.maximum(scale * factor, floor))
        scale = jnp.where(cut, lower, scale)
        total = scale
        passed = dict(extra, loss=loss, verdict=verdict, controls=controls)
        if controls is not None:
            total = scale * controls.learning_rate_scale.astype(jnp.float32)
            taken = jnp.ones_like(controls.learning_rate_scale)
            passed["controls"] = controls._replace(learning_rate_scale=taken)
        passed = {k: v for k, v in passed.items() if v is not None}
        # Selected after the fact: `update_if` would move less memory and change the
        # last bits of an idle step of SGD.
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **passed
        )
        leaves = _leaves.measured(updates)
        new = _leafwise.scaled(leaves, [total] * len(leaves), ok)
        return _leaves.rebuild(updates, new), BackoffState(
            inner_state=_tree.select(ok, inner_state, state.inner_state),
            age=jnp.where(cut, 0, age),
            depth=jnp.where(cut, lower, state.depth),
            scale=total,
            cuts=state.cuts + cut.astype(jnp.int32),
            loss=smooth,
            losses=losses,
            loss_at_cut=jnp.where(cut, smooth, state.loss_at_cut),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _smoothed(
    old: jax.Array, losses: jax.Array, loss: Any
) -> tuple[jax.Array, jax.Array]:
    """The smoothed loss and its samples; a loss that is not finite leaves both."""
    if loss is None:
        return old, losses
    if jnp.shape(loss) != ():
        raise ValueError(
            f"backoff: needed a scalar loss, got one of shape {jnp.shape(loss)}; write "
            "tx.update(grads, opt_state, params, loss=loss.mean())"
        )
    value = jnp.asarray(loss).astype(jnp.float32)
    mixed = jnp.where(losses == 0, value, LOSS_DECAY * old + (1 - LOSS_DECAY) * value)
    ok = jnp.isfinite(value)
    count = _leaves.one_more(losses)
    return jnp.where(ok, mixed, old), jnp.where(ok, count, losses)
