"""Gradient accumulation in which a bad micro-batch neither stays nor dilutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms


class MicroBatchRecord(NamedTuple):
    """What `skip_bad_micro_batches` reports; `MultiSteps` keeps it as `skip_state`.

    Attributes:
      skipped: bool; whether the newest micro-batch was left out.
      norm: float32; its gradient norm, 0 when it was not finite.
    """

    skipped: jax.Array
    norm: jax.Array


def skip_bad_micro_batches(
    *, max_norm: float = float("inf")
) -> Callable[[Any, jax.Array, Any], tuple[jax.Array, MicroBatchRecord]]:
    """A `should_skip_update_fn` for `optax.MultiSteps`.

    A micro-batch whose gradient is not finite, or has a norm above `max_norm`, is not
    accumulated and not counted: the window takes one more micro-batch, and its mean is
    that of good ones only.

    Place: `optax.MultiSteps(inner, k, should_skip_update_fn=...)`. Does not: keep steps
    in time with the data (a window with a bad micro-batch ends one later); for windows
    of fixed length use `accumulate`.

    Args:
      max_norm: largest norm that is accumulated; unit of the gradient, > 0.

    Returns:
      A function of gradient, step and parameters.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> fn = skip_bad_micro_batches()
      >>> tx = optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=fn)
      >>> state = tx.init(jnp.zeros(1))
      >>> for g in (1.0, jnp.nan, 3.0):
      ...     updates, state = tx.update(jnp.array([g]), state)
      >>> print(updates)
      [-2.]

    Source: the interface of `optax.MultiSteps`; its default accepts a NaN, which then
    never leaves the accumulator, as that is cleared by a product with 0.
    """
    _check.positive("skip_bad_micro_batches", max_norm=max_norm)

    def should_skip(
        updates: Any, gradient_step: jax.Array, params: Any
    ) -> tuple[jax.Array, MicroBatchRecord]:
        del gradient_step, params
        norm = _norms.total_norm(_norms.leaf_norms(updates))
        skip = ~(norm <= max_norm)
        shown = jnp.where(jnp.isfinite(norm), norm, 0).astype(jnp.float32)
        return skip, MicroBatchRecord(skip, shown)

    return should_skip


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
      inner_state: of the wrapped transformation.
      mean: mean of the good gradients of this window, a tree like the parameters.
      weight: float32; tokens (or micro-batches) in that mean.
      loss: float32; mean loss of the same micro-batches.
      micro_steps: int32; micro-batches of this window so far, good or bad.
      bad_in_window: int32; of those, the ones left out.
      emitted: bool; whether the newest call stepped the inner transformation.
      accepted_steps: int32; steps of the inner transformation.
      dropped_windows: int32; windows that ended without a step.
      bad_micro_batches: int32; micro-batches left out since the run began.
    """

    inner_state: Any
    mean: Any
    weight: jax.Array
    loss: jax.Array
    micro_steps: jax.Array
    bad_in_window: jax.Array
    emitted: jax.Array
    accepted_steps: jax.Array
    dropped_windows: jax.Array
    bad_micro_batches: jax.Array


