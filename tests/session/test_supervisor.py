"""A dead or hung process is started again, as long as it gets further."""

import json
import re
import signal
import sys
import textwrap

import pytest

from stabil.session import ExitCode, Supervisor
from stabil.telemetry import read_events

# Counts its starts in a file and beats as a session does; what it does at each start
# is the scenario.
PROCESS = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
counter = folder / "starts"
start = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(start + 1))

def beat(step, state="running", exit_code=0):
    beat = dict(step=step, state=state, exit_code=exit_code, time=time.time())
    (folder / "b.tmp").write_text(json.dumps(beat))
    os.replace(folder / "b.tmp", folder / "heartbeat.json")

"""


def supervise(tmp_path, scenario, **settings):
    script = tmp_path / "train.py"
    script.write_text(PROCESS + textwrap.dedent(scenario))
    run = tmp_path / "run"
    settings = dict(poll_seconds=0.02, pause_seconds=0.01, restarts=2) | settings
    supervisor = Supervisor([sys.executable, str(script), str(run)], run, **settings)
    code = supervisor.run()
    events = [(e.action, e.step) for e in read_events(run)]
    return code, supervisor.starts, events


def test_a_dead_process_goes_on_while_it_gets_further(tmp_path):
    scenario = """
        beat(10 * start + 10)
        if start < 5:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code, starts, events = supervise(tmp_path, scenario)
    assert (code, starts) == (0, 6)
    restarts = [("supervisor_restart", s) for s in (10, 20, 30, 40, 50)]
    assert events == [*restarts, ("supervisor_end", 60)]


def test_the_budget_counts_starts_without_progress(tmp_path):
    code, starts, events = supervise(tmp_path, "beat(10); sys.exit(1)")
    assert (code, starts) == (int(ExitCode.PERSON), 4)  # one start and three idle ones
    assert events[-1] == ("supervisor_end", 10)


@pytest.mark.parametrize("code", [ExitCode.PERSON, ExitCode.RESTART_ELSEWHERE])
def test_a_process_that_needs_a_person_or_another_machine_is_left(tmp_path, code):
    scenario = f"beat(3, 'stopped', {int(code)}); sys.exit(1)"
    assert supervise(tmp_path, scenario)[:2] == (int(code), 1)


def test_a_process_that_was_asked_to_leave_is_started_again(tmp_path):
    scenario = """
        beat(start + 1, "running" if start else "preempted", 0 if start else 75)
        sys.exit(0 if start else 75)
    """
    assert supervise(tmp_path, scenario)[:2] == (0, 2)


def test_a_hung_process_is_ended_and_started_again(tmp_path):
    scenario = """
        beat(start + 1)
        if start == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # deaf as well
            time.sleep(60)
    """
    code, starts, _ = supervise(tmp_path, scenario, hang_seconds=0.5, grace_seconds=0.2)
    assert (code, starts) == (0, 2)
    (first, _) = read_events(tmp_path / "run")
    assert re.fullmatch(r"no sign of life for \d+ seconds", first.text)


def test_a_process_that_never_starts_to_train_is_hung_too(tmp_path):
    scenario = """
        if start == 0:
            beat(-1, "starting")
            time.sleep(60)
        beat(1)
    """
    code, starts, _ = supervise(tmp_path, scenario, start_seconds=1.0)
    assert (code, starts) == (0, 2)


def test_the_most_silent_of_several_processes_counts(tmp_path):
    scenario = """
        beat(start + 1)
        if start == 0:  # the other process of the run has stopped to beat
            other = dict(step=1, state="running", time=time.time())
            (folder / "heartbeat-00001.json").write_text(json.dumps(other))
            for _ in range(500):
                beat(start + 1)
                time.sleep(0.02)
        (folder / "heartbeat-00001.json").unlink()
    """
    code, starts, _ = supervise(tmp_path, scenario, hang_seconds=1.0)
    assert (code, starts) == (0, 2)


def test_a_paused_process_has_the_time_of_a_starting_one(tmp_path):
    scenario = """
        beat(1, "paused")
        time.sleep(1.0)
        beat(2)
    """
    code, starts, _ = supervise(tmp_path, scenario, hang_seconds=0.3)
    assert (code, starts) == (0, 1)


def test_the_code_of_another_process_is_not_taken_for_the_own(tmp_path):
    scenario = """
        def tell(name, code, pid):
            beat = dict(step=3, state="failed", exit_code=code, time=time.time())
            (folder / name).write_text(json.dumps(beat | dict(pid=pid)))

        tell("heartbeat-00001.json", 77, 1)
        tell("heartbeat.json", 0, os.getpid())
        sys.exit(0)
    """
    assert supervise(tmp_path, scenario)[:2] == (0, 1)


def test_an_old_heartbeat_is_not_taken_for_the_new_process(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    old = dict(step=9, state="stopped", exit_code=77, time=1.0)
    (run / "heartbeat.json").write_text(json.dumps(old))
    assert supervise(tmp_path, "time.sleep(0.2)", hang_seconds=0.1)[0] == 0


def test_ending_the_supervisor_ends_the_process(tmp_path):
    scenario = """
        beat(1)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    """
    handler = signal.getsignal(signal.SIGTERM)
    assert supervise(tmp_path, scenario)[:2] == (-signal.SIGTERM, 1)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_ending_the_supervisor_between_two_starts_is_no_error(tmp_path, capsys):
    scenario = """
        import subprocess
        later = f"import os, time; time.sleep(0.5); os.kill({os.getppid()}, 15)"
        subprocess.Popen([sys.executable, "-c", later])
        sys.exit(3)
    """
    assert supervise(tmp_path, scenario, pause_seconds=60)[:2] == (3, 1)
    assert capsys.readouterr().err == (
        "stabil run: the process ended with code 3; starting it again\n"
    )


def test_errors_say_what_to_write(tmp_path):
    text = (
        "Supervisor: needed a command, got none; write stabil run RUN -- python "
        "train.py"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Supervisor([], tmp_path)
    text = (
        "Supervisor: needed restarts >= 0 and hang_seconds, start_seconds and "
        "poll_seconds > 0, got 3, 0, 3600.0 and 1.0"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Supervisor(["python"], tmp_path, hang_seconds=0)
