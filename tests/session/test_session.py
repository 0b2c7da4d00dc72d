"""The session acts one step late, goes back whole, and tells everything."""

import gc
import io
import json
import math
import re
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_run import FakeKeeper, make_vitals

from stabil.checkpoints import Keeper
from stabil.policy import Ladder, Rung
from stabil.session import Session, TrainingStopped, _watch
from stabil.telemetry import read_events
from stabil.testing import inject
from stabil.vocabulary import Controls, Severity

BAD = dict(severity=Severity.BLOCK, first=2, loss=math.nan)
ONE_STRIKE = (Rung("rollback", blocked_steps=1, budget=99),)


def train(session, source=lambda i: i, *, bad=(), until=None, start=0.0):
    """Runs a loop whose state counts good steps; returns it and what was run."""
    state, ran = jnp.float32(start), []
    for step, batch in session.steps(state, source):
        ran.append((step, batch))
        if batch in bad:
            vitals = make_vitals("nonfinite_gradient", **BAD)
        else:
            state, vitals = state + 1, make_vitals()
        state = session.end_step(state, vitals)
        if until is not None and len(ran) >= until:
            break
    return float(state), ran


def actions(run_dir, *kinds):
    return [e for e in read_events(run_dir) if e.action in kinds]


def test_values_are_read_one_step_late_and_the_last_at_the_end(tmp_path, monkeypatch):
    reads, get = [], _watch.fetch
    session = Session(tmp_path / "run", total_steps=6)

    def spy(tree):
        reads.append((int(session._turns.step) - 1, int(tree.tally.resets)))
        return get(tree)

    monkeypatch.setattr(_watch, "fetch", spy)
    state = jnp.float32(0)
    for step, _ in session.steps(state, lambda i: i):
        state = session.end_step(state, make_vitals(resets=step))
    session.close()
    # pairs of the step that was running and the step that was read
    assert reads == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]


def test_rollback_restores_state_and_skips_all_data_since_the_checkpoint(tmp_path):
    """Bad batch at 57, checkpoint at 50, found at 58: 50 to 58 are left out."""
    keeper = FakeKeeper(save_every=25)
    with Session(
        tmp_path / "run",
        checkpoints=keeper,
        policy=Ladder(ONE_STRIKE, healthy_after_steps=5),
        total_steps=70,
    ) as session:
        state, ran = train(session, bad={57})
        summary = session.summary()
    assert state == 70.0
    assert ran == [(i, i) for i in range(59)] + [(i, i + 9) for i in range(50, 70)]
    assert summary["skipped_data"] == [[50, 58]] and summary["rollbacks"] == 1
    assert summary["redone_steps"] == 9 and summary["steps_lost"] == 9
    (event,) = actions(tmp_path / "run", "rollback")
    assert (event.step, event.data_index, event.layer) == (57, 57, "grads/w")
    assert event.cause == "nonfinite_gradient" and event.severity == "block"
    assert event.numbers["to_step"] == 50 and event.numbers["skipped"] == [50, 58]


def test_no_fault_no_intervention_and_the_same_state(tmp_path, keeper):
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=300) as session:
        before = session.controls
        state, ran = train(session)
        assert state == 300.0 and ran == [(i, i) for i in range(300)]
        assert all(a is b for a, b in zip(before, session.controls, strict=True))
        assert set(session.summary()["actions"]) == {"start"}
    assert set(keeper.tags.values()) == {"healthy"}


def test_one_bad_step_costs_one_step(tmp_path, keeper):
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=50) as session:
        state, _ = train(session, bad={20})
        summary = session.summary()
    assert state == 49.0
    assert (summary["steps_lost"], summary["rollbacks"]) == (1, 0)
    (event,) = actions(tmp_path / "run", "skip")
    assert (event.step, event.data_index, event.layer) == (20, 20, "grads/w")
    assert math.isnan(event.numbers["loss"])


