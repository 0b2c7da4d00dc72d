"""A disk that is full or cannot be written, and a clock that goes backwards.

The disk is a small file system in memory, which only root may mount; others skip it.
"""

import errno
import itertools
import os
import re
import subprocess

import jax.numpy as jnp
import pytest

from stabil.checkpoints import KeepAlso, Keeper, SaveFailedError, _files, verify

MEGABYTE = 1 << 20


def mount(*words):
    return subprocess.run(["mount", *map(str, words)], capture_output=True).returncode


@pytest.fixture
def disk(tmp_path):
    """A disk of 6 MB."""
    if os.name != "posix" or mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path):
        pytest.skip("a file system of its own needs the rights of root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def state(step):
    """One megabyte."""
    return {"w": jnp.full(MEGABYTE // 4, step, jnp.float32)}


def fill(disk, leave):
    """A file that leaves so many bytes free."""
    found = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(found.f_bavail * found.f_frsize - leave))


def run_with_steps(disk, steps=(1, 2)):
    keeper = Keeper(disk / "run")
    for step in steps:
        keeper.save(step, state(step), force=True)
        keeper.wait()
        keeper.mark(step, "healthy")
    return keeper


def check(disk):
    """Everything that was healthy is still whole, and restored."""
    assert [v.ok for v in verify(disk / "run")] == [True, True]
    restored = Keeper(disk / "run").restore(state(0))
    assert (restored.step, float(restored.state["w"][5])) == (2, 2.0)


def refused(what, number):
    code = errno.errorcode[number]
    return (
        f"^the {what} was not written: OSError: \\[Errno {number}\\] "
        f"{re.escape(os.strerror(number))}(: '.*')?. Nothing was changed: look at the "
        f"space and the permissions of .*/run, then ask again$"
    ), code


def test_a_full_disk_loses_nothing_and_is_no_end(disk):
    keeper = run_with_steps(disk)
    fill(disk, MEGABYTE // 2)
    for step in (3, 4, 5):
        with pytest.raises(SaveFailedError, match=f"the save of step {step} failed: "):
            keeper.save(step, state(step), force=True)
            keeper.wait()
        # What a failed save leaves would keep the disk full.
        assert not list((disk / "run").glob("*tmp*"))
    check(disk)
    (disk / "filler").unlink()
    assert keeper.save(6, state(6), force=True)
    keeper.wait()
    assert keeper.steps() == {1: "healthy", 2: "healthy", 6: "pending"}
    # Not a byte is left: no tag can be written, and the old one holds.
    fill(disk, 0)
    with pytest.raises(SaveFailedError, match=refused("tag of step 6", 28)[0]):
        keeper.mark(6, "healthy")
    with pytest.raises(SaveFailedError, match=refused("intent to go back", 28)[0]):
        keeper.rollback(state(0), 6)
    assert keeper.steps()[6] == "pending" and not list(
        (disk / "run").rglob(".stabil-tmp*")
    )
    (disk / "filler").unlink()
    assert keeper.mark(6, "healthy") == "healthy"
    assert keeper.rollback(state(0), 6).step == 2
    check(disk)


def test_a_full_disk_still_lets_old_steps_go(disk):
    keeper = run_with_steps(disk)
    log = disk / "run" / "deletions.jsonl"
    fill(disk, 0)
    keeper._folder.delete(disk / "run" / "1", "no more needed")
    assert '"no more needed"' in log.read_text() and keeper.steps() == {2: "healthy"}


def test_a_disk_that_cannot_be_written_can_be_read(disk):
    keeper = run_with_steps(disk)
    assert mount("-o", "remount,ro", disk) == 0
    check(disk)
    with pytest.raises(SaveFailedError, match="the save of step 3 failed: .*Read-only"):
        keeper.save(3, state(3), force=True)
        keeper.wait()
    with pytest.raises(SaveFailedError, match=refused("tag of step 2", 30)[0]):
        keeper.mark(2, "suspect")
    with pytest.raises(SaveFailedError, match=refused("intent to go back", 30)[0]):
        keeper.rollback(state(0), 2)
    assert mount("-o", "remount,rw", disk) == 0
    assert keeper.save(3, state(3), force=True)
    keeper.wait()
    assert keeper.steps() == {1: "healthy", 2: "healthy", 3: "pending"}


def test_a_clock_that_goes_backwards_changes_no_order(tmp_path, monkeypatch):
    hours = itertools.count(23, -1)
    times = lambda: f"2026-01-01T{max(next(hours), 0):02}:00:00Z"  # noqa: E731
    monkeypatch.setattr(_files, "utc_now", times)
    rule = KeepAlso(every_minutes=30)
    keeper = Keeper(tmp_path, keep_last=2, keep_also=rule, save_every_minutes=None)
    for step in range(1, 6):
        keeper.save(step, {"w": jnp.full(3, step)}, force=True)
        keeper.wait()
        keeper.mark(step, "healthy")
    assert list(keeper.steps()) == [1, 3, 4, 5]
    assert keeper.rollback({"w": jnp.zeros(3, jnp.int32)}, 5).step == 4
    keeper.save(5, {"w": jnp.full(3, 50)}, force=True)
    keeper.wait()
    assert Keeper(tmp_path).restore({"w": jnp.zeros(3, jnp.int32)}).step == 4
    assert keeper.steps() == {1: "healthy", 3: "healthy", 4: "healthy", 5: "pending"}
