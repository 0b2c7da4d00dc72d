"""Every process decides the same, though only one saw the fault and kept the notes.

The long ones, in which a process is lost and all start again (some minutes):

    pytest -m slow tests/session/test_two_processes.py
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from stabil.telemetry import read_events

HERE = pathlib.Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parents[1])])
# From the fault to the end of the last process. The limit of the watchdog is 4; the
# rest is writing down why, on a machine that does other things as well.
SECONDS_TO_END = 15


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def test_both_processes_roll_back_skip_and_resume_alike(tmp_path):
    port = free_port()
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=PATH)
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "two_processes.py", port, str(i), tmp_path],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        ends = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], ends
    one, two = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    assert one["first"] == two["first"] and one["second"] == two["second"]
    # Killed three steps after the rollback: its window is in no checkpoint yet, and
    # the second process has lost its disk.
    assert one["first"][0][-3:] == [[20, 41], [21, 42], [22, 43]]
    assert one["second"][0][1:] == [[i, i + 21] for i in range(20, 60)]
    assert one["second"][1] == 60.0
    costs, leaves = one["second"][2]
    assert costs == {
        "before": 60,
        "p": 0.0,
        "load_seconds": 10.0,
        "load_measured": True,
        "redone_steps": costs["redone_steps"],
        "step_seconds": True,
    }
    assert leaves == [False, True, False]
    kinds = [kind for _, kind in one["events"]]
    assert kinds.count("rollback") == 1 and kinds.count("resume") == 1


def supervised(folder, fault):
    """Runs both processes, each under `stabil run`; their codes."""
    port, run = free_port(), folder / "run"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=PATH)
    words = [sys.executable, "-m", "stabil.cli", "run", "--restarts", "4", run, "--"]
    script = [sys.executable, HERE / "two_supervised.py", port]
    processes = [
        subprocess.Popen([*words, *script, str(i), "2", run, fault], env=env)
        for i in range(2)
    ]
    try:
        return [p.wait(timeout=400) for p in processes]
    finally:
        for p in processes:
            p.terminate()


def alone(folder, fault):
    """The same run in one process with two devices."""
    flags = "--xla_force_host_platform_device_count=2"
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=PATH)
    words = [HERE / "two_supervised.py", "0", "0", "1", folder / "alone", fault]
    subprocess.run([sys.executable, *words], env=env, check=True, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "hang", "ask", "corrupt"])
def test_a_lost_process_ends_all_and_the_run_finishes_as_if_alone(tmp_path, fault):
    assert supervised(tmp_path, fault) == [0, 0]
    alone(tmp_path, fault)
    both, one = (np.load(tmp_path / f"{name}.npy") for name in ("run", "alone"))
    np.testing.assert_array_equal(both, one)
    events = read_events(tmp_path / "run")
    kinds = [(e.process, e.action) for e in events]
    if fault == "corrupt":
        assert kinds.count((0, "rollback")) == kinds.count((1, "rollback")) == 1
        return
    ends = [e for e in events if e.action == "supervisor_restart"]
    codes = sorted(e.numbers["code"] for e in ends)
    # A killed process has no say; the one that is left says: start me again.
    assert codes == ([-9, 75] if fault == "kill" else [75, 75])
    struck = (tmp_path / "run-struck").stat().st_mtime
    last = max(e.time for e in ends) - struck
    # A process that is asked to leave first compares notes, at the next 16th step.
    assert last < (60 if fault == "ask" else SECONDS_TO_END)
    told = {"kill": "failed", "hang": "hung", "ask": "preempted"}[fault]
    assert (0, told) in kinds
    assert [e.text for e in events if e.action == "resume"] in (
        ["resumed at step 20"] * 2,
        ["resumed at step 30"] * 2,
        ["resumed at step 48"] * 2,
    )