@pytest.mark.parametrize("kind", ["function", "stateful", "plain"])
def test_a_killed_run_goes_on_at_the_exact_data_position(tmp_path, kind):
    from test_data import SOURCES

    keeper = FakeKeeper(save_every=10)
    first = Session(tmp_path / "run", checkpoints=keeper, total_steps=60)
    train(first, SOURCES[kind](), bad={250, 260, 270}, until=65)
    # No close: the process is gone.
    keeper.wait()
    assert keeper.newest_healthy() == 30
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=60) as session:
        state, ran = train(session, SOURCES[kind]())
    skipped = session.summary()["skipped_data"]
    assert skipped == [[10, 28]]
    # The first turn runs on the wrong state; its result is thrown away.
    assert ran[0] == ran[1] and ran[0][0] == 30
    assert [s for s, _ in ran[1:]] == list(range(30, 60))
    assert [b // 10 for _, b in ran[1:]] == [i + 19 for i in range(30, 60)]
    assert state == 60.0
    (event,) = actions(tmp_path / "run", "resume")
    assert event.text == "resumed at step 30"


def test_resume_before_the_loop_spares_the_thrown_away_step(tmp_path, keeper):
    train(Session(tmp_path / "run", checkpoints=keeper), until=23)
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=30) as session:
        source = lambda i: i  # noqa: E731
        state = session.resume(jnp.float32(0), source)
        at = int(state)
        assert at == keeper.newest_healthy() == 15
        ran = []
        for step, batch in session.steps(state, source):
            ran.append((step, batch))
            state = session.end_step(state + 1, make_vitals())
    assert float(state) == 30.0 and ran == [(i, i) for i in range(at, 30)]


def test_the_whole_loop_in_one_call_is_the_same(tmp_path):
    """Callbacks see each state, older ones after a rollback too."""
    seen = []

    def step(state, batch, controls):
        assert isinstance(controls, Controls)
        if batch == 17:
            return state, make_vitals("nonfinite_gradient", **BAD)
        return state + 1, make_vitals()

    keeper = FakeKeeper(save_every=5)
    for total in (30, 40):
        with Session(
            tmp_path / "run",
            checkpoints=keeper,
            policy=Ladder(ONE_STRIKE),
            total_steps=total,
        ) as session:
            state = session.run(
                step,
                jnp.float32(0),
                lambda i: i,
                after_step=[lambda n, s: seen.append((n, float(s)))],
            )
    assert float(state) == 40.0 and seen[-1] == (40, 40.0)
    back = next(i for i in range(1, len(seen)) if seen[i][0] <= seen[i - 1][0])
    assert seen[back] == (10, 10.0) and seen[back - 1] == (18, 17.0)


@pytest.mark.parametrize(("alone", "batch"), [(True, "my shard"), (False, "17")])
def test_names_that_only_one_process_has_are_no_ground_to_decide(
    tmp_path, keeper, alone, batch
):
    policy = Ladder(ONE_STRIKE)
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=policy, total_steps=30
    ) as session:
        session._watch._is_alone = alone
        state = jnp.float32(0)
        for _, i in session.steps(state, abs):
            bad = dict(BAD) if i == 17 else {}
            vitals = make_vitals(*(("loss_spike",) if bad else ()), **bad)
            state = session.end_step(state, vitals, batch_id="my shard")
    (row,) = policy.get_state()["relapses"]
    assert row["batch"] == batch and list(policy.get_state()["batches"]) == [batch]
    (event,) = actions(tmp_path / "run", "rollback")
    assert event.batch_id == "my shard"  # which is worth telling all the same


def test_the_skip_list_survives_a_kill_right_after_the_rollback(tmp_path, keeper):
    policy = Ladder(ONE_STRIKE)
    first = Session(tmp_path / "run", checkpoints=keeper, policy=policy)
    _, ran = train(first, bad={17}, until=19)  # the rollback happens at turn 19
    assert keeper.newest_healthy() == 10 and keeper.quarantined == [15]
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=Ladder(ONE_STRIKE), total_steps=20
    ) as session:
        state, ran = train(session, bad={17})
        assert session.policy.get_state()["relapses"][0]["window"] == [10, 18]
    assert ran[1:] == [(i, i + 9) for i in range(10, 20)] and state == 20.0


def test_a_kill_in_the_middle_of_a_rollback_loses_no_window(tmp_path, keeper):
    class Killed(BaseException):
        pass

    def killed(*args, **kwargs):
        raise Killed

    session = Session(
        tmp_path / "run", checkpoints=keeper, policy=Ladder(ONE_STRIKE), total_steps=30
    )
    rollback, keeper.rollback = keeper.rollback, killed
    with pytest.raises(Killed):
        train(session, bad={17})
    keeper.rollback = rollback
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=Ladder(ONE_STRIKE), total_steps=30
    ) as session:
        _, ran = train(session, bad={17})
        assert session.summary()["rollbacks"] == 0
    assert [b for _, b in ran[1:]] == [i + 9 for i in range(10, 30)]


