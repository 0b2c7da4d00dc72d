"""A second level far away: the newest healthy step wins whatever its level."""

import re
import shutil

import fsspec
import jax
import jax.numpy as jnp
import pytest

from stabil.checkpoints import (
    DamagedError,
    Keeper,
    NotARunFolderError,
    SaveFailedError,
    _points,
    _remote,
    _rollback,
)

TARGET = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


def state(step):
    return {"w": jnp.full(3, step, jnp.float32)}


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A place in memory, and one on a disk that is taken for far away."""
    if request.param == "memory":
        yield f"memory://{tmp_path.name}/run"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        yield f"file://{tmp_path}/far/run"


def fill(keeper, steps, tag="healthy"):
    for step in steps:
        keeper.save(step, state(step), force=True, extra={"at": step})
        keeper.wait()
        keeper.mark(step, tag)
    keeper.wait()
    return keeper


def far(keeper):
    return {c.step: c.tag for c in keeper._mirror._remote.copies()}


def test_a_run_goes_on_where_its_disk_is_lost(tmp_path, url):
    with Keeper(tmp_path / "a", remote=url) as keeper:
        fill(keeper, [1, 2, 3])
        fill(keeper, [4], "suspect")
        assert far(keeper) == {2: "healthy", 3: "healthy"}
    # A verdict may come when all is saved.
    keeper.mark(2, "suspect", "seen later")
    keeper.wait()
    assert far(keeper) == {1: "healthy", 3: "healthy"}
    with Keeper(tmp_path / "b", remote=url) as keeper:
        assert keeper.steps() == {3: "healthy"}
        restored = keeper.restore(TARGET)
        assert (restored.step, restored.extra) == (3, {"at": 3})
        assert float(restored.state["w"][0]) == 3.0
        fill(keeper, [4, 5])
    # The disk that was lost is found again: what is newer comes from afar.
    with Keeper(tmp_path / "a", remote=url) as keeper:
        assert keeper.newest_healthy() == 5
        assert float(keeper.restore(TARGET).state["w"][0]) == 5.0


def test_a_rollback_counts_there_as_well(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url, keep_remote=3), [1, 2, 3])
    assert keeper.rollback(TARGET, 2, "spike").step == 1
    assert far(keeper) == {1: "healthy"}
    # Another disk does not choose what was given up, and the number is free.
    assert Keeper(tmp_path / "b", remote=url).steps() == {1: "healthy"}
    fill(keeper, [2])
    assert far(keeper) == {1: "healthy", 2: "healthy"}
    names = {c.name for c in keeper._mirror._remote.copies()}
    assert {n for n in keeper._mirror._remote._names("") if "-" in n} == names


def test_a_step_that_is_copied_while_a_rollback_begins_is_given_up(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url, keep_remote=3), [1])
    for step in (2, 3):
        keeper.save(step, state(step), force=True)
        keeper._saver.wait()
        keeper._folder.tag(step, "healthy", "calm", "test")
    folder, remote = keeper._folder, keeper._mirror._remote
    _rollback.begin(folder, target=1, before=2, reason="spike")
    remote.push(folder, 3)
    assert far(keeper) == {1: "healthy"}
    _rollback.finish(folder)
    remote.push(folder, 3)
    assert far(keeper) == {1: "healthy"}
    # A record that was cut short is written again.
    (name,) = remote._names(_remote.ROLLBACKS)
    remote._fs.pipe_file(remote._at(_remote.ROLLBACKS, name), b"{")
    remote.push(folder, 3)
    assert remote.read(_remote.ROLLBACKS, name) == {"target": 1}


def test_a_marker_that_leads_elsewhere_is_refused(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url), [1])
    copy = keeper._mirror._remote.healthy()[1]
    copy.marker["files"] = {"../../outside": 3}
    with pytest.raises(DamagedError, match="names ../../outside$"):
        keeper._mirror._remote.pull(keeper._folder, copy)


def test_a_verdict_that_changes_is_told(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url), [1, 2])
    keeper.mark(2, "suspect", "spike")
    keeper.wait()
    assert far(keeper) == {1: "healthy", 2: "suspect"}
    assert Keeper(tmp_path / "b", remote=url).steps() == {1: "healthy"}


def spoil(folder):
    for path in (folder / "state" / "d").iterdir():
        path.write_bytes(bytes(path.stat().st_size))


def test_damage_on_the_disk_is_mended_from_afar(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url), [1, 2])
    spoil(tmp_path / "a" / "2")
    restored = keeper.restore(TARGET)
    assert (restored.step, float(restored.state["w"][0])) == (2, 2.0)
    assert restored.notes[-1] == f"step 2 was taken from {url}"
    assert keeper.steps() == {1: "healthy", 2: "healthy"}
    # A step that has left the disk is still there.
    shutil.rmtree(tmp_path / "a" / "2")
    assert keeper.restore(TARGET).step == 2


def test_a_copy_cut_short_is_none(tmp_path, url, monkeypatch):
    keeper = fill(Keeper(tmp_path / "a", remote=url), [1])

    def stop(point):
        if point == "remote_files_sent":
            raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(_points, "reached", stop)
        text = (
            f"the copy to {url} failed: OSError: the network is gone. What is in "
            f"{tmp_path / 'a'} is whole: go on; the copy is tried again with the next "
            "verdict"
        )
        with pytest.raises(SaveFailedError, match="^" + re.escape(text) + "$"):
            fill(keeper, [2])
    assert far(keeper) == {1: "healthy"}
    fill(keeper, [3])
    assert far(keeper) == {2: "healthy", 3: "healthy"}


def test_damage_there_is_found(tmp_path, url):
    keeper = fill(Keeper(tmp_path / "a", remote=url), [1, 2])
    remote = keeper._mirror._remote
    newest = remote.healthy()[2]
    data = next(n for n in newest.marker["files"] if n.startswith("state/d/"))
    # Other bytes: the digests tell, and the older copy is taken.
    size = newest.marker["files"][data]
    remote._fs.pipe_file(remote._at(newest.name, data), bytes(size))
    restored = Keeper(tmp_path / "b", remote=url).restore(TARGET)
    assert restored.step == 1 and "step 2 was passed over" in restored.notes[0]
    # Fewer bytes, a lost object: not even brought to the disk.
    for spoil_it in (
        lambda path: remote._fs.pipe_file(path, b"short"),
        remote._fs.rm_file,
    ):
        spoil_it(remote._at(newest.name, data))
        shutil.rmtree(tmp_path / "b")
        other = Keeper(tmp_path / "b", remote=url)
        assert other.steps() == {1: "healthy"}
        assert "step 2 was passed over" in other.restore(TARGET).notes[0]
        with pytest.raises(DamagedError, match=f"cut short$|has lost {data}$"):
            remote.pull(other._folder, newest)
    # A torn marker is none.
    remote._fs.pipe_file(remote._at(newest.name, _remote.MARKER), b"{")
    assert far(keeper) == {1: "healthy"}


def test_a_place_of_something_else_is_left_alone(tmp_path, url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/mine.txt", b"mine")
    text = (
        "needed a place that a stabil Keeper made, got one that holds 'mine.txt' at "
        f"{url}: nothing was changed; name a new place"
    )
    with pytest.raises(NotARunFolderError, match="^" + re.escape(text) + "$"):
        Keeper(tmp_path / "a", remote=url)
    assert fs.cat_file(f"{root}/mine.txt") == b"mine"
