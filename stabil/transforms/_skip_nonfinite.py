"""Skips a step whose gradient or loss is not finite, as if it never happened."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax

from stabil import _tree
from stabil.transforms import _check, _leaves, _skip
from stabil.transforms._selective import update_if


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
      inner_state: of the wrapped transformation.
      record: `SkipRecord`; what was seen and done.
    """

    inner_state: Any
    record: _skip.SkipRecord


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    max_consecutive_steps: int = 5,
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Leaves everything as it was on a step whose gradient or loss is not finite.

    On a bad step the update is zero, and moments, counters and schedules inside `inner`
    are bit-identical to before; the next good step continues from there. Data steps
    outside go on: inside, `accepted_steps` count. Quiet gradients pass unchanged.

    Place: outside of the whole chain. Cost: one read of the gradient; the inner update
    is computed and not taken on a bad step. Does not: look at what `inner` makes of a
    finite gradient, or cover state outside of the optimizer; for that ask
    `was_skipped`.

    Args:
      inner: the optimizer; it sees all keywords of `update`.
      max_consecutive_steps: bad steps in a row after which `record.escalation` is 1;
        they are skipped all the same. >= 1.
      parity: True behaves as `optax.apply_if_finite`: it looks at the gradient only,
        and after more than `max_consecutive_steps` in a row the bad step is taken.

    Returns:
      Transformation. `update` takes the optional keywords `loss` (scalar), `tokens`
      (count of valid targets; 0 means an empty batch, which is skipped and no failure)
      and `norms` (per-leaf norms, float32 `[leaves]`). With `params`, a bad step tests
      them, and finds a run that skipping cannot save. State: `SkipNonfiniteState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = skip_nonfinite(optax.adam(0.1))
      >>> w = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(w), w)
      >>> print(updates, int(state.record.skipped_steps))
      [0. 0.] 1

    Source: `optax.apply_if_finite` (limit 5 in its examples). We differ: (1) no
    non-finite value ever reaches `inner`; there the step after the limit is taken, and
    Adam's moments are NaN from then on. (2) The loss is tested as well. (3) An empty
    batch is no failure. (4) Non-finite parameters are found and named.
    """
    _check.at_least("skip_nonfinite", 1, max_consecutive_steps=max_consecutive_steps)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipNonfiniteState:
        dtype = _leaves.statistics_dtype(params)
        return SkipNonfiniteState(inner.init(params), _skip.SkipRecord.empty(dtype))

    def update(
        updates: Any, state: SkipNonfiniteState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SkipNonfiniteState]:
        old = state.record
        known = {} if parity else extra_args
        seen = _skip.look(updates, old.norm.dtype, known)
        skipped = seen.reason != 0
        if parity:
            skipped &= old.bad_in_a_row < max_consecutive_steps
        record = _skip.record(
            old, seen, seen.reason, skipped, params, max_consecutive_steps
        )
        proceed, arguments = ~record.skipped, (updates, state.inner_state, params)
        new, inner_state = update_if(
            "skip_nonfinite", inner, proceed, arguments, extra_args
        )
        return _tree.zeros_unless(proceed, new), SkipNonfiniteState(inner_state, record)

    return optax.GradientTransformationExtraArgs(init, update)
