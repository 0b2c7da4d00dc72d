"""A run's folder without its model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil import checkpoints
from stabil.checkpoints import (
    DamagedError,
    Keeper,
    NoHealthyStepError,
    NotARunFolderError,
    diff,
    mark,
    rollback,
)


def whole(text):
    return "^" + re.escape(text) + "$"


def state(seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (64, 64)), "b": np.ones(3)}
    mesh = Mesh(np.array(jax.devices()), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init({"w": params["w"]}),
        "key": jax.random.key(seed),
        "epoch": seed,
        "done": False,
        "empty": jnp.zeros((0, 2)),
        "sharded": jax.device_put(jnp.arange(16.0), sharding),
        "layers": {7: {"text/with/slash": jnp.ones(2, jnp.bfloat16)}},
    }


def make(path, tags):
    keeper = Keeper(path)
    for n, tag in enumerate(tags, 1):
        keeper.save(10 * n, state(n), force=True)
        keeper.wait()
        if tag != "pending":
            keeper.mark(10 * n, tag, f"cause {n}", by="test")
    return keeper


def test_lists_every_step(tmp_path):
    keeper = make(tmp_path, ["healthy", "suspect", "pending"])
    keeper.rollback(state(0), 30, "spike")
    listed = checkpoints.list_steps(tmp_path)
    assert [(s.step, s.tag, s.cause, s.by) for s in listed] == [
        (10, "healthy", "cause 1", "test"),
        (20, "quarantined", "spike", "rollback"),
        (30, "quarantined", "spike", "rollback"),
    ]
    assert all(s.size > 10_000 and s.saved.endswith("Z") for s in listed)
    assert all((tmp_path / s.path).is_dir() for s in listed)


def test_verifies_without_the_model(tmp_path):
    make(tmp_path, ["healthy", "healthy", "pending"])
    found = list(checkpoints.verify(tmp_path))
    assert [(v.step, v.ok, v.tag) for v in found] == [
        (30, True, "pending"),
        (20, True, "healthy"),
        (10, True, "healthy"),
    ]
    assert found[0].leaves == 11
    data = max((tmp_path / "20").rglob("*"), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(bytes(raw))
    (tmp_path / "30" / "state" / "_METADATA").unlink()
    bad = {v.step: v for v in checkpoints.verify(tmp_path)}
    assert [bad[s].ok for s in (10, 20, 30)] == [True, False, False]
    assert bad[20].tag == bad[30].tag == "suspect"
    assert bad[20].problem == (
        f"{tmp_path / '20'} has changed: {data.relative_to(tmp_path / '20')} has other "
        "bytes"
    )
    assert bad[30].problem == (
        f"{tmp_path / '30'} has changed: state/_METADATA is gone"
    )
    (only,) = checkpoints.verify(tmp_path, 10)
    assert only.step == 10


def test_judges_and_goes_back(tmp_path):
    make(tmp_path, ["pending", "pending", "pending"])
    text = (
        f"needed a healthy step before 30 in {tmp_path}, got none: judge one first "
        "with "
        "stabil.checkpoints.mark"
    )
    with pytest.raises(NoHealthyStepError, match=whole(text)):
        checkpoints.rollback(tmp_path, 30)
    assert checkpoints.mark(tmp_path, 10, "healthy", "by eye", by="me") == "healthy"
    record = checkpoints.rollback(tmp_path, 30, "spike")
    assert (record["target"], record["before"], record["reason"]) == (10, 30, "spike")
    assert Keeper(tmp_path).steps() == {10: "healthy"}


def test_refuses(tmp_path):
    (tmp_path / "empty").mkdir()
    text = (
        f"needed a folder that a stabil Keeper made, got none at {tmp_path / 'empty'}: "
        "nothing was changed; name a new or empty folder"
    )
    for call in (checkpoints.list_steps, checkpoints.verify):
        with pytest.raises(NotARunFolderError, match=whole(text)):
            call(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    make(tmp_path / "run", ["pending"])
    text = f"needed a step of {tmp_path / 'run'}, got 11: the steps on disk are 10"
    with pytest.raises(ValueError, match=whole(text)):
        checkpoints.mark(tmp_path / "run", 11, "healthy")
    with pytest.raises(ValueError, match=whole(text)):
        checkpoints.verify(tmp_path / "run", 11)
    text = (
        "needed the tag 'healthy' or 'suspect', got 'good': a step is pending until it "
        "is "
        "judged, and a rollback quarantines"
    )
    with pytest.raises(ValueError, match=whole(text)):
        checkpoints.mark(tmp_path / "run", 10, "good")


def test_diff_says_what_changed_and_by_how_much(tmp_path):
    old = {
        "w": jnp.asarray([3.0, 4.0]),
        "h": jnp.ones(3, jnp.bfloat16),
        "gone": jnp.ones(2),
        "shape": jnp.ones(2),
        "key": jax.random.key(0),
        "n": 1,
        "name": "a",
        "zero": jnp.zeros(2),
        "same": jnp.ones(2),
    }
    new = old | {
        "w": jnp.asarray([3.0, 4.5]),
        "h": jnp.asarray([1, jnp.inf, 1], jnp.bfloat16),
        "shape": jnp.ones(3),
        "key": jax.random.key(1),
        "n": 3,
        "name": "b",
        "zero": jnp.asarray([0.0, 2.0]),
        "new": jnp.ones(1),
    }
    del new["gone"]
    for step, state in ((1, old), (2, new)):
        with Keeper(tmp_path, config={"lr": step, "same": 0}) as keeper:
            if step == 2:
                keeper.restore(old, step=1)
            keeper.save(step, state, extra={"data": {"at": step}}, force=True)
    found = diff(tmp_path, 1, 2)
    leaves = {x.name: x for x in found.leaves}
    assert set(leaves) == {*old, "new"} - {"same"} and found.same == 1
    assert leaves["w"][1:] == ("float32[2]", "float32[2]", 1, 2, 0.5, 0.1, 0)
    assert (leaves["h"].entries, leaves["h"].largest, leaves["h"].nonfinite) == (
        1,
        np.inf,
        1,
    )
    assert leaves["gone"].after == "" and leaves["new"].before == ""
    assert leaves["shape"].after == "float32[3]" and np.isnan(leaves["shape"].largest)
    assert leaves["key"].entries > 0
    assert (leaves["n"].largest, leaves["n"].relative) == (2.0, 2.0)
    assert leaves["name"].entries == 1 and np.isnan(leaves["name"].largest)
    assert leaves["zero"].relative == np.inf
    assert found.metadata == (
        "tag: pending in step 1, suspect in step 2",
        "config lr: 1 in step 1, 2 in step 2",
        "extra data/at: 1 in step 1, 2 in step 2",
    )
    # What a rollback set aside can still be compared; damage is no difference.
    mark(tmp_path, 1, "healthy")
    rollback(tmp_path, 2)
    assert diff(tmp_path, 1, 2).leaves == found.leaves
    for data in (tmp_path / "1" / "state" / "d").iterdir():
        data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(DamagedError):
        diff(tmp_path, 1, 2)
