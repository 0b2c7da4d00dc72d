"""A process whose steps stop ends by itself; a pause is no hang."""

import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import jax.numpy as jnp
import pytest
from fake_run import make_vitals

from stabil.session import Session
from stabil.session._watchdog import Watchdog
from stabil.telemetry import read_beat, read_events


def test_it_barks_once_when_beats_stop_and_not_before():
    barked = threading.Event()
    dog = Watchdog(0.2, lambda seconds: barked.set())
    assert not barked.wait(0.5)  # no beat yet: compiling takes as long as it takes
    for _ in range(10):
        dog.beat()
        time.sleep(0.02)
    assert not barked.is_set()
    assert barked.wait(10)


def test_sleep_and_close_keep_it_quiet():
    barked = threading.Event()
    dog = Watchdog(0.1, lambda seconds: barked.set())
    dog.beat()
    with dog.asleep():
        assert not barked.wait(0.4)
    dog.beat()
    dog.close()
    assert not barked.wait(0.4)
    dog._thread.join(10)
    assert not dog._thread.is_alive()


def test_patience_ends_too():
    barked = threading.Event()
    dog = Watchdog(0.05, lambda seconds: barked.set())
    dog.beat()
    with dog.patient():
        assert not barked.wait(0.3)
        assert barked.wait(10)


def test_a_hung_step_ends_the_process_with_the_code_to_restart(tmp_path):
    code = f"""
        import sys, time
        import jax.numpy as jnp
        from fake_run import make_vitals
        from stabil.session import Session
        session = Session({str(tmp_path / "run")!r}, hang_seconds=0.5, progress=False)
        state = jnp.float32(0)
        with session:
            for step, _ in session.steps(state, abs):
                if step == 3:
                    time.sleep(600)
                state = session.end_step(state, make_vitals())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert done.returncode == 75, done.stderr
    assert re.search(r"no step has ended for \d+ seconds; every thread", done.stderr)
    assert "line 11 in <module>" in done.stderr  # where the main thread is stuck
    beat = read_beat(tmp_path / "run" / "heartbeat.json")
    assert (beat.state, beat.step, beat.exit_code) == ("hung", 3, 75)
    assert [e.action for e in read_events(tmp_path / "run")] == ["start", "hung"]


def test_a_pause_is_told_and_its_time_is_no_step(tmp_path):
    with Session(tmp_path / "run", total_steps=3, hang_seconds=0.3) as session:
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            state = session.end_step(state, make_vitals())
            if step == 1:
                with session.pause("validation"):
                    session._reporter.heart._background.flush()
                    beat = read_beat(tmp_path / "run" / "heartbeat.json")
                    time.sleep(0.6)
        assert session._watch.pace.step_seconds < 0.5
    assert (beat.state, beat.text) == ("paused", "validation")
    (event,) = [e for e in read_events(tmp_path / "run") if e.action == "pause"]
    assert (event.step, event.text) == (2, "validation")
    assert event.numbers["seconds"] > 0.5


def test_a_slow_save_is_no_hang(tmp_path, keeper, monkeypatch):
    barks, save = [], keeper.save

    def slow(*args, **kwargs):
        time.sleep(0.5)
        return save(*args, **kwargs)

    with Session(
        tmp_path / "run", checkpoints=keeper, total_steps=3, hang_seconds=0.2
    ) as session:
        monkeypatch.setattr(session._watchdog, "_bark", barks.append)
        state = jnp.float32(0)
        for step, _ in session.steps(state, abs):
            keeper.save = slow if step == 1 else save
            state = session.end_step(state, make_vitals())
    assert barks == []


def test_a_pause_that_fails_ends_too(tmp_path):
    session = Session(tmp_path / "run")
    with pytest.raises(KeyError), session.pause():
        raise KeyError("user")
    session.close()
    assert "pause" in [e.action for e in read_events(tmp_path / "run")]


def test_a_limit_of_nothing_is_refused(tmp_path):
    text = "^Session: needed hang_seconds > 0, or None for none, got 0$"
    with pytest.raises(ValueError, match=text):
        Session(tmp_path / "run", hang_seconds=0)
