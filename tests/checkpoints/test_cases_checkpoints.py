"""Reports of users on checkpoints and several hosts: classes G and H of the cases.

G1: saves are skipped without a word after a rollback (google/orbax #527, #2657).
G2 and G3, the best loses the newest, NaN ranks best: `test_retention.py`.
G4: healthy steps rotate out of an ill run (kyutai-labs/pocket-tts #262):
`test_rollback.py`.
G5: a save fails in the background, or a kill cuts it short (google/orbax #605):
`test_keeper.py`, `test_kills.py`, and here the truncated files.
G6: the optimizer chain has changed (google/orbax #487, #1904): `test_adopting.py`.
G7: a smaller model loads part of a larger one (google/orbax #2972); the cast of a
counter: `test_keeper.py`.
G8: whole numbers for keys become text (google/orbax #2561).
G9: the same data, the same spike again (marin-community/levanter #391):
`tests/session/test_session.py`.
G10: the old state was donated (jax-ml/jax #9675): `test_keeper.py`, and here a ring.
H1: one process decides alone (NVIDIA-NeMo/Automodel #2468):
`tests/session/test_two_processes.py`, `test_two_keepers.py`.
H2: faults by unsynchronised chance (facebookresearch/metaseq #521):
`tests/testing/test_inject_places.py`.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from public_factories import FACTORIES, build

from stabil.checkpoints import Keeper, StructureError


def small(value=0.0):
    return {"w": jnp.full(3, value, jnp.float32)}


def fill(keeper, steps):
    for step in steps:
        keeper.save(step, small(step), force=True)
        keeper.wait()
        keeper.mark(step, "healthy")


def test_g1_saves_go_on_below_the_newest_number(tmp_path):
    keeper = Keeper(tmp_path, save_every=50)
    fill(keeper, [100, 200, 300])
    assert keeper.rollback(small(), 101).step == 100
    assert keeper.save(150, small(-1)) and keeper.save(300, small(-2))
    keeper.wait()
    assert keeper.steps() == {100: "healthy", 150: "pending", 300: "pending"}
    keeper.mark(300, "healthy")
    assert keeper.restore(small()).state["w"].tolist() == [-2, -2, -2]


def test_g5_every_file_of_the_newest_step_is_cut(tmp_path):
    keeper = Keeper(tmp_path)
    fill(keeper, [1, 2])
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    restored = keeper.restore(small())
    assert restored.step == 1 and keeper.tag(2) == "suspect"


@pytest.mark.parametrize(("saved", "wanted"), [(16, 12), (12, 16)])
def test_g7_no_part_of_another_model_is_loaded(tmp_path, saved, wanted):
    def model(layers):
        return {f"layer_{n}": {"w": jnp.ones(2)} for n in range(layers)}

    keeper = Keeper(tmp_path)
    keeper.save(1, model(saved))
    keeper.wait()
    keeper.mark(1, "healthy")
    with pytest.raises(StructureError, match=r"layer_12/w float32\[2\].*layer_15/w"):
        keeper.restore(model(wanted))
    assert keeper.tag(1) == "healthy"


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_g8_whole_numbers_for_keys_come_back_as_numbers(tmp_path, level):
    state = {n: jnp.full(2, n, jnp.float32) for n in (2, 10, 1)}
    keeper = Keeper(tmp_path)
    if level == "disk":
        keeper.save(1, state)
        keeper.wait()
    else:
        keeper.snapshot(1, state)
    keeper.mark(1, "healthy")
    back = keeper.restore(jax.eval_shape(lambda: state)).state
    assert {n: x.tolist() for n, x in back.items()} == {n: [n, n] for n in (2, 10, 1)}


@pytest.mark.parametrize("name", FACTORIES)
def test_g8_no_state_of_ours_has_numbers_for_keys(name):
    params = {"block_0": {"w": jnp.ones((4, 4))}, "head": {"b": jnp.ones(4)}}
    state = jax.eval_shape(build(name, optax.sgd(0.1)).init, params)
    keys = [
        key for path, _ in jax.tree_util.tree_leaves_with_path(state) for key in path
    ]
    named = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
    assert all(isinstance(key, str) for key in named)


def test_g10_a_ring_outlives_the_states_that_a_step_donates(tmp_path):
    """Parameters and their average begin as one array; the ring has copies of both."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    keeper = Keeper(tmp_path, keep_in_memory=2)
    params = jnp.zeros(4)
    state = {"params": params, "average": params}
    keeper.snapshot(0, state)
    keeper.mark(0, "healthy")
    state = step({"params": jnp.zeros(4), "average": jnp.zeros(4)})
    keeper.snapshot(1, state)
    keeper.mark(1, "healthy")
    state = step(state)
    for target in (1, 0):
        back = keeper.rollback(state, target + 1)
        assert back.source == "memory" and back.step == target
        # The two are arrays of their own, which a step may donate.
        again = step(back.state)
        assert {x: again[x].tolist() for x in again} == {
            "params": [target + 1.0] * 4,
            "average": [target + 1.0] * 4,
        }