class Numbers:
    """An iterator with a state; of several processes, each has another one."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at - 1

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("processes", [1, 2])
def test_iterators_of_another_share_of_the_data_are_not_set(
    tmp_path, keeper, processes
):
    """What two processes saved, one restores: it draws up to the position."""
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=10) as session:
        train(session, Numbers())
    restore, data = keeper.restore, {"position": 10, "windows": []}

    def with_positions(*arguments):
        found = restore(*arguments)
        each = {str(n): data | {"iterator": {"at": 300}} for n in range(processes)}
        found.positions = each
        return found

    keeper.restore = with_positions
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=12) as session:
        _, ran = train(session, Numbers())
    assert [batch for _, batch in ran[1:]] == (
        [300, 301] if processes == 1 else [10, 11]
    )


def test_relapse_goes_further_back_skips_more_and_ends_with_advice(tmp_path, keeper):
    session = Session(tmp_path / "run", checkpoints=keeper, total_steps=200)
    with pytest.raises(TrainingStopped) as caught, session:
        train(session, bad=range(40, 100_000))
    events = actions(tmp_path / "run", "rollback", "stop")
    assert [e.action for e in events] == ["rollback"] * 3 + ["stop"]
    targets = [e.numbers["to_step"] for e in events[:3]]
    assert targets == sorted(targets, reverse=True) and len(set(targets)) == 3
    lengths = [b - a for a, b in (e.numbers["skipped"] for e in events[:3])]
    assert lengths == sorted(lengths) and lengths[-1] >= 200
    assert re.match(
        r"^training stopped: 3 rollbacks near step \d+ did not help: \d+ blocked steps "
        r"in a row\n- ",
        str(caught.value),
    )
    assert caught.value.advice[-1] == (
        "resume from an older step with a lower learning rate"
    )
    assert events[-1].numbers["evidence"]


def test_a_rollback_waits_for_the_first_save(tmp_path, keeper):
    """The first state is on its way to the disk while the first steps already fail."""
    find, landed = keeper.newest_healthy, []
    keeper.newest_healthy = lambda before=None: find(before) if landed else None
    keeper.wait = lambda: landed.append(True)
    folder, steps = tmp_path / "run", []
    with Session(folder, checkpoints=keeper, total_steps=20, progress=False) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, lambda i: i):
            steps.append(step)
            bad = dict(severity=Severity.BLOCK, loss=math.nan)
            early = 2 <= len(steps) < 5
            vitals = make_vitals("nonfinite_loss", **bad) if early else make_vitals()
            state = session.end_step(state, vitals)
    assert steps.count(0) == 2 and session.summary()["rollbacks"] == 1


def test_parameters_already_nan_roll_back_at_once_and_are_named(tmp_path, keeper):
    session = Session(tmp_path / "run", checkpoints=keeper, total_steps=40)
    state = {"params": {"w": jnp.ones(3), "b": jnp.ones(2)}, "mu": jnp.zeros(2)}
    turns = 0
    for _, batch in session.steps(state, lambda i: i):
        turns += 1
        if batch == 20:
            state["params"]["w"] = state["params"]["w"].at[1].set(jnp.nan)
        broken = bool(jnp.isnan(state["params"]["w"]).any())
        cause = ("nonfinite_loss",) if broken else ()
        state = session.end_step(state, make_vitals(*cause, **(BAD if broken else {})))
    session.close()
    (event,) = actions(tmp_path / "run", "rollback")
    assert event.step == 21  # the second failing step
    assert event.text.startswith("params/w is not finite")
    assert turns == 40 + (23 - event.numbers["to_step"])
    assert bool(jnp.isfinite(state["params"]["w"]).all())


def test_without_checkpoints_damage_stops_the_run_and_names_the_leaf(tmp_path):
    session = Session(tmp_path / "run", total_steps=40)
    state = {"params": {"w": jnp.full(3, jnp.nan)}}
    text = (
        "training stopped: params/w is not finite, so that skipping steps is of no "
        "use; there is no checkpoint to go back to\n- read the named batches: look for "
        "empty, masked, repeated or corrupt records\n- resume from an older step with "
        "a lower learning rate"
    )
    with pytest.raises(TrainingStopped, match=f"^{re.escape(text)}$"), session:
        for _ in session.steps(state, lambda i: i):
            state = session.end_step(state, make_vitals("nonfinite_loss", **BAD))
    assert [e.action for e in actions(tmp_path / "run", "stop")] == ["stop"]


def test_a_rollback_that_fails_stops_with_the_reason(tmp_path, keeper):
    session = Session(
        tmp_path / "run", checkpoints=keeper, policy=Ladder(ONE_STRIKE), total_steps=40
    )

    def fail(*args, **kwargs):
        raise OSError("disk is gone")

    keeper.rollback = fail
    with pytest.raises(TrainingStopped, match="the rollback failed: disk is gone$"):
        train(session, bad={20})
    assert actions(tmp_path / "run", "stop")[0].step == 20


def test_controls_change_by_value_and_never_recompile(tmp_path):
    rungs = (
        Rung("look", severity=2, lasting_steps=5),
        Rung("reset", severity=2, budget=1),
        Rung("cut", severity=3, lasting_steps=20),
    )
    seen, traces = [], []

    @jax.jit
    def step_fn(x, controls):
        traces.append(1)
        return x * controls.learning_rate_scale

    with Session(tmp_path / "run", policy=Ladder(rungs), total_steps=60) as session:
        state = jnp.float32(1)
        for step, _ in session.steps(state, lambda i: i):
            c = session.controls
            seen.append(tuple(float(x) for x in c))
            step_fn(state, c)
            severity = {10: Severity.WARN, 12: Severity.BLOCK}.get(step, Severity.OK)
            state = session.end_step(state, make_vitals(severity=severity))
    # What is read of step 10 while 11 runs holds from step 12 on.
    assert seen[:12] == [(1.0, 0.0, 0.0)] * 12
    assert seen[12] == (1.0, 1.0, 1.0) and seen[13] == (1.0, 0.0, 1.0)
    assert seen[14] == (0.5, 0.0, 1.0) and seen[-1] == (1.0, 0.0, 0.0)
    assert sum(s[1] for s in seen) == 1
    assert len(traces) == 1
    kinds = [(x.dtype, x.shape, x.weak_type) for x in session.controls]
    assert kinds == [(x.dtype, x.shape, x.weak_type) for x in Controls.untouched()]


def test_raised_training_code_leaves_a_flushed_log(tmp_path):
    with pytest.raises(ZeroDivisionError), Session(tmp_path / "run") as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, lambda i: i):
            vitals = make_vitals("loss_spike", severity=Severity.WARN)
            state = session.end_step(state, vitals if step == 8 else make_vitals())
            if step == 9:
                raise ZeroDivisionError("user code")
    events = read_events(tmp_path / "run")
    assert [(e.action, e.step) for e in events if e.step >= 0] == [
        ("log", 8),
        ("look", 8),
        ("failed", 10),
        ("end", 10),
    ]
    assert events[-2].text == "ZeroDivisionError: user code"


def test_a_break_reads_the_last_step_and_a_late_rollback_is_only_told(tmp_path, keeper):
    policy = Ladder(ONE_STRIKE)
    session = Session(tmp_path / "run", checkpoints=keeper, policy=policy)
    _, ran = train(session, bad={9}, until=10)
    session.close()
    assert len(ran) == 10 and session.summary()["observed_steps"] == 10
    assert [e.step for e in actions(tmp_path / "run", "would_rollback")] == [9]


def test_the_last_step_is_judged_before_the_run_ends(tmp_path, keeper):
    policy = Ladder(ONE_STRIKE)
    with Session(
        tmp_path / "run", checkpoints=keeper, policy=policy, total_steps=20
    ) as session:
        state, ran = train(session, bad={19})
    assert state == 20.0 and ran[-1] == (19, 29)
    assert keeper.tags[20] == "healthy"


def test_a_finished_run_says_how_to_get_its_state(tmp_path, keeper):
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=20) as session:
        train(session)
    text = (
        "the run is complete at step 20, and no step is left to hand its state over; "
        "call state = session.resume(state, batch_for_step) before the loop"
    )
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=20) as session:
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            train(session)
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=20) as session:
        state = session.resume(jnp.float32(0), lambda i: i)
        assert list(session.steps(state, lambda i: i)) == [] and float(state) == 20.0


def test_a_disk_that_is_away_for_a_while_does_not_end_a_run(tmp_path):
    """A keeper whose save stays due until one succeeds, as the real one's does."""
    with Keeper(tmp_path / "ck", save_every=10) as keeper:
        away = inject.Fault(kind="gone", place="disk", step=9, duration=15)
        with (
            inject.Disk((away,), tmp_path / "ck") as disk,
            Session(
                tmp_path / "run", checkpoints=keeper, total_steps=40, progress=False
            ) as session,
        ):
            state = jnp.float32(0)
            for step, _ in session.steps(state, lambda i: i):
                keeper.wait()
                disk.at(step)
                state = session.end_step(state + 1, make_vitals())
        failed = [e.step for e in actions(tmp_path / "run", "save_failed")]
        assert failed == [10, 11, 13, 17]  # the pauses double
        assert set(keeper.steps()) == {0, 25, 30, 40}


