"""Going back: what is set aside, what a kill leaves, and what stays on disk."""

import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil.checkpoints import (
    Keeper,
    NoHealthyStepError,
    _points,
    _rollback,
)


def small(value=0):
    return {"w": jnp.full(4, value, jnp.float32), "seen": jnp.int32(value)}


TARGET = jax.eval_shape(small)


def fill(keeper, tags, first=0):
    for n, tag in enumerate(tags, 1):
        step = first + 10 * n
        keeper.save(step, small(step), extra={"data": step}, force=True)
        keeper.wait()
        if tag != "pending":
            keeper.mark(step, tag, "test")


def value(restored):
    return int(restored.state["seen"])


class Killed(BaseException):
    pass


def hold_save_until_intent(monkeypatch):
    """Lets a save land only after a rollback has been decided."""
    decided = threading.Event()

    def reached(point):
        if point == "save_begun":
            decided.wait(10)
        if point == "intent_written":
            decided.set()

    monkeypatch.setattr(_points, "reached", reached)


def kill_at(monkeypatch, point, times=1):
    """Raises when a named point is reached for the `times`-th time."""
    turn = itertools.count(1)

    def reached(name):
        if name == point and next(turn) == times:
            raise Killed(point)

    monkeypatch.setattr(_points, "reached", reached)


def test_the_run_goes_on_after_a_rollback(tmp_path):
    keeper = Keeper(tmp_path, save_every=10)
    fill(keeper, ["healthy", "healthy", "suspect", "pending"])
    back = keeper.rollback(TARGET, 35, "loss spike at 35", extra={"skip": [21, 36]})
    assert (back.step, value(back), back.extra, back.notes) == (
        20,
        20,
        {"data": 20},
        (),
    )
    assert keeper.steps() == {10: "healthy", 20: "healthy"}
    assert keeper.tag(30) == keeper.tag(40) == "quarantined"
    # The next interval saves, at a number that was set aside, as a new step.
    assert [s for s in range(21, 42) if keeper.save(s, small(-s))] == [30, 40]
    keeper.wait()
    assert keeper.steps() == {
        10: "healthy",
        20: "healthy",
        30: "pending",
        40: "pending",
    }
    again = Keeper(tmp_path)
    assert value(again.restore(TARGET)) == 20
    again.mark(30, "healthy")
    assert value(again.restore(TARGET)) == -30
    (record,) = again.rollbacks()
    assert (record["target"], record["before"]) == (20, 35)
    assert (record["reason"], record["extra"]) == (
        "loss spike at 35",
        {"skip": [21, 36]},
    )


def test_a_rollback_can_be_repeated_to_an_older_step(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "healthy", "healthy"])
    assert keeper.rollback(TARGET, 31).step == 30
    assert keeper.rollback(TARGET, 30).step == 20
    assert keeper.rollback(TARGET, 20).step == 10
    with pytest.raises(NoHealthyStepError):
        keeper.rollback(TARGET, 10)
    assert keeper.steps() == {10: "healthy"}
    assert [r["target"] for r in keeper.rollbacks()] == [30, 20, 10]


def test_the_same_number_can_be_set_aside_twice(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    for turn in range(3):
        keeper.save(20, small(turn), force=True)
        keeper.rollback(TARGET, 20)
    assert [s for _, s in keeper._folder.quarantined()] == [20, 20, 20]


def test_going_on_from_an_older_step_sets_the_newer_ones_aside(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "healthy", "pending"])
    keeper = Keeper(tmp_path)
    assert keeper.restore(TARGET).step == 20
    assert 30 in keeper.steps()
    keeper.save(25, small(25), force=True)
    keeper.wait()
    assert keeper.steps() == {10: "healthy", 20: "healthy", 25: "pending"}
    assert keeper.tag(30) == "quarantined"
    assert keeper.rollbacks()[0]["reason"] == "saving went on from step 20"