def accumulate(
    inner: optax.GradientTransformation,
    every_steps: int = 1,
    *,
    on_bad: Literal["renormalise", "drop"] = "renormalise",
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over windows of `every_steps` calls, bad ones left out.

    For the good micro-batches i of a window, with weights w_i (tokens, or 1):
    g = sum_i w_i g_i / sum_i w_i. A micro-batch is bad when its gradient or loss is not
    finite; one with 0 tokens is empty and has no weight. Never k gradients over n > k.
    Quiet gradients pass unchanged. (With windows of one; else their mean does.)

    Place: outside of the optimizer and of every rule that judges steps: these see one
    mean gradient a window. Cost: one accumulator in float32 a parameter; `inner` runs
    on the last call of a window only. Does not: judge the size of a gradient.

    Args:
      inner: the optimizer; it sees the keywords of the last micro-batch, with `loss`
        replaced by the weighted mean over the good ones.
      every_steps: calls in a window; >= 1. Windows keep this length, so optimizer steps
        stay in time with the data.
      on_bad: "renormalise" steps with the mean of the good micro-batches, "drop" lets a
        window with a bad one pass without a step. A window without any good one never
        steps. An empty micro-batch is not bad.

    Returns:
      Transformation; updates are zeros until a window ends. `update` takes the optional
      keywords `loss` (scalar) and `tokens` (count of valid targets that the micro
      gradient is the mean over). State: `AccumulateState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for g in (1.0, jnp.nan, 2.0, 3.0):
      ...     updates, state = tx.update(jnp.array([g]), state)
      >>> print(updates)
      [-2.]

    Source: ours, after `optax.MultiSteps`. We differ: (1) a NaN does not enter, and the
    accumulator is cleared by a select. (2) Windows have a fixed length in calls. (3)
    Micro-batches are weighted by their tokens. (4) `inner` does not run on every call.
    """
    _check.at_least("accumulate", 1, every_steps=every_steps)
    _leaves.one_of("accumulate", ("renormalise", "drop"), on_bad=on_bad)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> AccumulateState:
        return AccumulateState(
            inner_state=inner.init(params),
            mean=_leaves.wide_zeros(params),
            weight=jnp.zeros([], jnp.float32),
            loss=jnp.zeros([], jnp.float32),
            micro_steps=_leaves.zero_int(),
            bad_in_window=_leaves.zero_int(),
            emitted=jnp.zeros([], bool),
            accepted_steps=_leaves.zero_int(),
            dropped_windows=_leaves.zero_int(),
            bad_micro_batches=_leaves.zero_int(),
        )

    def take(
        updates: Any, state: AccumulateState, loss: Any, tokens: Any
    ) -> AccumulateState:
        weight = jnp.asarray(1.0 if tokens is None else tokens).astype(jnp.float32)
        empty = weight == 0
        loss = jnp.asarray(0.0 if loss is None else loss).astype(jnp.float32)
        finite = jnp.all(jnp.isfinite(_norms.leaf_norms(updates))) & jnp.isfinite(loss)
        good = finite & ~empty
        total = state.weight + jnp.where(good, weight, 0)
        share = jnp.where(good, weight, 0) / jnp.where(total > 0, total, 1.0)
        means, new = _leaves.by_path(state.mean), {}
        for path, g in _leaves.by_path(updates).items():
            step = _leaves.times(g.astype(means[path].dtype) - means[path], share)
            new[path] = jnp.where(good, means[path] + step, means[path])
        bad = ~finite & ~empty
        return state._replace(
            mean=_leaves.with_leaves(state.mean, new),
            weight=total,
            loss=jnp.where(good, state.loss + (loss - state.loss) * share, state.loss),
            micro_steps=state.micro_steps + 1,
            bad_in_window=state.bad_in_window + bad,
            bad_micro_batches=_leaves.one_more(state.bad_micro_batches, bad),
        )

    def update(
        updates: Any, state: AccumulateState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AccumulateState]:
        loss, tokens = extra_args.get("loss"), extra_args.get("tokens")
        state = take(updates, state, loss, tokens)
        mean = {
            path: _leaves.by_path(state.mean)[path].astype(g.dtype)
            for path, g in _leaves.by_path(updates).items()
        }
        mean = _leaves.with_leaves(updates, mean)
        passed = dict(extra_args)
        # Norms of one micro-batch are not those of the mean.
        passed.pop("norms", None)
        if loss is not None:
            passed["loss"] = state.loss.astype(jnp.asarray(loss).dtype)
        if tokens is not None:
            passed["tokens"] = state.weight.astype(jnp.asarray(tokens).dtype)
        ends = state.micro_steps >= every_steps
        steps = ends & (state.weight > 0)
        if on_bad == "drop":
            steps &= state.bad_in_window == 0

        def step() -> tuple[Any, Any]:
            return inner.update(mean, state.inner_state, params, **passed)

        shapes = jax.eval_shape(step)[0]

        def wait() -> tuple[Any, Any]:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return zeros, state.inner_state

        new, inner_state = jax.lax.cond(steps, step, wait)
        fresh = jax.tree.map(
            lambda x: jnp.where(ends, jnp.zeros_like(x), x),
            (state.mean, state.weight, state.loss),
        )
        return new, state._replace(
            inner_state=inner_state,
            mean=fresh[0],
            weight=fresh[1],
            loss=fresh[2],
            micro_steps=jnp.where(ends, 0, state.micro_steps),
            bad_in_window=jnp.where(ends, 0, state.bad_in_window),
            emitted=steps,
            accepted_steps=_leaves.one_more(state.accepted_steps, steps),
            dropped_windows=_leaves.one_more(state.dropped_windows, ends & ~steps),
        )

    return optax.GradientTransformationExtraArgs(init, update)