@pytest.mark.parametrize(
    ("bad", "expected"), [(range(38, 45), 67), (range(38, 300), 89)]
)
def test_no_state_is_saved_amid_an_event_unless_it_lasts(tmp_path, bad, expected):
    """Due at 40: 20 quiet steps after the event, or after 50 steps of waiting."""
    warned = make_vitals("gradient_spike", severity=Severity.WARN)
    with (
        Keeper(tmp_path / "ck", save_every=40) as keeper,
        Session(
            tmp_path / "run", checkpoints=keeper, total_steps=119, progress=False
        ) as session,
    ):
        state = jnp.float32(0)
        for step, _ in session.steps(state, lambda i: i):
            state = session.end_step(
                state + 1, warned if step in bad else make_vitals()
            )
    tags = keeper.steps()
    assert min(set(tags) - {0}) == expected
    assert (tags[expected] == "healthy") == (len(bad) < 10)


def test_failing_saves_are_told_and_the_third_in_a_row_raises(tmp_path):
    keeper = FakeKeeper(save_every=5)
    with Session(tmp_path / "a", checkpoints=keeper, total_steps=40) as session:
        session.resume(jnp.float32(0), abs)
        keeper.fail = 2
        train(session, abs)
    assert [e.step for e in actions(tmp_path / "a", "save_failed")] == [5, 10]
    keeper = FakeKeeper(save_every=5)
    session = Session(tmp_path / "b", checkpoints=keeper, total_steps=40)
    session.resume(jnp.float32(0), abs)
    keeper.fail = 3
    with pytest.raises(OSError, match="^disk is gone$"):
        train(session, abs)
    assert [e.step for e in actions(tmp_path / "b", "save_failed")] == [5, 10, 15]


