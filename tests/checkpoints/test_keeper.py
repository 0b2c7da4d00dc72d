"""The keeper: what is saved comes back, what is judged is obeyed, errors say enough."""

import json
import re
import shutil
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from public_factories import FACTORIES, build

import stabil
from stabil.checkpoints import (
    DamagedError,
    Keeper,
    NoHealthyStepError,
    NotARunFolderError,
    SaveFailedError,
    StructureError,
    UnreadableError,
    _leaves,
    _manifest,
    _points,
    _store,
    verify,
)


def whole(text):
    return "^" + re.escape(text) + "$"


def bits(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return (
        (type(x).__name__, x) if isinstance(x, (bool, int, float, str)) else bits_of(x)
    )


def bits_of(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert bits(x) == bits(y)


def small(value=0.0):
    return {"w": jnp.full(4, value, jnp.float32), "seen": jnp.int32(value)}


TARGET = jax.eval_shape(small)


def fill(keeper, tags, first=0):
    """Saves one small state a tag, at steps 10, 20, ..."""
    for n, tag in enumerate(tags, 1):
        step = first + 10 * n
        keeper.save(step, small(step), extra={"data": step}, force=True)
        keeper.wait()
        if tag != "pending":
            keeper.mark(step, tag, "test")


# --- what comes back ------------------------------------------------------------------

TX = optax.adamw(1e-2)


@jax.jit
def train(state, steps):
    def body(i, state):
        params, opt_state, key = state
        key, sub = jax.random.split(key)
        grads = jax.tree.map(
            lambda p: p + jax.random.normal(sub, p.shape, p.dtype), params
        )
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    with jax.numpy_dtype_promotion("standard"):
        return jax.lax.fori_loop(0, steps, body, state)


def begin():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    return params, TX.init(params), jax.random.key(3)


def test_a_run_goes_on_bit_for_bit(tmp_path):
    middle = train(begin(), 5)
    with Keeper(tmp_path / "run") as keeper:
        keeper.save(5, middle)
        keeper.wait()
        keeper.mark(5, "healthy")
    restored = Keeper(tmp_path / "run").restore(jax.eval_shape(begin))
    assert restored.step == 5 and restored.notes == () and restored.source == "disk"
    assert_same(restored.state, middle)
    assert_same(train(restored.state, 5), train(begin(), 10))


class Odd(NamedTuple):
    inner: Any
    nothing: Any


def odd_state():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharded = NamedSharding(mesh, PartitionSpec("b", "a"))
    return {
        "tuple": (jnp.ones(2), [jnp.zeros(1)]),
        "named": Odd({"x": jnp.float16(3)}, None),
        "keys": jax.random.split(jax.random.key(1), 3),
        "other_key": jax.random.key(5, impl="rbg"),
        "int": 2**40,
        "float": 0.1,
        "flag": True,
        "text": "cosine",
        "numpy": np.arange(3),
        "numpy_scalar": np.float32(2.5),
        "numpy64": np.arange(3) / 7,
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "no_leaves": {},
        "byte": jnp.arange(5, dtype=jnp.uint8),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
        "complex": jnp.ones(3, jnp.complex64) * 1j,
        "layers": {2: jnp.ones(2), 10: jnp.zeros(2), 1: jnp.full(2, 7.0)},
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharded),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        "slash/key": jnp.ones(1),
    }


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_any_pytree_comes_back(tmp_path, level):
    state = odd_state()
    keeper = Keeper(tmp_path)
    if level == "disk":
        keeper.save(1, state)
        keeper.wait()
    else:
        keeper.snapshot(1, state)
    keeper.mark(1, "healthy")
    restored = keeper.restore(state)
    assert restored.source == level
    expected = {**state, "numpy_scalar": np.array(np.float32(2.5))}
    assert_same(restored.state, expected)
    for key in ("sharded", "keys", "tuple"):
        for a, b in zip(
            jax.tree.leaves(restored.state[key]),
            jax.tree.leaves(state[key]),
            strict=True,
        ):
            assert a.sharding == b.sharding
    assert isinstance(restored.state["numpy64"], np.ndarray)


def test_a_flax_train_state_comes_back(tmp_path):
    model = nn.Dense(3)
    make = lambda: TrainState.create(  # noqa: E731
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), jnp.ones((1, 2)))["params"],
        tx=TX,
    )
    state = make()
    keeper = Keeper(tmp_path)
    # The counter is a Python 0 before the first step, and an array in an eval_shape.
    keeper.save(0, state)
    keeper.wait()
    keeper.mark(0, "healthy")
    restored = keeper.restore(jax.eval_shape(make)).state
    assert int(restored.step) == 0
    assert_same(restored.opt_state, state.opt_state)
    keeper.save(1, state.replace(step=jnp.int32(1)), force=True)
    keeper.wait()
    keeper.mark(1, "healthy")
    assert int(keeper.restore(make()).state.step) == 1


