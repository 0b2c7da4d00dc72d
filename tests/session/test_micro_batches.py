"""Accumulated gradients: events name the micro-batch, and nothing counts twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from fake_run import FakeKeeper, make_vitals

from stabil.policy import Ladder, Rung
from stabil.session import Session
from stabil.session._flight import worst
from stabil.telemetry import read_events
from stabil.vocabulary import Severity

BAD = dict(severity=Severity.BLOCK, first=2)


def events(tmp_path, action):
    return [e for e in read_events(tmp_path / "run") if e.action == action]


def test_events_name_micro_batch_and_samples(tmp_path):
    made = []

    def ids(step):
        made.append(step)
        return [f"doc-{step}-{i}" for i in range(2)]

    with Session(tmp_path / "run", total_steps=6) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            bad = step == 4
            vitals = make_vitals(
                *(("nonfinite_gradient",) * bad), **(BAD if bad else {})
            )
            state = session.end_step(
                state, vitals, micro_batch=step % 3, sample_ids=lambda s=step: ids(s)
            )
    (event,) = events(tmp_path, "skip")
    assert (event.micro_batch, event.step) == (1, 4)
    assert event.numbers["sample_ids"] == ["doc-4-0", "doc-4-1"]
    assert made == [4]  # a quiet step makes no names


def stacked(*several):
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *several)


def test_of_stacked_vitals_the_worst_micro_batch_speaks(tmp_path):
    calm, rows = make_vitals(loss=2.0), []
    bad = make_vitals("nonfinite_gradient", **BAD, loss=4.0)

    class Sink:
        def write_scalars(self, step, scalars):
            rows.append((step, scalars["loss"]))

    with Session(tmp_path / "run", sinks=[Sink()], total_steps=3) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            third = bad if step == 1 else calm
            state = session.end_step(state, stacked(calm, calm, third, calm))
    (event,) = events(tmp_path, "skip")
    assert (event.step, event.micro_batch, event.layer) == (1, 2, "grads/w")
    assert rows == [(0, 2.0), (1, 4.0), (2, 2.0)]
    one, at = worst(stacked(calm, make_vitals(loss=4.0)))
    assert at == -1 and one.measures.loss == 3.0 and np.ndim(one.tally.resets) == 0


def test_a_blocked_window_is_one_blocked_step(tmp_path):
    """A guard inside of `accumulate` or `MultiSteps` judges once a window.

    Its verdict stays in the state for the calls that only accumulate, and must not be
    counted for each.
    """

    def vitals_of(call):
        window = max(1, (call + 1) // 4)  # judged at calls 3, 7, 11, ...
        bad = window == 3
        vitals = make_vitals("nonfinite_gradient", **BAD) if bad else make_vitals()
        tally = vitals.tally._replace(judged_steps=np.int32(window))
        return dataclasses.replace(vitals, tally=tally)

    keeper = FakeKeeper(save_every=8)
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=40) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            state = session.end_step(state, vitals_of(step), micro_batch=step % 4)
    assert [(e.step, e.micro_batch) for e in events(tmp_path, "skip")] == [(11, 3)]
    summary = session.summary()
    assert (summary["rollbacks"], summary["observed_steps"]) == (0, 10)


def test_a_step_that_comes_after_a_rollback_is_news(tmp_path):
    """Its tally may be that of the step before the rollback."""
    keeper, policy = FakeKeeper(save_every=5), Ladder((Rung("rollback", severity=3),))
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=policy, total_steps=20
    ) as session:
        state = np.int32(0)
        for _, batch in session.steps(state, abs):
            bad = batch == 11
            vitals = make_vitals("loss_spike", **BAD) if bad else make_vitals()
            # As if the checkpoint said 11, so that the next step says 12 once more.
            judged = np.int32(12) if 12 <= batch < 14 or bad else state + 1
            vitals = dataclasses.replace(
                vitals, tally=vitals.tally._replace(judged_steps=judged)
            )
            state = session.end_step(state + np.int32(1), vitals)
    (event,) = events(tmp_path, "rollback")
    redone = 20 - event.numbers["to_step"]
    assert session.summary()["observed_steps"] == 12 + redone