def test_sinks_and_alerts_get_theirs_and_dead_ones_are_counted(tmp_path):
    rows, inbox = [], []

    class Sink:
        def write_scalars(self, step, scalars):
            rows.append((step, scalars["loss"], scalars["verdict/severity"]))

    class Dead:
        def write_scalars(self, step, scalars):
            raise ConnectionError

        def send(self, title, text, severity):
            raise ConnectionError

    class Inbox:
        def send(self, title, text, severity):
            inbox.append(text)

    session = Session(
        tmp_path / "run",
        sinks=[Sink(), Dead()],
        alerts=[Inbox(), Dead()],
        total_steps=9,
    )
    with session:
        state, _ = train(session, bad={4})
    assert state == 8.0 and [r[0] for r in rows] == list(range(9))
    assert [r[2] for r in rows] == [0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert inbox == [
        "nonfinite gradient in grads/w at step 4, batch 4: skip (the step was blocked "
        "(nonfinite_gradient in grads/w))."
    ]
    summary = session.summary()
    assert summary["lost_scalars"] == 9 and summary["lost_alerts"] == 1


def test_progress_is_forced_or_off(tmp_path, monkeypatch):
    for name, progress, shown in (("a", "always", True), ("b", True, False)):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        with Session(tmp_path / name, total_steps=3, progress=progress) as session:
            train(session)
        assert ("step 1/3  loss 1  grad_norm 0.5" in stream.getvalue()) == shown


def test_events_and_alerts_name_the_users_batch(tmp_path):
    inbox = []

    class Inbox:
        def send(self, title, text, severity):
            inbox.append(text)

    with Session(tmp_path / "run", alerts=[Inbox()], total_steps=3) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            vitals = make_vitals("loss_spike", severity=3 if step == 1 else 0)
            state = session.end_step(state, vitals, batch_id=f"shard-7:{step}")
    assert actions(tmp_path / "run", "skip")[0].batch_id == "shard-7:1"
    assert "at step 1, batch shard-7:1: skip" in inbox[0]


def test_a_run_killed_before_its_first_tag_can_begin_again(tmp_path, keeper):
    session = Session(tmp_path / "run", checkpoints=keeper)
    train(session, until=2)
    keeper.tags[0] = "pending"
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=10) as session:
        state, ran = train(session)
    assert state == 10.0 and ran[:2] == [(0, 0), (0, 0)]


