"""One update of a Flax `TrainState`, with what the guard wants to know."""

from __future__ import annotations

from typing import Any

from stabil.vocabulary import Vitals


def apply_gradients(
    state: Any, grads: Any, *, readings: Any = None, **extra: Any
) -> tuple[Any, Vitals]:
    """`state.apply_gradients(grads=grads)` that hands extra arguments to the optimizer.

    Flax's own method would put `loss` and `controls` into the state. Pure: use it in
    the jitted train step. `state.step` counts batches and goes on in a blocked step;
    parameters and optimizer state do not.

    Args:
      state: a `flax.training.train_state.TrainState` or anything with `step`, `params`,
        `opt_state`, `tx` and `replace`; `tx` holds a `stabil` transformation.
      grads: gradients, of the structure of `state.params`.
      readings: `stabil.Readings` of the step, where a probe made them.
      extra: for `tx.update`: `loss`, `controls` and whatever else it takes.

    Returns:
      The new state, and the `Vitals` for `Session.end_step`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, stabil
      >>> from flax.training.train_state import TrainState
      >>> tx = stabil.guard(optax.sgd(0.5))
      >>> state = TrainState.create(apply_fn=None, params=jnp.ones(2), tx=tx)
      >>> state, vitals = jax.jit(apply_gradients)(state, jnp.ones(2), loss=1.0)
      >>> print(state.params, int(state.step), vitals.severity.name)
      [0.5 0.5] 1 OK
    """
    # The host half does without the device half until somebody asks for both.
    import optax

    from stabil.transforms import vitals as read_vitals

    if readings is not None:
        extra["readings"] = readings
    updates, opt_state = optax.with_extra_args_support(state.tx).update(
        grads, state.opt_state, state.params, **extra
    )
    params = optax.apply_updates(state.params, updates)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, read_vitals(opt_state, params=params, readings=readings)
