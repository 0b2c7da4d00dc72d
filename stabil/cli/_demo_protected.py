"""The run of `stabil demo` under stabil: guard, probe, session, checkpoints."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

import stabil
from stabil.cli._demo_model import cross_entropy
from stabil.cli._demo_report import Rollback, Seen
from stabil.cli._demo_train import Run, State, Task, Trace, all_finite
from stabil.session import TrainingStopped
from stabil.testing import inject
from stabil.vocabulary import Controls, Severity, Vitals

SAVE_EVERY = 40  # steps between checkpoints


def train_protected(
    task: Task,
    schedule: Sequence[inject.Fault],
    folder: pathlib.Path,
    tell: Callable[[int, float], None],
) -> tuple[Run, list[Seen], list[Rollback]]:
    """Trains with the same optimizer and faults, guarded and watched.

    Args:
      task: what to train, on what and for how long.
      schedule: the planted faults. They strike by the position of the batch, which
        does not come again after a rollback, as faults of real machines do not.
      folder: where events and checkpoints go.
      tell: called with the number of finished steps and a recent loss.

    Returns:
      The run, what was seen in each step, and the rollbacks.
    """
    began = time.perf_counter()
    tx = stabil.guard(task.optimizer())
    step_fn = _guarded_step(task, tx, schedule)
    state = State(task.parameters, tx.init(task.parameters))
    keeper = stabil.checkpoints.Keeper(
        folder / "checkpoints", keep_last=3, save_every=SAVE_EVERY
    )
    session = stabil.Session(
        folder, checkpoints=keeper, total_steps=task.steps, progress=False
    )
    rows: list[tuple[int, int, Trace, Vitals]] = []
    rollbacks: list[Rollback] = []

    def batch_at(position: int) -> dict[str, np.ndarray]:
        return inject.batch(schedule, position, task.batch(position))

    expected, stopped = 0, None
    with session, keeper, contextlib.suppress(TrainingStopped):
        for step, batch in session.steps(state, batch_at):
            position = int(batch["position"])
            if step != expected:
                rollbacks.append(Rollback(expected, step, rows[-1][1]))
            expected = step + 1
            state = State(
                inject.parameters(schedule, position, state.params),
                inject.moments(schedule, position, state.opt_state),
            )
            state, trace, vitals = step_fn(state, batch, session.controls)
            rows.append((step, position, trace, vitals))
            if step % 10 == 9:
                tell(step + 1, float(rows[-5][2].loss))
            try:
                state = session.end_step(state, vitals)
            except TrainingStopped as error:
                stopped = error.reason
                raise
    rows = [(step, at, *jax.device_get(rest)) for step, at, *rest in rows]
    run = Run(
        name="protected",
        batches=[position for _, position, *_ in rows],
        losses=[float(trace.loss) for _, _, trace, _ in rows],
        grad_norms=[float(trace.grad_norm) for _, _, trace, _ in rows],
        unsound_steps=sum(not trace.sound for _, _, trace, _ in rows),
        final_loss=task.evaluate(state.params),
        seconds=time.perf_counter() - began,
        stopped=stopped,
    )
    return run, _seen(rows), rollbacks


def _guarded_step(
    task: Task, tx: optax.GradientTransformationExtraArgs, schedule: Any
) -> Callable[..., Any]:
    probed: Any = stabil.probe(task.model(), where="**")

    @jax.jit
    def step(state: State, batch: dict[str, jax.Array], controls: Controls) -> Any:
        tokens, position = batch["tokens"], batch["position"]

        def loss_of(params: Any) -> Any:
            with inject.activations(schedule, position):
                logits, readings = probed.apply({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:]), readings

        loss_and_grads = jax.value_and_grad(loss_of, has_aux=True)
        (loss, readings), grads = loss_and_grads(state.params)
        grads = inject.gradients(schedule, position, grads)
        updates, opt_state = tx.update(
            grads,
            state.opt_state,
            state.params,
            loss=loss,
            readings=readings,
            controls=controls,
        )
        params = optax.apply_updates(state.params, updates)
        vitals = stabil.vitals(opt_state, params=params, readings=readings)
        trace = Trace(loss, vitals.measures.grad_norm, all_finite(params))
        return State(params, opt_state), trace, vitals

    return step


def _seen(rows: Sequence[tuple[int, int, Trace, Vitals]]) -> list[Seen]:
    seen, resets = [], 0
    for step, position, _, vitals in rows:
        total = int(vitals.tally.resets)
        seen.append(
            Seen(
                step=step,
                position=position,
                severity=int(vitals.severity),
                flags=int(vitals.verdict.flags),
                first=vitals.first,
                clipped=float(vitals.measures.clip_factor) < 1
                and vitals.severity < Severity.BLOCK,
                # The tally goes back with the state in a rollback.
                resets=max(0, total - resets),
            )
        )
        resets = total
    return seen
