"""Every end of a run is told, and leaves the process with the code that fits it."""

import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from fake_run import make_vitals

from stabil.checkpoints import Keeper
from stabil.policy import Ladder, Rung
from stabil.session import ExitCode, Preempted, Session, TrainingStopped, run_main
from stabil.session._exit import crash_code, exit_code
from stabil.telemetry import read_beat, read_events
from stabil.vocabulary import Severity


def test_a_signal_saves_at_once_and_the_next_process_goes_on_there(tmp_path, keeper):
    session = Session(tmp_path / "run", checkpoints=keeper, total_steps=40)
    session.end_on_signal(signal.SIGUSR1)
    state = jnp.float32(0)
    with pytest.raises(Preempted) as caught, session:
        for step, _ in session.steps(state, abs):
            if step == 13:
                signal.raise_signal(signal.SIGUSR1)
            state = session.end_step(state + 1, make_vitals())
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert caught.value.code == int(ExitCode.RESTART) and caught.value.step == 14
    assert keeper.tags[14] == "healthy" and float(keeper.saved[14][0]) == 14.0
    beat = read_beat(tmp_path / "run" / "heartbeat.json")
    assert (beat.state, beat.step, beat.exit_code) == ("preempted", 14, 75)
    with Session(tmp_path / "run", checkpoints=keeper, total_steps=40) as session:
        assert float(session.resume(jnp.float32(0), abs)) == 14.0
    assert "preempted" in [e.action for e in read_events(tmp_path / "run")]


@pytest.mark.parametrize("broken", [False, True])
def test_a_stop_leaves_the_last_state_as_a_suspect(tmp_path, broken, monkeypatch):
    """What a person must look at is on the disk, and no resume chooses it."""
    folder, policy = tmp_path / "run", Ladder((Rung("stop", blocked_steps=2),))
    keeper = Keeper(tmp_path / "kept", save_every=5)
    session = Session(folder, checkpoints=keeper, policy=policy, progress=False)
    state = jnp.float32(0)
    with pytest.raises(TrainingStopped, match="2 blocked steps in a row"), session:
        for step, _ in session.steps(state, abs):
            bad = dict(severity=Severity.BLOCK) if step >= 12 else {}
            if bad and broken:
                monkeypatch.setattr(keeper, "save", lambda *_, **__: 1 / 0)
            state = session.end_step(state + 1, make_vitals(**bad))
    events = [e.action for e in read_events(folder)]
    if broken:
        assert events[-2:] == ["save_failed", "end"] and max(keeper.steps()) == 10
        return
    assert events[-3:] == ["stop", "emergency_save", "end"]
    assert keeper.steps()[15] == "suspect" and keeper.newest_healthy() <= 10
    assert float(keeper.restore(state, step=15).state) == 15.0
    keeper.close()
    with Keeper(tmp_path / "kept", save_every=5) as keeper:
        with Session(folder, checkpoints=keeper, progress=False) as session:
            assert float(session.resume(jnp.float32(0), abs)) <= 10.0


def test_the_heartbeat_says_how_a_run_ended(tmp_path):
    def beat(name):
        found = read_beat(tmp_path / name / "heartbeat.json")
        return found.state, found.step, found.exit_code

    def train(session):
        state = jnp.float32(0)
        for _ in session.steps(state, abs):
            vitals = make_vitals("loss_spike", severity=3)
            state = session.end_step(state, vitals)

    with Session(tmp_path / "a", total_steps=3) as session:
        session._reporter.heart._background.flush()
        assert beat("a") == ("starting", -1, 0)
        train(session)
    assert beat("a") == ("ended", 3, 0)
    policy = Ladder((Rung("stop", blocked_steps=2),))
    with pytest.raises(TrainingStopped), Session(tmp_path / "b", policy=policy) as s:
        train(s)
    assert beat("b") == ("stopped", 3, 77)
    with pytest.raises(KeyError), Session(tmp_path / "c") as session:
        raise KeyError("user")
    assert beat("c") == ("failed", 0, 0)


def test_replicas_that_disagree_call_for_another_machine():
    error = TrainingStopped("why", (), ("loss_spike", "replica_disagreement"))
    assert exit_code(error) == ExitCode.RESTART_ELSEWHERE
    assert exit_code(TrainingStopped("why")) == ExitCode.PERSON


def test_a_lost_process_calls_for_a_restart_and_a_fault_of_the_own_does_not(
    monkeypatch,
):
    lost = [
        jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: closed by peer"),
        ValueError("UNKNOWN: Gloo AllReduce failed: Connection reset by peer"),
        RuntimeError("UNAVAILABLE: the coordination service is gone"),
    ]
    own = [KeyError("weights"), ValueError("shapes do not match")]
    assert {crash_code(e) for e in (*lost, *own)} == {1}  # nobody there to be lost
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert {crash_code(e) for e in lost} == {int(ExitCode.RESTART)}
    assert {crash_code(e) for e in own} == {1}


def test_run_main_leaves_with_the_code_and_prints_the_advice():
    code = """
        from stabil.session import TrainingStopped, run_main
        def main():
            raise TrainingStopped("nothing helped", ["change the model"])
        run_main(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 77
    assert done.stderr == "training stopped: nothing helped\n- change the model\n"


def test_run_main_leaves_other_ends_alone():
    run_main(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 / 0)
