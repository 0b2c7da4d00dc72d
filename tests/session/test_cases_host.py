"""Reports of users on host cost and logging: class I of the collected cases.

I1: a host read in every step blocks the device (facebookresearch/fairchem #2195).
I2: a history of device arrays fills memory (markean/aimz #268, jax-ml/jax #25184).
I3: a crash on NaN ends the run before any record is written
(marin-community/marin #4238).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_run import make_vitals

from stabil.policy import Ladder, Rung
from stabil.session import Session, TrainingStopped, _watch
from stabil.telemetry import read_events
from stabil.vocabulary import (
    Measures,
    Readings,
    Severity,
    Tally,
    Verdict,
    Vitals,
)


@jax.jit
def train_step(state, x):
    """What a guarded step hands out, without the time to compile a guard."""
    judged = state[0] + 1
    loss = jnp.mean((state[1] - x) ** 2)
    tally = Tally.zero()._replace(judged_steps=judged)
    measures = Measures.unmeasured()._replace(loss=loss)
    vitals = Vitals(Verdict.clear(), tally, measures, None, ())
    return (judged, state[1] * 0.9 + x * 0.1), vitals


def train(session, seen=None):
    state = (jnp.int32(0), jnp.zeros(3))
    for step, x in session.steps(state, lambda i: np.float32(i % 5)):
        state, vitals = train_step(state, x)
        state = session.end_step(state, vitals)
        if seen:
            seen(step)
    return state


def test_i1_one_read_a_step_and_never_of_the_running_one(tmp_path, monkeypatch):
    reads, fetch = [], _watch.fetch
    monkeypatch.setattr(_watch, "fetch", lambda v: (reads.append(v), fetch(v))[1])
    with Session(tmp_path / "run", total_steps=300, progress=False) as session:
        train(session, seen=lambda step: reads.append(step))
        # The newest step's vitals are read only when there is no later one.
        assert reads[0] == 0 and reads[-1] == 299
    values = [r for r in reads if not isinstance(r, int)]
    assert len(values) == 300
    judged = [int(v.tally.judged_steps) - 1 for v in values]
    running = [
        next((s for s in reads[i:] if isinstance(s, int)), 300)
        for i, r in enumerate(reads)
        if not isinstance(r, int)
    ]
    assert judged == list(range(300))
    assert all(j < r for j, r in zip(judged[:-1], running[:-1], strict=True))


@pytest.mark.parametrize("keeps", [False, True])
def test_i2_no_device_array_outlives_its_step(tmp_path, keeps):
    """A sink and the summary's events keep plain numbers."""
    kept = []

    class Sink:
        def write_scalars(self, step, scalars):
            kept.append(dict(scalars))

    alive = {}
    with Session(
        tmp_path / "run", total_steps=300, progress=False, sinks=[Sink()] * keeps
    ) as session:

        def count(step):
            if step in (100, 299):
                session._reporter.log.flush()
                for channel in session._reporter.channels:
                    channel._background.flush()
                alive[step] = len(jax.live_arrays())

        train(session, seen=count)
    assert alive[299] <= alive[100]
    assert all(isinstance(v, (int, float)) for row in kept for v in row.values())


def test_i3_the_last_steps_and_the_table_are_on_the_disk_before_the_error(tmp_path):
    policy = Ladder((Rung("stop", blocked_steps=1),))
    session = Session(tmp_path / "run", policy=policy, progress=False)
    table = Readings(
        jnp.array([[0.0, 2.5], [3.0, 1.0]]), ("mlp", "head"), ("nan_count", "absmax")
    )
    state = jnp.float32(0)
    with pytest.raises(TrainingStopped):
        for step, _ in session.steps(state, abs):
            bad = step == 10
            vitals = make_vitals(
                *(("nonfinite_loss",) * bad),
                severity=Severity.BLOCK if bad else Severity.OK,
                loss=np.nan if bad else 1.0 + step,
            )
            object.__setattr__(vitals, "readings", table)
            state = session.end_step(state, vitals)
    # Not closed: what is on the disk was there before the error was raised.
    stop = read_events(tmp_path / "run")[-1]
    assert (stop.action, stop.step) == ("stop", 10)
    window = stop.numbers["window"]
    assert window["step"] == list(range(11))
    assert window["loss"][:10] == [1.0 + i for i in range(10)]
    assert np.isnan(window["loss"][10]) and window["severity"][-1] == 3
    assert stop.numbers["readings"]["activations/head/nan_count"] == 3.0
    session.close()


def test_a_rollback_keeps_its_last_steps_too(tmp_path, keeper):
    policy = Ladder((Rung("rollback", blocked_steps=1),))
    with Session(
        tmp_path / "run", policy=policy, checkpoints=keeper, total_steps=60
    ) as session:
        state = jnp.float32(0)
        for _, batch in session.steps(state, abs):
            bad = dict(severity=Severity.BLOCK) if batch == 50 else {}
            state = session.end_step(
                state, make_vitals(*(("loss_spike",) if bad else ()), **bad)
            )
    (event,) = [e for e in read_events(tmp_path / "run") if e.action == "rollback"]
    assert event.numbers["window"]["step"] == list(range(19, 51))


def test_a_reading_that_is_not_finite_names_the_group(tmp_path):
    """The first signal is the loss; the table tells that an expert is at fault."""
    groups = {"experts": "*expert*"}
    table = Readings(jnp.array([[2.0], [0.0]]), ("expert_3", "head"), ("nan_count",))
    with Session(
        tmp_path / "run", policy=Ladder(groups=groups), total_steps=2
    ) as session:
        state = jnp.float32(0)
        for _ in session.steps(state, abs):
            vitals = make_vitals("nonfinite_loss", severity=Severity.BLOCK, first=1)
            object.__setattr__(vitals, "readings", table)
            state = session.end_step(state, vitals)
    skips = [e for e in read_events(tmp_path / "run") if e.action == "skip"]
    assert [e.numbers["group"] for e in skips] == ["experts"] * 2