def test_a_state_is_restored_onto_other_devices(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = jax.device_put(
        jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("a"))
    )
    keeper = Keeper(tmp_path)
    keeper.save(1, {"x": x})
    keeper.wait()
    other = NamedSharding(
        Mesh(np.array(jax.devices()[:2]), ("a",)), PartitionSpec(None, "a")
    )
    target = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other)}
    y = keeper.restore(target, step=1).state["x"]
    assert y.sharding == other
    np.testing.assert_array_equal(y, np.arange(64.0).reshape(8, 8))


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_donated_states_are_saved_as_they_were(tmp_path, level):
    @lambda f: jax.jit(f, donate_argnums=0)
    def step(state):
        return {k: v + 1 for k, v in state.items()}

    state = {"x": jnp.zeros(1_000_000), "y": jnp.ones((500, 500))}
    keeper = Keeper(tmp_path, save_every=1, keep_in_memory=4)
    for number in range(1, 5):
        state = step(state)
        if level == "disk":
            assert keeper.save(number, state)
        else:
            keeper.snapshot(number, state)
    for _ in range(20):
        state = step(state)
    keeper.wait()
    for number in range(4, 0, -1):
        keeper.mark(number, "healthy")
        found = keeper.rollback(state, number + 1)
        assert (found.source, found.step) == (level, number)
        np.testing.assert_array_equal(found.state["x"], np.full(1_000_000, number))
        np.testing.assert_array_equal(found.state["y"], np.full((500, 500), number + 1))


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_one_array_in_two_places_comes_back_as_two(tmp_path, level):
    """As a weight average begins; to donate one buffer twice is an error."""
    x = jnp.ones(1000)
    keeper = Keeper(tmp_path)
    keeper.save(1, {"params": x, "average": x})
    keeper.snapshot(2, {"params": x, "average": x})
    keeper.wait()
    keeper.mark(1 if level == "disk" else 2, "healthy")
    restored = keeper.restore({"params": x, "average": x})
    assert restored.source == level
    step = jax.jit(lambda s: {k: v + 1 for k, v in s.items()}, donate_argnums=0)
    np.testing.assert_array_equal(step(restored.state)["average"], np.full(1000, 2))


def test_a_numpy_leaf_may_change_after_the_save(tmp_path):
    x = np.zeros(100_000)
    keeper = Keeper(tmp_path)
    keeper.save(1, {"x": x})
    x += 1
    keeper.wait()
    assert keeper.restore({"x": x}, step=1).state["x"].max() == 0


def test_what_changed_since_the_save_is_said(tmp_path, monkeypatch):
    config = {"optimizer": {"learning_rate": 0.1, "name": "adamw"}, "commit": "1a2b"}
    with Keeper(tmp_path, config=config) as keeper:
        fill(keeper, ["healthy"])
    versions = {**_manifest.versions(), "optax": "0.9.9"}
    monkeypatch.setattr(_manifest, "versions", lambda: versions)
    config = {"optimizer": {"learning_rate": 0.2, "name": "adamw"}, "seed": 3}
    restored = Keeper(tmp_path, config=config).restore(TARGET)
    assert restored.notes == (
        f"version of optax: {optax.__version__} when saved, 0.9.9 now",
        "config commit: 1a2b when saved, absent now",
        "config optimizer/learning_rate: 0.1 when saved, 0.2 now",
        "config seed: absent when saved, 3 now",
    )


