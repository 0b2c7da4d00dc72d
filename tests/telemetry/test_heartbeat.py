"""The heartbeat shows progress and nothing else keeps it young."""

import time

from stabil.telemetry import Heartbeat, _heartbeat, read_beat
from stabil.telemetry._run_folder import write_json


def test_beats_are_rare_and_changes_of_state_are_not(tmp_path, monkeypatch):
    path = tmp_path / "heartbeat.json"
    writes = []
    monkeypatch.setattr(
        _heartbeat, "write_json", lambda *a: (writes.append(a), write_json(*a))
    )
    heart = Heartbeat(path, every_seconds=3600)
    for step in range(1000):
        heart.beat(step)
    heart.beat(1000, "stopped", exit_code=77, text="why")
    heart.close()
    assert 1 <= len(writes) <= 2
    beat = read_beat(path)
    assert (beat.step, beat.state, beat.exit_code, beat.text) == (
        1000,
        "stopped",
        77,
        "why",
    )


def test_it_grows_old_when_training_hangs(tmp_path):
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, every_seconds=0.0) as heart:
        heart.beat(1)
        time.sleep(0.3)
        assert read_beat(path).age() >= 0.2
        heart.beat(2)
    assert read_beat(path).step == 2


def test_no_file_and_a_torn_one_are_no_beat(tmp_path):
    path = tmp_path / "heartbeat.json"
    assert read_beat(path) is None
    path.write_text('{"step": 3')
    assert read_beat(path) is None


def test_a_dead_disk_hurts_nobody(tmp_path):
    heart = Heartbeat(tmp_path / "gone" / "heartbeat.json", every_seconds=0.0)
    heart.beat(1)
    heart.close()
    assert read_beat(tmp_path / "gone" / "heartbeat.json") is None
