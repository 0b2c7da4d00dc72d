"""Restarts or damps the moments of any optimizer, always with a warm-up."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leafwise, _leaves
from stabil.transforms._find_moments import Moments, find_moments
from stabil.transforms._moments import restart_arrays
from stabil.transforms._on_verdict import asks, check_wrapper, sound
from stabil.vocabulary import Cause, Controls, Severity, Verdict

# How the usual level of a second moment follows it: freely while it fills, then by at
# most 2 % a step, so that one spike does not enter the level before the reset for it.
FREE_STEPS, LOG_STEP = 50, 0.02


class ResetMomentsState(NamedTuple):
    """State of `reset_moments`.

    Attributes:
      inner_state: state of the wrapped optimizer.
      steps: int32 scalar, updates since the run began.
      age: int32 `[leaves]`, steps since the leaf's newest reset; 0 on that step.
      resets: int32 `[leaves]`, resets of each leaf.
      log_level: float32 `[max(second moments, 1)]`, usual level of each array of second
        moments, as a natural logarithm; -inf before the first positive value.
    """

    inner_state: Any
    steps: jax.Array
    age: jax.Array
    resets: jax.Array
    log_level: jax.Array


def reset_moments(
    inner: optax.GradientTransformation,
    *,
    every_steps: int | None = None,
    on: Severity | Cause | None = Cause.UPDATE_SPIKE | Cause.MOMENT_SPIKE,
    keep: float = 0.0,
    warmup_steps: int = 150,
    where: _leaves.Paths = "*",
    names: Mapping[str, str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Restarts the moments of `inner`: on request, on a verdict, or every N steps.

    On a reset `m <- keep m` and `v <- keep v + (1 - keep) level`, where `level` is the
    usual mean of that second moment, followed so slowly that a fresh spike is not in
    it. The updates of the leaf are then multiplied by SPAM's warm-up
    `s(c) = 1 - 0.99 (1 + cos(pi c / (N + 1))) / 2`. Counters, schedules and the bias
    correction go on: a second moment of 0 beside a counter that goes on would kick by
    up to 13.8 times the usual update (b2 = 0.999), `level` does not kick at all.

    A reset happens before the update of its step when one of these holds: the extra
    argument `controls` asks; the extra argument `reset_leaves` (bool `[leaves]`) asks;
    the period is full; or the extra argument `verdict`, else the verdict of the step
    before in the state of `inner` (a `stabil.guard`), is at least `on` (a `Severity`)
    or shares a flag with it (`Cause`s). A verdict during a running warm-up belongs to
    the same incident and is not answered again. A gradient that is not finite
    gives updates of 0 and leaves the state of `inner` as it was, unless `inner` holds a
    `stabil.guard` or another part that answers it.

    Quiet gradients pass unchanged.

    Cost: one read of the second moments and of the update a step. Place: around the
    optimizer, inside or outside `stabil.guard`. Does not: touch copies of parameters
    (schedule-free's `z`), Adagrad's sums, accumulated gradients. What looks like a
    moment and was not placed is named by a `UserWarning` when `init` runs; say with
    `names` what it is, `"kept"` also to leave a moment alone (`{"nu": "kept"}` restarts
    first moments only).

    Args:
      inner: the optimizer.
      every_steps: period of resets in steps, >= 1; None for no period.
      on: the least severity, or the causes, that ask for a reset; None for none.
      keep: share of the old moments that stays, in [0, 1); 0 restarts them.
      warmup_steps: N, >= 1.
      where: slash paths (globs or a predicate) of the leaves that may restart.
      names: what further state fields hold: `"first"`, `"second"` or `"kept"`.

    Returns:
      Transformation; updates keep shape and dtype, and extra arguments go on to
      `inner`, `controls` with its request taken out. State: `ResetMomentsState`.

    Raises:
      ValueError: a hyperparameter is out of range.
      TypeError: `inner` is no gradient transformation, `on` neither severity nor cause.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = reset_moments(optax.sgd(1.0, momentum=0.9), every_steps=2)
      >>> state = tx.init(jnp.ones(1))
      >>> for _ in range(2):
      ...     update, state = tx.update(jnp.ones(1), state)
      >>> print(update.round(4))  # the momentum is fresh and the warm-up begins at 0.01
      [-0.01]

    Source: momentum reset and warm-up of SPAM, arXiv:2501.06842. We differ: (1) any
    optimizer, (2) second moments restart at their usual level instead of 0, (3) per
    leaf, (4) on request or verdict.
    """
    name = "reset_moments"
    check_wrapper(name, inner, on)
    _check.fraction(name, keep=keep)
    _check.at_least(
        name,
        1,
        warmup_steps=warmup_steps,
        every_steps=1 if every_steps is None else every_steps,
    )
    period = _leafwise.never(every_steps)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> ResetMomentsState:
        inner_state = inner.init(params)
        found = find_moments(inner_state, params, names=names)
        if found.unrecognised:
            warnings.warn(
                f"{name}: needed to know what {', '.join(found.unrecognised)} of the "
                "optimizer's state hold, and leaves them alone; write "
                'names={"field": "first"}, or "second", or "kept"',
                stacklevel=2,
            )
        leaves = len(_leaves.measured(params))
        return ResetMomentsState(
            inner_state=inner_state,
            steps=jnp.zeros([], jnp.int32),
            age=jnp.full([leaves], -1, jnp.int32),
            resets=jnp.zeros([leaves], jnp.int32),
            # At least one, as checkpoints refuse arrays without entries.
            log_level=jnp.full([max(len(found.second), 1)], -jnp.inf, jnp.float32),
        )

    def update(
        updates: Any,
        state: ResetMomentsState,
        params: Any = None,
        *,
        controls: Controls | None = None,
        reset_leaves: Any = None,
        verdict: Verdict | None = None,
        **extra: Any,
    ) -> tuple[Any, ResetMomentsState]:
        ok = sound(updates, state.inner_state)
        template = updates if params is None else params
        paths = _tree.measured_names(template)
        if len(paths) != len(state.age):
            raise ValueError(
                f"{name}: needed params, as some gradients are None or float0; write "
                "tx.update(grads, opt_state, params)"
            )
        found = find_moments(state.inner_state, template, names=names)
        steps = _leaves.one_more(state.steps)
        flags = _leafwise.reset_flags(
            len(paths), controls, reset_leaves, steps % period == 0
        )
        resting = (state.resets == 0) | (state.age >= warmup_steps - 1)
        flags |= resting & asks(verdict, state.inner_state, on)
        flags &= jnp.asarray([_leaves.matches(where, path) for path in paths], bool)
        fills = jnp.exp(state.log_level)
        before = _leafwise.when(
            jnp.any(flags),
            lambda inner: restart_arrays(inner, found, flags, fills, keep),
            state.inner_state,
        )
        passed = dict(extra)
        if controls is not None:
            taken = jnp.zeros_like(controls.reset_moments)
            passed["controls"] = controls._replace(reset_moments=taken)
        if verdict is not None:
            passed["verdict"] = verdict
        updates, inner_state = inner.update(updates, before, params, **passed)
        age = jnp.where(flags, 0, _leaves.one_more(state.age))
        resets = state.resets + flags.astype(jnp.int32)
        scale = _leafwise.warmup_scale(age, warmup_steps)
        applied = jnp.where(resets > 0, scale, 1.0)
        scale = dict(zip(paths, applied, strict=True))
        leaves = _leafwise.by_path(updates)
        scales = [scale[path] for path in leaves]
        new = _leafwise.scaled(list(leaves.values()), scales, ok)
        inner_state = _tree.select(ok, inner_state, before)
        return _leaves.rebuild(updates, new), ResetMomentsState(
            inner_state=inner_state,
            steps=steps,
            age=age,
            resets=resets,
            log_level=_follow(state.log_level, inner_state, found, steps),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _follow(
    log_level: jax.Array, state: Any, found: Moments, steps: jax.Array
) -> jax.Array:
    """The usual log level of each second moment after one more step."""
    if not found.second:
        return log_level
    leaves = jax.tree.leaves(state)
    means = [
        jnp.mean(jnp.asarray(leaves[m.position]).astype(jnp.float32))
        if jnp.size(leaves[m.position])
        else jnp.zeros([], jnp.float32)
        for m in found.second
    ]
    now = jnp.stack(means)
    usable = jnp.isfinite(now) & (now > 0)
    log_now = jnp.log(jnp.where(usable, now, 1.0))
    move = jnp.clip(log_now - log_level, -LOG_STEP, LOG_STEP)
    free = (steps <= FREE_STEPS) | ~jnp.isfinite(log_level)
    return jnp.where(usable, jnp.where(free, log_now, log_level + move), log_level)