@pytest.mark.parametrize("api", ["v1", "v0", "v0 with items"])
def test_plain_orbax_opens_a_step(tmp_path, api):
    fill(Keeper(tmp_path), ["healthy", "pending"])
    target = jax.tree.map(jnp.zeros_like, small())
    if api == "v1":
        with ocp.training.Checkpointer(tmp_path) as checkpointer:
            steps = [c.step for c in checkpointer.checkpoints]
            loaded = checkpointer.load(10, target)
    else:
        names = ("state",) if api == "v0 with items" else None
        with v0.CheckpointManager(tmp_path, item_names=names) as manager:
            steps = list(manager.all_steps())
            restore = v0.args.StandardRestore(target)
            loaded = manager.restore(10, args=v0.args.Composite(state=restore)).state
    assert steps == [10, 20]
    assert_same(loaded, small(10))


# --- when it saves --------------------------------------------------------------------


def test_saves_when_due(tmp_path):
    keeper = Keeper(tmp_path, save_every=4, save_every_minutes=None)
    due = [keeper.due(s) and keeper.save(s, small(s)) for s in range(1, 14)]
    assert [s for s, saved in enumerate(due, 1) if saved] == [1, 4, 8, 12]
    assert not keeper.save(13, small())
    assert (keeper.directory, keeper.save_every) == (tmp_path, 4)
    assert keeper.save(13, small(), force=True)
    keeper.wait()
    assert list(keeper.steps()) == [1, 4, 8, 12, 13]


def test_a_step_is_judged_when_it_lands(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path)
    judged = threading.Event()
    monkeypatch.setattr(
        _points, "reached", lambda p: p == "save_begun" and judged.wait(10)
    )
    keeper.save(10, small())
    assert keeper.tag(10) == "pending"
    assert keeper.mark(10, "healthy") == "pending"
    judged.set()
    keeper.wait()
    assert keeper.steps() == {10: "healthy"}


def test_tags_survive_reopening_with_cause_and_history(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "pending", "healthy"])
    keeper.mark(30, "suspect", "loss spike at 34", by="ladder")
    again = Keeper(tmp_path)
    assert again.steps() == {10: "healthy", 20: "pending", 30: "suspect"}
    assert again.newest_healthy() == 10 and again.newest_healthy(before=10) is None
    health = json.loads((tmp_path / "30" / "stabil-health.json").read_text())
    assert (health["cause"], health["by"]) == ("loss spike at 34", "ladder")
    assert [h["tag"] for h in health["history"]] == ["healthy", "suspect"]


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_a_state_that_is_not_finite_is_never_healthy(tmp_path, level):
    bad = {"a": {"w": jnp.array([1.0, jnp.nan])}, "b": jnp.ones(2), "loss": 1.0}
    keeper = Keeper(tmp_path)
    if level == "disk":
        keeper.save(1, bad)
        keeper.wait()
        assert keeper.tag(1) == "suspect"
    else:
        keeper.snapshot(1, bad)
    assert keeper.mark(1, "healthy") == "suspect"
    assert keeper.newest_healthy() is None
    if level == "disk":
        health = json.loads((tmp_path / "1" / "stabil-health.json").read_text())
        assert health["cause"] == "not finite when saved: a/w"
    keeper.save(2, {**bad, "a": {"w": jnp.ones(2)}, "loss": float("inf")}, force=True)
    keeper.wait()
    assert keeper.tag(2) == "suspect"


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_a_statistic_that_was_not_measured_is_no_fault(tmp_path, level):
    """A guard says NaN for what it has not seen; a NaN moment below it still counts."""
    params = {"w": jnp.ones(3)}
    state = {"opt_state": stabil.guard(optax.adamw(1e-3)).init(params)}
    unmeasured = state["opt_state"].measures.loss
    assert np.isnan(unmeasured)
    keeper = Keeper(tmp_path)

    def put(step, state):
        if level == "memory":
            return keeper.snapshot(step, state)
        keeper.save(step, state, force=True)
        return keeper.wait()

    put(1, state)
    assert keeper.mark(1, "healthy") == "healthy"
    assert_same(keeper.restore(state).state, state)
    ill = jax.tree.map(lambda x: x, state)
    ill["opt_state"] = ill["opt_state"]._replace(
        inner_state=jax.tree.map(
            lambda x: x * jnp.nan if x.shape == (3,) else x,
            state["opt_state"].inner_state,
        )
    )
    put(2, ill)
    assert keeper.mark(2, "healthy") == "suspect"