def test_a_save_in_flight_does_not_outlive_the_rollback(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    hold_save_until_intent(monkeypatch)
    keeper.save(20, small(20), force=True)
    assert keeper.rollback(TARGET, 20).step == 10
    assert keeper.steps() == {10: "healthy"} and keeper.tag(20) == "quarantined"


def test_the_target_is_not_deleted_by_the_save_in_flight(tmp_path, monkeypatch):
    """Keeping one healthy step, 10 is due to go when 40 lands; a rollback needs it."""
    keeper = Keeper(tmp_path, keep_last=1)
    fill(keeper, ["healthy", "healthy"])
    hold_save_until_intent(monkeypatch)
    keeper.save(30, small(30), force=True)
    assert keeper.rollback(TARGET, 15).step == 10


@pytest.mark.parametrize(
    ("point", "times"),
    [(p, 1) for p in _points.ROLLBACK] + [("step_set_aside", 2)],
)
def test_a_rollback_cut_short_is_ended_by_the_next_keeper(
    tmp_path, monkeypatch, point, times
):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "healthy", "suspect", "pending"])
    with monkeypatch.context() as patch:
        kill_at(patch, point, times)
        with pytest.raises(Killed):
            keeper.rollback(TARGET, 25, "why", extra={"skip": [3, 4]})
    keeper = Keeper(tmp_path)
    assert keeper.steps() == {10: "healthy", 20: "healthy"}
    assert [s for _, s in keeper._folder.quarantined()] == [30, 40]
    (record,) = keeper.rollbacks()
    assert (record["reason"], record["extra"]) == ("why", {"skip": [3, 4]})
    assert value(keeper.restore(TARGET)) == 20
    assert keeper.save(30, small(30), force=True)
    keeper.wait()
    # Opened once more, nothing is left to do.
    assert list(Keeper(tmp_path).steps()) == [10, 20, 30]
    assert len(keeper.rollbacks()) == 1


@pytest.mark.parametrize("point", _points.SAVE)
def test_a_save_cut_short_leaves_a_whole_step_or_none(tmp_path, monkeypatch, point):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    with monkeypatch.context() as patch:
        kill_at(patch, point)
        keeper.save(20, small(20), force=True)
        # Not the keeper's own wait, which tidies up: a killed process does not.
        keeper._saver._job.wait()
        assert isinstance(keeper._saver._job.error, Killed)
    keeper = Keeper(tmp_path)
    whole = point in ("manifest_written", "retention_done")
    assert keeper.steps() == {10: "healthy"} | ({20: "pending"} if whole else {})
    assert value(keeper.restore(TARGET)) == 10
    keeper.save(20, small(20), force=True)
    keeper.wait()
    assert keeper.steps() == {10: "healthy", 20: "pending"}


def test_an_intent_that_rotted_is_set_aside(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "pending"])
    with monkeypatch.context() as patch:
        kill_at(patch, "intent_written")
        with pytest.raises(Killed):
            keeper.rollback(TARGET, 20)
        path = tmp_path / _rollback.INTENT
        path.write_text(path.read_text().replace('"target": 10', '"target": 0'))
    keeper = Keeper(tmp_path)
    assert keeper.steps() == {10: "healthy", 20: "pending"}
    assert (tmp_path / "_rollback.damaged").exists()


# --- what stays -----------------------------------------------------------------------


def test_an_ill_run_does_not_rotate_its_healthy_steps_out(tmp_path):
    keeper = Keeper(tmp_path, keep_last=3)
    fill(keeper, ["healthy", "healthy"])
    fill(keeper, ["suspect"] * 6, first=20)
    assert keeper.steps() == {
        10: "healthy",
        20: "healthy",
        70: "suspect",
        80: "suspect",
    }
    lines = (tmp_path / "deletions.jsonl").read_text().splitlines()
    gone = [json.loads(line) for line in lines]
    assert [g["path"] for g in gone] == ["30", "40", "50", "60"]
    assert gone[0]["reason"] == "suspect, not among the steps to keep"
    assert keeper.restore(TARGET).step == 20


def test_steps_that_wait_for_their_verdict_stay(tmp_path):
    """Verdicts come two saves late; with the newest two alone, none would survive."""
    keeper = Keeper(tmp_path, keep_last=1)
    for n in range(1, 9):
        keeper.save(n, small(n), force=True)
        keeper.wait()
        if n > 3:
            keeper.mark(n - 3, "healthy")
    assert keeper.newest_healthy() == 5
    assert list(keeper.steps()) == [4, 5, 6, 7, 8] or list(keeper.steps()) == [
        5,
        6,
        7,
        8,
    ]


def test_the_quarantine_has_a_limit(tmp_path):
    keeper = Keeper(tmp_path, keep_quarantined=2)
    fill(keeper, ["healthy"])
    for turn in range(4):
        keeper.save(20 + turn, small(), force=True)
        keeper.rollback(TARGET, 20)
    keeper.save(30, small(), force=True)
    keeper.wait()
    assert [s for _, s in keeper._folder.quarantined()] == [22, 23]
    assert len(keeper.rollbacks()) == 4


