"""Old checkpoints in new structures: every moment is carried over, or it is said."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as ocp

import stabil
from stabil.checkpoints import Keeper, StructureError
from stabil.checkpoints._matching import match

PARAMS = {"a": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "z": {"w": jnp.ones((2, 3))}}
SCHEDULE = optax.cosine_decay_schedule(0.1, 100)


def whole(text):
    return "^" + re.escape(text) + "$"


def run(tx, steps=3):
    """A state with moments that are all different."""
    params, opt_state = PARAMS, tx.init(PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        for n in range(steps):
            grads = jax.tree.map(lambda p, n=n: p * (n + 1), params)
            updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": opt_state, "key": jax.random.key(7)}


def moments(state):
    (adam,) = [
        s
        for s in jax.tree.leaves(
            state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
        )
        if isinstance(s, optax.ScaleByAdamState)
    ]
    return adam


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


OLD = optax.adamw(SCHEDULE)
CHAINS = {
    "guarded": stabil.guard(OLD),
    "clip before": optax.chain(optax.clip_by_global_norm(1.0), OLD),
    "detector before": optax.chain(stabil.spike_aware(), OLD),
    "guard in a chain": optax.chain(
        optax.clip(1.0), stabil.guard(OLD), optax.scale(1.0)
    ),
    "flattened": optax.chain(
        optax.ema(0.9),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(SCHEDULE),
    ),
}


# Every chain with one writer, every writer with two chains.
CASES = [(name, "v1") for name in CHAINS]
CASES += [(n, w) for n in ("guarded", "flattened") for w in ("v0", "keeper")]


@pytest.mark.parametrize(("name", "writer"), CASES)
def test_a_changed_chain_keeps_its_moments(tmp_path, name, writer):
    old = run(OLD)
    if writer == "v0":
        with v0.CheckpointManager(tmp_path / "old") as manager:
            # The older format has no typed keys.
            plain = {**old, "key": jax.random.key_data(old["key"])}
            manager.save(40, args=v0.args.StandardSave(plain))
    elif writer == "v1":
        with ocp.training.Checkpointer(tmp_path / "old") as checkpointer:
            checkpointer.save(40, old)
    else:
        with Keeper(tmp_path / "old") as keeper:
            keeper.save(40, old)
    tx = CHAINS[name]
    fresh = {
        "params": jax.tree.map(jnp.zeros_like, PARAMS),
        "opt_state": tx.init(PARAMS),
        "key": jax.random.key(0),
    }
    keeper = Keeper(tmp_path / "new")
    adopted = keeper.adopt(tmp_path / "old", fresh)
    assert adopted.step == 40
    assert_equal(adopted.state["params"], old["params"])
    assert_equal(moments(adopted.state), moments(old))
    count = optax.tree.get_all_with_path(adopted.state["opt_state"], "count")
    assert [int(v) for path, v in count if "Schedule" in str(path)] == [3]
    assert adopted.state["key"] == old["key"]
    checked = "checked against its digests"
    unchecked = "saved without digests: its bytes could not be checked"
    assert adopted.notes[0] == (checked if writer == "keeper" else unchecked)
    text = " ".join(adopted.notes)
    assert ("started fresh: opt_state/" in text) == (name not in ("clip before",))
    assert "moved: opt_state/0/" in text and "left behind" not in text
    # The run goes on in the new folder.
    keeper.save(41, adopted.state, force=True)
    keeper.wait()
    assert keeper.steps() == {41: "pending"}


def test_what_the_new_chain_dropped_is_said(tmp_path):
    old = run(stabil.guard(OLD), steps=1)
    with Keeper(tmp_path / "old") as keeper:
        keeper.save(40, old)
    fresh = {**run(OLD, 0), "params": PARAMS}
    adopted = Keeper(tmp_path / "new").adopt(tmp_path / "old" / "40", fresh)
    assert_equal(moments(adopted.state), moments(old))
    (left,) = [n for n in adopted.notes if n.startswith("left behind: ")]
    assert "opt_state/tally/judged_steps" in left and "inner_state" not in left


def test_a_lost_parameter_is_refused(tmp_path):
    with Keeper(tmp_path / "old") as keeper:
        keeper.save(40, {"params": PARAMS, "step": 3})
    fresh = {
        "params": {**PARAMS, "head": {"w": jnp.ones((3, 5))}},
        "step": jnp.int32(0),
        "opt_state": OLD.init(PARAMS),
    }
    keeper = Keeper(tmp_path / "new")
    text = (
        "needed a counterpart in step 40 for params/head/w float32[3, 5]; what is "
        "there "
        "and not used: nothing. To let leaves keep the values that they have in the "
        "state "
        "given, name them: may_start_fresh=['params/head/w', ...]; `*` stands for "
        "anything"
    )
    with pytest.raises(StructureError, match=whole(text)):
        keeper.adopt(tmp_path / "old", fresh)
    adopted = keeper.adopt(
        tmp_path / "old", fresh, may_start_fresh=["params/head/*", "opt_state*"]
    )
    assert adopted.state["step"] == 3 and adopted.state["step"].dtype == jnp.int32


def test_a_train_state_gets_a_guard(tmp_path):
    make = lambda tx: TrainState.create(apply_fn=None, params=PARAMS, tx=tx)  # noqa: E731
    old = make(OLD).replace(step=jnp.int32(40), opt_state=run(OLD)["opt_state"])
    with ocp.training.Checkpointer(tmp_path / "old") as checkpointer:
        checkpointer.save(40, old)
    adopted = Keeper(tmp_path / "new").adopt(tmp_path / "old", make(stabil.guard(OLD)))
    assert int(adopted.state.step) == 40
    assert_equal(moments(adopted.state.opt_state), moments(old.opt_state))


def test_what_could_be_either_is_not_guessed():
    old = {("0", "count"): "i", ("1", "count"): "i"}
    new = {("0", "count"): "i", ("1", "count"): "i", ("2", "count"): "i"}
    assert match(old, new) == {}
    # Another name is another leaf, whatever its shape.
    assert match({("p",): "f", ("step",): "i"}, {("p",): "f", ("seen",): "i"}) == {
        ("p",): ("p",)
    }
    layers = {(str(n), "w"): "f" for n in range(12)}
    assert match(layers, layers) == {p: p for p in layers}


def test_refuses(tmp_path):
    keeper = Keeper(tmp_path / "new")
    text = f"needed a folder to adopt, got {tmp_path / 'gone'}"
    with pytest.raises(FileNotFoundError, match=whole(text)):
        keeper.adopt(tmp_path / "gone", {})
    (tmp_path / "empty").mkdir()
    text = (
        "needed an Orbax checkpoint, a step folder, or a run of them, got "
        f"{tmp_path / 'empty'}, in which no _METADATA was found: name the folder that "
        "holds the step numbers"
    )
    with pytest.raises(FileNotFoundError, match=whole(text)):
        keeper.adopt(tmp_path / "empty", {})
    ocp.save(str(tmp_path / "bare"), {"w": jnp.ones(2)})
    text = (
        f"needed the step of the checkpoint in {tmp_path / 'bare' / 'state'}, got a "
        "path "
        "that names none: write adopt(..., step=...)"
    )
    with pytest.raises(ValueError, match=whole(text)):
        keeper.adopt(tmp_path / "bare", {"w": jnp.zeros(2)})
    adopted = keeper.adopt(tmp_path / "bare", {"w": jnp.zeros(2)}, step=5)
    assert adopted.step == 5 and float(adopted.state["w"][0]) == 1
    keeper.save(6, adopted.state, force=True)
    keeper.wait()
    text = (
        f"needed a keeper without steps to adopt into, got {tmp_path / 'new'} with 1: "
        "name a new folder in Keeper(...)"
    )
    with pytest.raises(ValueError, match=whole(text)):
        keeper.adopt(tmp_path / "bare", {"w": jnp.zeros(2)}, step=5)