@pytest.mark.parametrize("name", FACTORIES)
def test_no_first_state_of_a_transformation_looks_ill(name):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    state = build(name, optax.adamw(1e-3)).init(params)
    leaves, values, _ = _leaves.flatten(state)
    counted = _leaves.statistics(state)
    ill = [
        leaf.name
        for leaf, value in zip(leaves, values, strict=True)
        if leaf.path not in counted
        and jnp.issubdtype(value.dtype, jnp.floating)
        and not np.isfinite(value).all()
    ]
    assert ill == []


# --- what it refuses ------------------------------------------------------------------


def test_another_structure_is_refused_by_name(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    target = {
        "w": jax.ShapeDtypeStruct((4,), jnp.bfloat16),
        "mu": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    text = (
        "needed a state with the leaves that step 10 was saved with; not in the "
        "checkpoint: mu float32[4]; only in the checkpoint: seen int32[]; different: w "
        "is "
        "float32[4] on disk and bfloat16[4] asked for. Nothing was cast or left out: "
        "build abstract_state from the model and the optimizer that were saved, for "
        "example with jax.eval_shape"
    )
    with pytest.raises(StructureError, match=whole(text)):
        keeper.restore(target)
    with pytest.raises(StructureError, match=whole(text)):
        keeper.rollback(target, 20)
    assert keeper.steps() == {10: "healthy"} and not (tmp_path / "_quarantine").exists()


def test_a_counter_is_not_cast_to_float(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.save(1, {"n": jnp.int32(16777217)})
    keeper.wait()
    with pytest.raises(StructureError, match="n is int32.* on disk and float32"):
        keeper.restore({"n": jax.ShapeDtypeStruct((), jnp.float32)}, step=1)


def test_long_lists_of_leaves_are_cut(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.save(1, {f"w{i:02}": jnp.zeros(1) for i in range(20)})
    keeper.wait()
    with pytest.raises(StructureError, match=r"w07 float32\[1\] and 12 more\. Nothing"):
        keeper.restore({}, step=1)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    text = (
        "needed a folder that a stabil Keeper made, got one that holds 'notes.txt' at "
        f"{tmp_path}: nothing was changed; name a new or empty folder"
    )
    with pytest.raises(NotARunFolderError, match=whole(text)):
        Keeper(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    text = f"needed a folder, got the file {file}: name another place"
    with pytest.raises(NotARunFolderError, match=whole(text)):
        Keeper(file)
    assert file.read_text() == "mine"
    text = (
        "needed a folder on a local or mounted file system, got 'gs://bucket/run': "
        "name a folder on this machine and write Keeper(folder, "
        "remote='gs://bucket/run'), which brings healthy steps there"
    )
    with pytest.raises(NotARunFolderError, match=whole(text)):
        Keeper("gs://bucket/run")


def test_no_healthy_step(tmp_path):
    keeper = Keeper(tmp_path)
    text = (
        f"needed a healthy step in {tmp_path}, got an empty run: start from scratch "
        "and "
        "call keeper.save"
    )
    with pytest.raises(NoHealthyStepError, match=whole(text)):
        keeper.restore(TARGET)
    fill(keeper, ["pending", "suspect"])
    text = (
        f"needed a healthy step in {tmp_path}, got 10 pending, 20 suspect: judge one "
        "with "
        "keeper.mark(step, 'healthy'), or choose one whatever its tag with "
        "keeper.restore(abstract_state, step=...)"
    )
    with pytest.raises(NoHealthyStepError, match=whole(text)):
        keeper.restore(TARGET)
    assert keeper.restore(TARGET, step=10).extra == {"data": 10}
    text = text.replace("healthy step in", "healthy step before 20 in")
    with pytest.raises(NoHealthyStepError, match=whole(text)):
        keeper.rollback(TARGET, 20)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep_last": 0}, "needed keep_last as a whole number >= 1, got 0"),
        ({"save_every": 2.5}, "needed save_every as a whole number >= 1, got 2.5"),
        ({"save_every": True}, "needed save_every as a whole number >= 1, got True"),
        (
            {"keep_in_memory": -1},
            "needed keep_in_memory as a whole number >= 0, got -1",
        ),
        ({"snapshot_every": 0}, "needed snapshot_every as a whole number >= 1, got 0"),
        (
            {"snapshot_every": 10, "keep_in_memory": 0},
            "needed keep_in_memory as a whole number >= 1, got 0",
        ),
        (
            {"save_every_minutes": 0},
            "needed save_every_minutes > 0, or None to count steps alone, got 0",
        ),
    ],
)
def test_settings_out_of_range(tmp_path, settings, text):
    with pytest.raises(ValueError, match=whole(text)):
        Keeper(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_wrong_arguments(tmp_path):
    keeper = Keeper(tmp_path)
    with pytest.raises(
        ValueError, match=whole("needed step as a whole number >= 0, got -1")
    ):
        keeper.save(-1, small())
    with pytest.raises(
        ValueError, match=whole("needed step as a whole number >= 0, got 1.5")
    ):
        keeper.snapshot(1.5, small())
    text = "needed extra as a JSON-able dict, got: Object of type set is not JSON "
    with pytest.raises(TypeError, match=whole(text + "serializable")):
        keeper.save(1, small(), extra={"seen": {1}})
    text = (
        "needed arrays, PRNG keys, numbers or text in a state, got function at 'f/0': "
        "take "
        "it out of the state, or save it as JSON with save(..., extra={...})"
    )
    with pytest.raises(TypeError, match=whole(text)):
        keeper.save(1, {"f": [len_of]})
    text = (
        "needed leaves with different names, got ('a', 'b') and ('a.b',), which are "
        "one "
        "name on disk: rename a key that holds a dot"
    )
    with pytest.raises(ValueError, match=whole(text)):
        keeper.save(1, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    fill(keeper, ["pending"])
    text = (
        "needed the tag 'healthy' or 'suspect', got 'quarantined': a step is pending "
        "until it is judged, and a rollback quarantines"
    )
    with pytest.raises(ValueError, match=whole(text)):
        keeper.mark(10, "quarantined")
    text = f"needed a step of {tmp_path}, got 11: the steps on disk are 10"
    for call in (
        lambda: keeper.mark(11, "healthy"),
        lambda: keeper.tag(11),
        lambda: keeper.restore(TARGET, step=11),
    ):
        with pytest.raises(ValueError, match=whole(text)):
            call()
    text = (
        "needed a step after 10, where this run stands, got 10: keeper.rollback goes "
        "back "
        "and frees the numbers"
    )
    with pytest.raises(ValueError, match=whole(text)):
        keeper.save(10, small(), force=True)


def len_of(x):
    return len(x)


def test_a_run_is_not_started_over_without_a_word(tmp_path):
    fill(Keeper(tmp_path), ["healthy", "pending"])
    text = (
        f"needed an empty run folder or a restored state, got steps up to 20 in "
        f"{tmp_path} "
        "and no restore: call keeper.restore first, or name a new folder to start from "
        "scratch"
    )
    keeper = Keeper(tmp_path)
    with pytest.raises(ValueError, match=whole(text)):
        keeper.save(0, small())
    assert keeper.steps() == {10: "healthy", 20: "pending"}


# --- what goes wrong ------------------------------------------------------------------


def fail_save(monkeypatch, error):
    def save(path, tree, **settings):
        def wait():
            raise error

        return wait

    monkeypatch.setattr(_store, "save", save)


@pytest.mark.parametrize("call", ["save", "wait", "close", "exit"])
def test_a_failed_save_surfaces_at_the_next_call(tmp_path, monkeypatch, call):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    with monkeypatch.context() as patch:
        fail_save(patch, OSError(28, "No space left on device"))
        keeper.save(20, small(), force=True)
    text = (
        "the save of step 20 failed: OSError: [Errno 28] No space left on device. "
        "Nothing "
        "older was touched and the newest healthy step is 10: look at the space and "
        "the "
        f"permissions of {tmp_path}, then go on; the next save that is due is tried as "
        "usual"
    )
    keeper._saver._job.wait()
    with pytest.raises(SaveFailedError, match=whole(text)):
        if call == "save":
            keeper.save(21, small())
        elif call == "exit":
            with keeper:
                pass
        else:
            getattr(keeper, call)()
    # Told once; the run goes on, and the same number is free.
    assert keeper.save(20, small(20), force=True)
    keeper.wait()
    assert keeper.steps() == {10: "healthy", 20: "pending"}


def test_a_failed_save_is_a_note_for_who_goes_back(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    with monkeypatch.context() as patch:
        fail_save(patch, OSError("gone"))
        keeper.save(20, small(), force=True)
    restored = keeper.rollback(TARGET, 20)
    assert restored.step == 10
    assert restored.notes[0].startswith("the save of step 20 failed: OSError: gone.")


def test_a_vanished_folder_is_told_and_not_made_again(tmp_path):
    keeper = Keeper(tmp_path / "run")
    fill(keeper, ["healthy"])
    shutil.rmtree(tmp_path / "run")
    text = (
        "the save of step 20 failed: FileNotFoundError: the run's folder is gone. "
        "Nothing "
        "older was touched and the newest healthy step is None: look at the space and "
        "the "
        f"permissions of {tmp_path / 'run'}, then go on; the next save that is due is "
        "tried as usual"
    )
    with pytest.raises(SaveFailedError, match=whole(text)):
        keeper.save(20, small(), force=True)
    assert not (tmp_path / "run").exists()


def flip(path, at=0.5):
    """Flips one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 16
    path.write_bytes(bytes(raw))
    return path


def largest(folder):
    return max(
        (p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def random_state(seed):
    return {
        "w": jax.random.normal(jax.random.key(seed), (300, 300)),
        "n": jnp.int32(seed),
    }


@pytest.mark.parametrize("compress", [False, True])
def test_a_flipped_bit_is_found_and_an_older_step_is_taken(tmp_path, compress):
    keeper = Keeper(tmp_path, compress=compress)
    for step in (1, 2):
        keeper.save(step, random_state(step), force=True)
        keeper.wait()
        keeper.mark(step, "healthy")
    data = flip(largest(tmp_path / "2"))
    restored = keeper.restore(jax.eval_shape(random_state, 0))
    assert_same(restored.state, random_state(1))
    found = (
        f"{tmp_path / '2'} holds other bytes than were saved: w; "
        f"{data.relative_to(tmp_path / '2')} has other bytes"
    )
    assert restored.notes == (f"step 2 was passed over: {found}",)
    assert keeper.steps() == {1: "healthy", 2: "suspect"}
    log = [json.loads(x) for x in (tmp_path / "keeper.jsonl").read_text().splitlines()]
    assert {"event": "damage", "step": 2, "cause": found}.items() <= log[-2].items()
    with pytest.raises(DamagedError, match=whole(found)):
        keeper.restore(random_state(0), step=2)
    data = flip(largest(tmp_path / "1")).relative_to(tmp_path / "1")
    text = (
        f"needed a healthy step in {tmp_path} that can be read, got none: step 1 was "
        f"passed over: {tmp_path / '1'} holds other bytes than were saved: w; {data} "
        "has other bytes. Name another step with keeper.restore(abstract_state, "
        "step=...), or start from scratch in a new folder"
    )
    with pytest.raises(DamagedError, match=whole(text)):
        Keeper(tmp_path).restore(random_state(0))


def damage_truncate(step):
    path = largest(step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_remove(step):
    largest(step).unlink()


def damage_swap(step):
    other = step.parent / "1"
    shutil.rmtree(step / "state")
    shutil.copytree(other / "state", step / "state")


def damage_manifest(step):
    flip(step / "stabil-manifest.json")


def damage_lose_manifest(step):
    (step / "stabil-manifest.json").unlink()


def damage_metadata(step):
    (step / "state" / "_METADATA").write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_remove,
        damage_swap,
        damage_manifest,
        damage_lose_manifest,
        damage_metadata,
    ],
)
def test_damage_of_every_kind_falls_back(tmp_path, damage):
    keeper = Keeper(tmp_path)
    for step in (1, 2):
        keeper.save(step, random_state(step), force=True)
        keeper.wait()
        keeper.mark(step, "healthy")
    damage(tmp_path / "2")
    restored = keeper.rollback(random_state(0), 3)
    assert restored.step == 1
    assert restored.notes[0].startswith(f"step 2 was passed over: {tmp_path / '2'}")
    assert_same(restored.state, random_state(1))
    assert keeper.tag(2) == "quarantined"
    assert keeper.save(2, random_state(2), force=True)
    keeper.wait()
    assert keeper.steps() == {1: "healthy", 2: "pending"}


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), RuntimeError("RESOURCE_EXHAUSTED: 16 GiB")]
)
def test_want_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch, error):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "healthy"])

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as m:
        m.setattr(_store.v0.PyTreeCheckpointHandler, "restore", fail)
        text = f"{tmp_path}/20/state cannot be read: {type(error).__name__}: {error}. "
        for again in (keeper.restore, lambda target: keeper.rollback(target, 21)):
            with pytest.raises(UnreadableError, match="^" + re.escape(text)):
                again(TARGET)
        with pytest.raises(UnreadableError):
            list(verify(tmp_path))
        assert keeper.steps() == {10: "healthy", 20: "healthy"}
        # A file that has changed makes it damage after all.
        (tmp_path / "20" / "state" / "_METADATA").write_text("{}")
        with pytest.raises(UnreadableError, match="/10/state cannot be read"):
            keeper.restore(TARGET)
    assert keeper.steps() == {10: "healthy", 20: "suspect"}
    assert keeper.restore(TARGET).step == 10


def test_a_damaged_tag_is_not_taken_for_healthy(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy", "healthy"])
    path = tmp_path / "20" / "stabil-health.json"
    path.write_text(path.read_text().replace('"test"', '"text"'))
    assert keeper.steps() == {10: "healthy", 20: "suspect"}
    path.write_text("")
    assert keeper.newest_healthy() == 10


def test_half_made_folders_are_ignored_and_cleared(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, ["healthy"])
    for name in ("30", "40.orbax-checkpoint-tmp-1", "0040", "50.bak", "_other"):
        (tmp_path / name / "state").mkdir(parents=True)
    keeper = Keeper(tmp_path)
    assert keeper.steps() == {10: "healthy"}
    assert keeper.restore(TARGET).step == 10
    keeper.save(30, small(30), force=True)
    keeper.wait()
    assert keeper.steps() == {10: "healthy", 30: "pending"}
    assert (tmp_path / "50.bak").exists()
    assert not (tmp_path / "40.orbax-checkpoint-tmp-1").exists()


def test_importing_stabil_does_not_import_orbax():
    code = "import sys, stabil; sys.exit('orbax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