# --- memory ---------------------------------------------------------------------------


def test_the_newest_healthy_state_wins_whatever_its_level(tmp_path):
    keeper = Keeper(tmp_path, keep_in_memory=2)
    fill(keeper, ["healthy", "healthy", "pending"])
    for step in (23, 26, 29):
        keeper.snapshot(step, small(step), extra={"data": step})
    keeper.mark(26, "healthy")
    with pytest.raises(ValueError, match="got 23: the steps on disk are 10, 20, 30"):
        keeper.tag(23)
    assert (keeper.tag(26), keeper.tag(29)) == ("healthy", "pending")
    assert keeper.newest_healthy() == 26
    back = keeper.rollback(TARGET, 30)
    assert (back.step, back.source, value(back)) == (26, "memory", 26)
    assert back.extra == {"data": 26}
    assert keeper.steps() == {10: "healthy", 20: "healthy"}
    back = keeper.rollback(TARGET, 26)
    assert (back.step, back.source) == (20, "disk")
    # The ring is gone with the process, the disk is not.
    assert Keeper(tmp_path).newest_healthy() == 20


def test_save_takes_snapshots_at_their_own_cadence_also_after_a_rollback(tmp_path):
    keeper = Keeper(tmp_path, save_every=100, snapshot_every=10)

    def taken(steps):
        return [n for n in steps if keeper.save(n, small(n))]

    assert taken(range(35)) == [0, 10, 20, 30]
    keeper.mark(20, "healthy")
    back = keeper.rollback(TARGET, 30)
    assert (back.step, back.source) == (20, "memory")
    assert not keeper.due(29) and keeper.due(30)
    assert taken(range(20, 45)) == [30, 40]
    keeper.wait()
    assert list(keeper.steps()) == [0]


def memory_of(ring):
    return {s.pieces[0][(0,)].ctypes.data for s in [*ring._kept, *ring._spare]}


def test_snapshots_reuse_their_memory(tmp_path):
    keeper = Keeper(tmp_path, keep_in_memory=2)
    for step in (1, 2):
        keeper.snapshot(step, {"w": jnp.full(1000, step, jnp.float32)})
    slots = memory_of(keeper._ring)
    keeper.mark(1, "healthy")
    keeper.snapshot(3, {"w": jnp.zeros(1000)})
    keeper.mark(2, "healthy")
    keeper._ring.drop_after(2)
    keeper.snapshot(3, {"w": jnp.zeros(1000)})
    assert memory_of(keeper._ring) == slots
    # Another structure gets memory of its own.
    keeper.snapshot(7, {"v": jnp.zeros((2, 3))})
    keeper.mark(7, "healthy")
    assert keeper.restore({"v": np.zeros((2, 3), np.float32)}).source == "memory"


@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_restore_lends_is_written_by_nobody(tmp_path, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("a",))
    by = NamedSharding(mesh, PartitionSpec("a"))
    full = lambda x: jax.device_put(np.full(1000, x, np.float32), by)  # noqa: E731
    keeper = Keeper(tmp_path, keep_in_memory=2)
    keeper.snapshot(1, {"w": full(1)})
    keeper.mark(1, "healthy")
    target = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=by)}
    first = keeper.restore(target).state
    shards = [s.data.unsafe_buffer_pointer() for s in first["w"].addressable_shards]
    pieces = keeper._ring.find(1).pieces[0].values()
    assert shards == [p.ctypes.data for p in pieces], "copied"
    # A step that overwrites the state it is given leaves the snapshot alone.
    step = jax.jit(lambda w: 2 * w, donate_argnums=0)
    second = keeper.restore(target).state
    np.testing.assert_array_equal(step(second["w"]), np.full(1000, 2))
    assert second["w"].is_deleted()
    np.testing.assert_array_equal(keeper.restore(target).state["w"], np.ones(1000))
    # So do the snapshots that push it out of the ring.
    for number in (2, 3, 4, 5):
        keeper.snapshot(number, {"w": full(number)})
    np.testing.assert_array_equal(first["w"], np.ones(1000))


def test_no_ring_keeps_nothing(tmp_path):
    keeper = Keeper(tmp_path, keep_in_memory=0)
    keeper.snapshot(1, small())
    assert keeper.newest_healthy() is None
