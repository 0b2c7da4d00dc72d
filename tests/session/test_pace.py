"""The session measures what going back costs, and tells the ladder when it asks."""

import jax.numpy as jnp
from fake_run import FakeKeeper, make_vitals

from stabil.policy import Ladder, Recovery
from stabil.session import Session
from stabil.session._pace import Pace
from stabil.telemetry import read_events
from stabil.vocabulary import Severity


def test_the_pace_is_the_median_and_leaves_pauses_out():
    now = iter([0.0, 1.0, 2.0, 9.0, 10.0, 50.0, 51.0, 60.0, 64.0])
    pace = Pace(clock=lambda: next(now))
    assert pace.step_seconds == 0.0
    for _ in range(5):
        pace.lap()
    pace.rest()
    pace.lap()
    pace.lap()
    assert pace.step_seconds == 1.0 and not pace.is_measured
    with pace.loading():
        pass
    assert (pace.load_seconds, pace.is_measured) == (4.0, True)


def test_a_load_is_estimated_by_its_size_until_it_was_measured():
    pace = Pace()
    pace.expect({"w": jnp.zeros((1000, 250)), "n": 3})
    assert pace.load_seconds == 1.0 + 1e6 / 5e8


def train(tmp_path, load_seconds):
    """The loss is high for 5 extreme steps and more, then back."""
    keeper = FakeKeeper(save_every=25)
    policy = Ladder()
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=policy, total_steps=200
    ) as session:
        state = session.resume(jnp.float32(0), abs)
        session._watch.pace.load_seconds = load_seconds
        session._watch.pace.is_measured = True
        for step, batch in session.steps(state, abs):
            high = 120 <= batch < 127
            vitals = make_vitals(
                *(("loss_spike",) if high else ()),
                severity=Severity.WARN if high else Severity.OK,
                loss=9.0 if high else 2.0 + 0.01 * (step % 3),
            )
            state = session.end_step(state, vitals)
    return [e for e in read_events(tmp_path / "run") if e.action in WANTED]


WANTED = ("wait", "rollback", "recovered")


def test_a_dear_load_waits_and_the_event_holds_the_numbers(tmp_path):
    wait, back = train(tmp_path, load_seconds=1e5)
    assert (wait.action, wait.step) == ("wait", 124)
    assert wait.numbers["load_seconds"] == 1e5 and wait.numbers["load_measured"]
    assert wait.numbers["before"] == 121  # checkpoint 100 or 75, whichever is healthy
    assert wait.numbers["redone_steps"] in (26, 51)
    assert 0 < wait.numbers["step_seconds"] < 1
    assert 0 < wait.numbers["recovery_probability"] < 1
    assert (back.action, back.step) == ("recovered", 127)
    # The log alone gives the weights of the run.
    recovery = Recovery()
    events = read_events(tmp_path / "run")
    rows = [row for e in events for row in e.numbers.get("lessons", ())]
    recovery.set_state(rows)
    assert len(rows) == 1 and list(recovery.weights) == back.numbers["weights"]


def test_a_cheap_load_rolls_back(tmp_path):
    (event,) = train(tmp_path, load_seconds=0.01)
    assert (event.action, event.step) == ("rollback", 124)
    assert event.numbers["saving_seconds"] < 60