def test_a_keeper_without_a_healthy_step_is_no_place_to_resume_from(tmp_path, keeper):
    for step, tag in ((5, "suspect"), (10, "pending")):
        keeper.save(step, jnp.float32(0), force=True)
        keeper.tags[step] = tag
    text = (
        "needed a healthy checkpoint to resume from, got 5 suspect, 10 pending; judge "
        "one with `stabil checkpoints mark RUN STEP healthy`, or begin a new run in "
        "another folder"
    )
    with Session(tmp_path / "run", checkpoints=keeper) as session:
        with pytest.raises(LookupError, match=f"^{re.escape(text)}$"):
            session.steps(jnp.float32(0), abs)


def test_summary_is_json(tmp_path, keeper):
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=30) as session:
        train(session, bad={12, 13, 14})
    summary = json.loads(json.dumps(session.summary(), allow_nan=True))
    assert summary["rollbacks"] == 1 and summary["blocked"] == 3
    assert [e["action"] for e in summary["events"]][:2] == ["start", "skip"]


def test_announced_changes_are_events(tmp_path):
    with Session(tmp_path / "run", total_steps=3) as session:
        session.announce("second stage")
        train(session)
    assert actions(tmp_path / "run", "announce")[0].text == "second stage"


def test_misuse_says_what_to_write(tmp_path):
    session = Session(tmp_path / "run")
    text = (
        "end_step: needed an open step, got none; call it once per turn of `for step, "
        "batch in session.steps(state, batch_for_step)`"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        session.end_step(0, make_vitals())
    turns = session.steps(jnp.float32(0), abs)
    next(turns)
    text = (
        "end_step: needed the step's Vitals, got dict; return stabil.vitals(opt_state, "
        "params=params) from the train step"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        session.end_step(0, {})
    text = (
        "steps: needed one loop at a time, got a second; end the first loop or make "
        "another Session in another run_dir"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        session.steps(jnp.float32(0), abs)
    text = (
        "step 0 was not ended; call state = session.end_step(state, vitals) once in "
        "the loop's body"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        next(turns)
    session.close()


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    text = (
        "needed a new or empty folder or one made by stabil as run_dir, got "
        f"{tmp_path} with 1 other entries (first: thesis.tex); choose another run_dir, "
        "nothing was changed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Session(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_import_of_the_host_half_stays_clear_of_orbax():
    code = "import stabil.session, sys; assert 'orbax' not in ' '.join(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_quiet_step_sends_nothing_to_the_device(tmp_path):
    good = make_vitals()
    with Session(tmp_path / "run", total_steps=200) as session:
        state = jnp.float32(0)
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            for _ in session.steps(state, lambda i: i):
                state = session.end_step(state, good)
    assert session.summary()["observed_steps"] == 200


@pytest.mark.parametrize(
    "steps", [1500, pytest.param(100_000, marks=pytest.mark.slow)], ids=str
)
def test_host_memory_stays_flat(tmp_path, steps):
    """Nothing of a step is kept."""
    good, bad = make_vitals(), make_vitals("nonfinite_gradient", **BAD)
    sizes = []
    with Session(tmp_path / "run", total_steps=steps + 1) as session:
        state = jnp.float32(0)
        tracemalloc.start()
        for step, _ in session.steps(state, lambda i: i):
            state = session.end_step(state, bad if step % 50 == 0 else good)
            if step in (steps // 3, steps):
                session._reporter.log.flush()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    # Up to 1,000 events more, the newest that a summary lists.
    assert sizes[1] - sizes[0] < min(steps // 50, 1000) * 4000 + 100_000
    assert np.all(np.asarray(sizes) > 0)


def test_a_nan_that_no_step_meets_is_found_before_the_save_and_undone(tmp_path):
    keeper = FakeKeeper(save_every=10)
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=50) as session:
        state = {"params": jnp.zeros(3)}
        for _, batch in session.steps(state, lambda i: i):
            state = {"params": state["params"] + 1}
            if batch == 33:
                state = {"params": state["params"].at[1].set(jnp.nan)}
            state = session.end_step(state, make_vitals())
    (back,) = actions(tmp_path / "run", "rollback")
    assert (back.layer, back.cause) == ("params", "nonfinite_parameter")
    assert back.numbers["to_step"] <= 30 and session.summary()["next_step"] == 50
    assert np.asarray(state["params"]).tolist() == [50.0] * 3
    assert all(np.isfinite(s["params"]).all() for s, _ in keeper.saved.values())
