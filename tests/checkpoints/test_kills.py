"""Runs killed with `kill -9`: none restarts on a bad step, none loses a healthy one.

The campaign: `python -m pytest -n 0 -m slow tests/checkpoints/test_kills.py`.
"""

import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from stabil.checkpoints import Keeper, _points, verify

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from kill_worker import make_state  # noqa: E402

TARGET = jax.eval_shape(lambda: make_state(0))


def start(folder, diary, seed, *point):
    command = [
        sys.executable,
        str(HERE / "kill_worker.py"),
        folder,
        diary,
        seed,
        *point,
    ]
    return subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def newest_known_healthy(diary):
    """What the diary proves; a rollback gives up what lies after its event."""
    healthy = set()
    for line in diary.read_text().splitlines():
        word, number = line.split()
        if word == "healthy":
            healthy.add(int(number))
        elif word == "back":
            healthy = {s for s in healthy if s < int(number)}
    return max(healthy, default=None)


def check(folder, diary):
    """Opens the folder as a restart would, and looks at everything that is there."""
    keeper = Keeper(folder)
    tags = keeper.steps()
    known = newest_known_healthy(diary)
    newest = keeper.newest_healthy()
    if known is not None:
        assert newest is not None and newest >= known
    if newest is not None:
        restored = keeper.restore(TARGET)
        assert restored.step == newest and restored.notes == ()
        expected = make_state(newest)
        for name, x in expected.items():
            np.testing.assert_array_equal(restored.state[name], x)
    assert all(v.ok for v in verify(folder))
    assert not (folder / "_rollback.json").exists()
    return tags


def test_a_kill_in_a_save_and_in_a_rollback(tmp_path):
    """One folder lives through both, the second turn with more history.

    Each named point is tried in one process by `test_rollback`, and with a real kill by
    the slow tests below; to start a process is what this one costs.
    """
    folder, diary = tmp_path / "run", tmp_path / "diary"
    diary.touch()
    points = ["manifest_written", "batch_made"]
    for seed, point in enumerate(points):
        process = start(folder, diary, seed, point, 3)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, output.decode()[-2000:]
        check(folder, diary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", _points.SAVE + _points.ROLLBACK + _points.FILE + _points.DELETE
)
def test_a_kill_at_every_named_point_at_any_turn(tmp_path, point):
    for times in (1, 2, 5, 11):
        folder, diary = tmp_path / f"run{times}", tmp_path / f"diary{times}"
        diary.touch()
        process = start(folder, diary, times, point, times)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, output.decode()[-2000:]
        check(folder, diary)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 5, 11])
def test_a_kill_before_a_copy_far_away_is_whole(tmp_path, times):
    """The disk is lost with the process: the run goes on from what lies far away."""
    folder, diary = tmp_path / "run", tmp_path / "diary"
    diary.touch()
    process = start(folder, diary, times, _points.REMOTE[0], times)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, output.decode()[-2000:]
    known = newest_known_healthy(diary)
    check(folder, diary)
    keeper = Keeper(tmp_path / "other", remote=f"file://{folder}-far")
    newest = keeper.newest_healthy()
    # The copy that was under way is not there; one before it is, if there was one.
    assert (newest is None) == (times == 1)
    if newest is not None:
        assert newest <= known
        restored = keeper.restore(TARGET)
        for name, x in make_state(newest).items():
            np.testing.assert_array_equal(restored.state[name], x)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_random_moments(tmp_path, seed):
    """Ten lives a folder, each ended at a moment that no rule chose."""
    chance = random.Random(seed)
    folder, diary = tmp_path / "run", tmp_path / "diary"
    diary.touch()
    for life in range(10):
        before = diary.read_text().count("begun")
        process = start(folder, diary, 100 * seed + life)
        deadline = time.monotonic() + 60
        while diary.read_text().count("begun") == before:
            assert process.poll() is None, process.stdout.read().decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 1.0))
        assert process.poll() is None, process.stdout.read().decode()[-2000:]
        process.kill()
        process.communicate()
        check(folder, diary)
