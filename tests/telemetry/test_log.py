"""The event log loses nothing it promised to keep, and never holds training up."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from stabil.telemetry import Event, EventLog, read_events


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_json_object_a_line_with_every_field(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="r1", process=3, code_version="v1") as log:
        log.add(Event(action="skip", step=7, cause="loss_spike", layer="loss"))
    (row,) = rows(path)
    assert set(row) == {
        "schema", "run", "step", "micro_batch", "process", "device", "layer", "dtype",
        "data_index", "batch_id", "cause", "severity", "action", "text", "numbers",
        "code_version", "time",
    }  # fmt: skip
    assert (row["schema"], row["run"], row["process"]) == (1, "r1", 3)
    assert row["code_version"] == "v1" and abs(row["time"] - time.time()) < 60


def test_nonfinite_numbers_are_strict_json_and_come_back(tmp_path):
    path = tmp_path / "events.jsonl"
    numbers = {"loss": math.nan, "norms": [math.inf, -math.inf, 1.5], "n": 3}
    with EventLog(path) as log:
        log.add(Event(action="skip", numbers=numbers))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    back = read_events(path)[0].numbers
    assert math.isnan(back["loss"])
    assert back["norms"] == [math.inf, -math.inf, 1.5] and back["n"] == 3


def test_a_log_is_appended_to_and_never_truncated(tmp_path):
    path = tmp_path / "events.jsonl"
    for step in range(3):
        with EventLog(path) as log:
            log.add(Event(action="log", step=step))
    assert [e.step for e in read_events(path)] == [0, 1, 2]


def test_rows_are_written_256_at_a_time(tmp_path, monkeypatch):
    sizes, write = [], os.write

    def count(file, data):
        sizes.append(data.count(b"\n"))
        return write(file, data)

    gate = threading.Event()
    monkeypatch.setattr(os, "write", lambda f, d: (gate.wait(10), count(f, d))[1])
    with EventLog(tmp_path / "events.jsonl", every_seconds=60) as log:
        for step in range(1000):
            log.add(Event(action="log", step=step))
        gate.set()
        assert log.flush()
        assert sizes == [256, 256, 256, 232]
    assert [e.step for e in read_events(tmp_path)] == list(range(1000))


def test_rows_reach_the_file_after_the_stated_time(tmp_path):
    with EventLog(tmp_path / "events.jsonl", every_seconds=0.05) as log:
        log.add(Event(action="log", step=5))
        until = time.monotonic() + 10
        while not log.path.stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
        assert [e.step for e in read_events(log.path)] == [5]


def test_a_stuck_disk_holds_nobody_up_and_drops_are_counted(tmp_path, monkeypatch):
    gate, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda f, d: (gate.wait(30), write(f, d))[1])
    log = EventLog(tmp_path / "events.jsonl", every_seconds=0.01, capacity=100)
    begun = time.perf_counter()
    taken = sum(log.add(Event(action="log", step=i)) for i in range(2000))
    assert time.perf_counter() - begun < 1
    assert not log.flush(timeout_seconds=0.05)
    assert 100 <= taken <= 100 + 256 and log.dropped_rows == 2000 - taken
    gate.set()
    log.close()
    events = read_events(log.path)
    assert len(events) == taken + 1
    assert events[-1].action == "dropped"
    assert events[-1].numbers == {"dropped_rows": 2000 - taken, "failed_rows": 0}


def test_a_dead_disk_costs_rows_and_not_the_run(tmp_path, monkeypatch):
    def fail(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    log = EventLog(tmp_path / "events.jsonl", every_seconds=0.01)
    log.add(Event(action="log"))
    log.flush()
    log.close()
    assert log.failed_rows == 1 and log.dropped_rows == 0
    assert str(log.last_error) == "[Errno 28] No space left on device"


def test_a_disk_that_recovers_costs_nothing(tmp_path, monkeypatch):
    write, faults = os.write, [OSError(5, "I/O"), OSError(5, "I/O")]

    def half(file, data):
        if faults:
            write(file, data[: len(data) // 2])  # a part lands, then the disk fails
            raise faults.pop()
        return write(file, data)

    monkeypatch.setattr(os, "write", half)
    with EventLog(tmp_path / "events.jsonl", every_seconds=0.01) as log:
        for step in range(5):
            log.add(Event(action="log", step=step))
        assert log.flush()
    assert [e.step for e in read_events(log.path)] == [0, 1, 2, 3, 4]
    assert log.failed_rows == 0


def test_a_torn_last_line_is_left_out_and_ended_before_the_next_row(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.add(Event(action="log", step=1))
        log.add(Event(action="log", step=2))
    path.write_bytes(path.read_bytes()[:-40])
    assert [e.step for e in read_events(path)] == [1]
    with EventLog(path) as log:
        log.add(Event(action="log", step=3))
    with pytest.warns(UserWarning, match=r"events.jsonl: 1 lines could not be read$"):
        assert [e.step for e in read_events(path)] == [1, 3]


def test_a_newer_schema_is_refused_and_unknown_fields_are_not(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"schema": 1, "action": "log", "colour": "red"}\n')
    assert read_events(path)[0].action == "log"
    path.write_text('{"schema": 2, "action": "log"}\n')
    text = (
        "needed an event of schema 1 or older, got 2; read this log with a newer stabil"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_events(path)


def test_a_folder_without_logs_is_refused(tmp_path):
    text = (
        f"needed a run folder with events.jsonl, got {tmp_path} without one; "
        "stabil.Session(run_dir) writes it"
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(text)}$"):
        read_events(tmp_path)


def test_logs_of_several_processes_are_merged_by_time(tmp_path):
    for process, at in ((0, 2.0), (1, 1.0), (0, 3.0)):
        name = f"events-{process:05d}.jsonl" if process else "events.jsonl"
        with EventLog(tmp_path / name, process=process) as log:
            log.add(Event(action="log", time=at))
    assert [e.process for e in read_events(tmp_path)] == [1, 0, 0]


SCRIPT = """
import os, signal, sys, time
from stabil.telemetry import Event, EventLog
log = EventLog(sys.argv[1], every_seconds=float(sys.argv[3]))
for step in range(1000):
    log.add(Event(action="log", step=step))
if sys.argv[2] == "raise":
    raise RuntimeError("user code")
if sys.argv[2] == "kill":
    log.flush()
    log.add(Event(action="log", step=1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("raise", 1), ("kill", -9)])
def test_rows_survive_the_end_of_the_process(tmp_path, end, code):
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", SCRIPT, str(path), end, "3600"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert [e.step for e in read_events(path)][:1000] == list(range(1000))
    assert signal.SIGKILL == 9


def test_add_does_not_write(tmp_path):
    event = Event(action="log", numbers={"loss": 1.0})
    with EventLog(tmp_path / "events.jsonl") as log:
        begun = time.perf_counter()
        for _ in range(20_000):
            log.add(event)
        seconds = (time.perf_counter() - begun) / 20_000
    assert seconds < 1e-3  # measured: 5e-6 on an idle machine
