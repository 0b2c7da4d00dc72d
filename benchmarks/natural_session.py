"""The whole session on the runs of `natural.py`: guard, ladder, checkpoints, rollback.

The guarded optimizer is the one that people have, `chain(clip_by_global_norm(1.0),
adamw)`; the ladder is the one for runs that nobody watches. A real loop on the host,
one run after the other, every seed: a rolled-back run does its steps again, and the
learning rate that the ladder cuts comes in through the controls.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import natural_model as model
import natural_runs as runs
import optax

import stabil
from stabil.session import TrainingStopped

SAVE_EVERY = 20


class Played(NamedTuple):
    """One run under the session.

    Attributes:
      final: held-out loss of the last parameters.
      losses: training losses of all steps, those that ran again included.
      actions: how often the ladder did what.
      stopped: why the ladder gave up, or None.
    """

    final: float
    losses: list[float]
    actions: dict[str, int]
    stopped: str | None


def optimizer(rate: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW with the usual constant clip, guarded."""
    adamw = optax.adamw(runs.schedule(rate), b2=runs.B2)
    return stabil.guard(optax.chain(optax.clip_by_global_norm(1.0), adamw))


@functools.cache
def _step() -> Any:
    @jax.jit
    def step(state: Any, tokens: Any, rate: Any, controls: Any) -> Any:
        params, opt_state = state
        tx = optimizer(rate)
        loss, grads = jax.value_and_grad(model.loss_of)(params, tokens)
        updates, opt_state = tx.update(
            grads, opt_state, params, loss=loss, controls=controls
        )
        vitals = stabil.vitals(opt_state, params=params)
        return (optax.apply_updates(params, updates), opt_state), vitals, loss

    return step


_evaluate = jax.jit(model.loss_of)


def play(data: str, rate: float, seed: int, steps: int = runs.STEPS) -> Played:
    """Trains one model under the session with the ladder for unattended runs."""
    batches, held_out = runs.data_for(data, seed, steps)
    params = jax.jit(model.init)(jax.random.key(seed))
    tx = optimizer(rate)
    state, step_fn = (params, tx.init(params)), _step()

    def batch_at(i: int) -> Any:
        # Data that were skipped are made up for by those of the second half.
        return batches[i if i < steps else steps // 2 + i % (steps // 2)]

    losses, stopped, eta = [], None, jnp.float32(rate)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        keeper = stabil.checkpoints.Keeper(
            folder / "checkpoints", keep_last=4, save_every=SAVE_EVERY
        )
        session = stabil.Session(
            folder / "run",
            checkpoints=keeper,
            policy=stabil.policy.unattended(),
            total_steps=steps,
            progress=False,
        )
        with session, keeper, contextlib.suppress(TrainingStopped):
            for _, tokens in session.steps(state, batch_at):
                state, vitals, loss = step_fn(state, tokens, eta, session.controls)
                losses.append(loss)
                try:
                    state = session.end_step(state, vitals)
                except TrainingStopped as error:
                    stopped = str(error)
                    raise
        events = session.summary()["events"]
    actions: dict[str, int] = {}
    for event in events:
        actions[event["action"]] = actions.get(event["action"], 0) + 1
    final = float(_evaluate(state[0], held_out))
    return Played(final, [float(x) for x in jax.device_get(losses)], actions, stopped)
