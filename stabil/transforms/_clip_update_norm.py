"""A cap on the norm of the update, from the recent norms before capping."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms, _scaling
from stabil.transforms._window import GAUSSIAN, Window

# Of the published code: least standard deviation, and least norm divided by.
PUBLISHED_FLOOR = 1e-6
# Norms within 5 % of each other are the same: floor of the deviation of their logs.
LOG_FLOOR = 0.05


class ClipUpdateNormState(NamedTuple):
    """State of `clip_update_norm`.

    Attributes:
      history: `Window` of norms before capping, float32 `[window]`.
      clip_factor: float32; what the step was multiplied by, 0 when it was not finite.
      norm: float32; L2 norm before capping, of the newest finite step.
      threshold: float32; the largest norm that passed; 0 while the window fills.
      clipped_steps: int32; finite steps that were scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    history: Window
    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def clip_update_norm(
    *,
    window: int = 128,
    deviations: float = 3.0,
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Scales the update down to a norm that recent updates make plausible.

    With the norms u of the last `window` updates before capping:
    limit = exp(median(log u) + k * max(1.4826 * MAD(log u), 0.05));
    update <- update * min(1, limit / ||update||).

    The uncapped norm enters the history, so a lasting rise is followed after half a
    window and nothing can lock. Quiet gradients do not pass unchanged: of a steady run
    about 1 step in 300 lies above 3 robust deviations.

    Place: after the optimizer, before or after the learning rate (before, a schedule
    does not shift the norms). Cost: one read of the update, one reduction over devices,
    two sorts of `window` numbers. Does not: keep a spike out of the moments.

    Args:
      window: W, norms that are remembered; steps, >= 2. Nothing is capped until half of
        it is filled.
      deviations: k, robust standard deviations above the median; > 0.
      parity: True follows Levanter's code: mean + k * standard deviation of the norms.

    Returns:
      Transformation; updates keep shape and dtype. The keyword `norms` is not read: it
      describes the gradient, and this is the update. State: `ClipUpdateNormState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clip_update_norm(window=4)
      >>> state = tx.init(jnp.ones(1))
      >>> for u in (1.0, 1.0, 1.0, 9.0):
      ...     updates, state = tx.update(jnp.array([u]), state)
      >>> print(updates.round(2), state.norm)
      [1.16] 9.0

    Source: Levanter, `optim/clip_update_norm.py` (W = 128, k = 3), no paper. We differ:
    (1) median and MAD of logarithms: in the published rule a spike widens the limit
    that its neighbour is held against. (2) A non-finite step is zeros and is not
    stored; there one NaN switches the cap off for a whole window. (3) An update under
    the limit stays bit-identical.
    """
    _check.at_least("clip_update_norm", 2, window=window)
    _check.positive("clip_update_norm", deviations=deviations)
    least = max(2, window // 2)

    def init(params: Any) -> ClipUpdateNormState:
        dtype = _leaves.statistics_dtype(params)
        zero, none = jnp.zeros([], dtype), _leaves.zero_int()
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(
            ClipUpdateNormState(
                Window.empty(window, dtype=dtype), one, zero, zero, none, none
            )
        )

    def robust(history: Window) -> jax.Array:
        tiny = jnp.finfo(history.values.dtype).tiny
        logs = history._replace(values=jnp.log(jnp.maximum(history.values, tiny)))
        spread = jnp.maximum(GAUSSIAN * logs.mad(), LOG_FLOOR)
        return jnp.exp(logs.median() + deviations * spread)

    def published(history: Window) -> jax.Array:
        spread = jnp.maximum(history.deviation(), PUBLISHED_FLOOR)
        return history.mean() + deviations * spread

    def update(
        updates: Any, state: ClipUpdateNormState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClipUpdateNormState]:
        del params, extra_args
        dtype = state.norm.dtype
        limit = (published if parity else robust)(state.history)
        armed = state.history.filled >= least
        if parity:
            norm = jnp.sqrt(jnp.sum(jnp.square(_norms.naive_norms(updates, dtype))))
            finite = jnp.asarray(True)
            over = armed & (norm > limit)
            divisor = jnp.maximum(norm, PUBLISHED_FLOOR)
            factor = jnp.where(over, limit / divisor, 1.0)
            updates = _scaling.multiply(updates, factor)
        else:
            norm = _norms.total_norm(_norms.leaf_norms(updates)).astype(dtype)
            finite = jnp.isfinite(norm)
            factor = jnp.where(armed, _scaling.ratio(limit, norm), 1.0)
            rows = [factor] * len(_leaves.measured(updates))
            updates = _scaling.select_rows(updates, rows, finite)
        # A zero update says nothing about the size of updates, and its log nothing.
        stored = jnp.asarray(True) if parity else finite & (norm > 0)
        return updates, ClipUpdateNormState(
            state.history.push(norm, stored),
            jnp.where(finite, factor, 0).astype(jnp.float32),
            jnp.where(finite, norm, state.norm),
            jnp.where(armed, limit, 0),
            _leaves.one_more(state.clipped_steps, finite & (factor < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)
