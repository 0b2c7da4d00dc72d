"""Moments are found by meaning in every Optax state, and restart without a kick."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stabil.transforms._find_moments import find_moments
from stabil.transforms._moments import restart_moments

contrib = optax.contrib
PARAMS = {
    "w": jnp.ones([3, 4]),
    "b": jnp.ones([4]),
    "s": jnp.ones([]),
    "deep": {"w": jnp.ones([3, 4])},
}
ADAM = optax.adam(1e-3)
LABELS = {"w": "a", "b": "b", "s": "b", "deep": {"w": "a"}}

# optimizer, arrays of first moments, arrays of second moments
KNOWN = {
    "adam": (ADAM, 4, 4),
    "adamw": (optax.adamw(1e-3), 4, 4),
    "lion": (optax.lion(1e-3), 4, 0),
    "sgd": (optax.sgd(1e-3, momentum=0.9), 4, 0),
    "adafactor": (optax.adafactor(1e-3, momentum=0.9), 4, 12),
    "muon": (contrib.muon(1e-3), 4, 2),
    "rmsprop": (optax.rmsprop(1e-3, centered=True, momentum=0.9), 8, 4),
    "amsgrad": (optax.amsgrad(1e-3), 4, 8),
    "adabelief": (optax.adabelief(1e-3), 4, 4),
    "adan": (optax.adan(1e-3), 8, 4),
    "novograd": (optax.novograd(1e-3), 4, 4),
    "lamb": (optax.lamb(1e-3), 4, 4),
    "sm3": (optax.sm3(1e-3), 4, 0),
    "ademamix": (contrib.ademamix(1e-3), 8, 4),
    "adopt": (contrib.adopt(1e-3), 4, 4),
    "sophia": (contrib.sophia(1e-3), 4, 0),
    "prodigy": (contrib.prodigy(), 4, 0),
    "galore": (contrib.galore(1e-3, rank=2), 4, 2),
    "schedule_free": (contrib.schedule_free_adamw(1e-3), 0, 4),
    "mechanize": (contrib.mechanize(ADAM), 4, 4),
    "sam": (contrib.sam(ADAM, optax.sgd(0.1)), 4, 4),
    "multi_steps": (optax.MultiSteps(ADAM, 2), 4, 4),
    "inject": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 4, 4),
    "partition": (
        optax.partition({"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)}, LABELS),
        4,
        2,
    ),
    "masked": (
        optax.masked(ADAM, {"w": True, "b": False, "s": True, "deep": {"w": False}}),
        2,
        2,
    ),
    "chain": (optax.chain(optax.clip(1.0), ADAM, optax.ema(0.9)), 8, 4),
    "plain_sgd": (optax.sgd(1e-3), 0, 0),
    "adagrad": (optax.adagrad(1e-3), 0, 0),
    "madgrad": (contrib.madgrad(1e-3), 0, 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_optimizer(name):
    tx, first, second = KNOWN[name]
    found = find_moments(jax.eval_shape(tx.init, PARAMS), PARAMS)
    assert (len(found.first), len(found.second)) == (first, second), found
    owners = [m.leaf for m in found.first]
    assert len(set(owners)) == len(owners) or first in {8}


def test_paths_point_at_their_parameter():
    tx = optax.adafactor(1e-3)
    params = {"w": jnp.ones([128, 130]), "b": jnp.ones([4])}
    state = tx.init(params)
    names = ["b", "w"]
    leaves = [
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
    for m in find_moments(state, params).second:
        assert leaves[m.position] == m.path
        assert m.path.split("/")[-1] == names[m.leaf]


def test_a_parameter_called_like_a_moment():
    params = {"mu": {"b": jnp.ones(2)}, "b": jnp.ones(3), "nu": jnp.ones(2)}
    found = find_moments(ADAM.init(params), params)
    assert [(m.path, m.leaf) for m in found.first] == [
        ("0/mu/b", 0),
        ("0/mu/mu/b", 1),
        ("0/mu/nu", 2),
    ]
    assert len(found.second) == 3 and found.unrecognised == ()


def test_a_state_of_flax_nnx():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    found = find_moments(ADAM.init(params), params)
    assert [m.leaf for m in found.first] == [0, 1] == [m.leaf for m in found.second]


def test_records_per_parameter():
    state = {
        "stats": {
            "w": {"momentum": jnp.ones([2, 3]), "statistics": [jnp.eye(2), jnp.eye(3)]}
        }
    }
    found = find_moments(state, {"w": jnp.ones([2, 3])})
    assert [m.path for m in found.first] == ["stats/w/momentum"]


def test_what_is_not_found_is_named_and_can_be_given():
    params = {"w": jnp.ones([2, 3])}
    state = {"slow_average": params, "ema": params, "noise": jnp.ones(3)}
    found = find_moments(state, params)
    assert found == ((), (), ("ema/w", "slow_average/w"))
    found = find_moments(
        state, params, names={"slow_average": "first", "ema": "second"}
    )
    assert [m.path for m in found.first] == ["slow_average/w"]
    assert [m.path for m in found.second] == ["ema/w"]
    flat = optax.flatten(ADAM).init(params)
    assert find_moments(flat, params).unrecognised == ("0/mu", "0/nu")


@pytest.mark.parametrize("name", [k for k, v in KNOWN.items() if v[1] + v[2]])
def test_restart_changes_the_chosen_leaves_only(name):
    tx = KNOWN[name][0]
    state = tx.init(PARAMS)
    state = jax.tree.map(
        lambda x: x + jnp.ones([], x.dtype) if _floating(x) else x, state
    )
    restart = jnp.array([False, True, False, True])  # b, deep/w, s, w
    found = find_moments(state, PARAMS)
    new = jax.jit(restart_moments)(state, PARAMS, restart, jnp.full(4, 0.25))
    moments = {m.position: (m.leaf, 0.0) for m in found.first}
    moments |= {m.position: (m.leaf, 0.25) for m in found.second}
    old_leaves, new_leaves = jax.tree.leaves(state), jax.tree.leaves(new)
    assert jax.tree.structure(state) == jax.tree.structure(new)
    for i, (old, got) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        old, got = jnp.asarray(old), jnp.asarray(got)
        assert old.dtype == got.dtype and old.shape == got.shape
        leaf, level = moments.get(i, (0, None))
        if level is None or not restart[leaf]:
            assert jnp.array_equal(old, got)
            continue
        squared_norm = old.ndim == 0 and leaf != 2
        entries = [4, 12, 1, 12][leaf] if squared_norm else 1
        assert jnp.all(got == level * entries)


def _floating(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


@pytest.mark.bits
def test_idle_restart_is_bit_identical_even_around_nan():
    state = ADAM.init(PARAMS)
    state = jax.tree.map(lambda x: x * jnp.nan if _floating(x) else x, state)
    new = restart_moments(state, PARAMS, jnp.array(False), jnp.array(jnp.nan))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("fill", [jnp.nan, jnp.inf, 0.0, -1.0])
def test_an_unusable_fill_keeps_what_is_finite(fill):
    params = jnp.ones(3)
    state = ADAM.init(params)
    nu = jnp.array([2.0, jnp.nan, jnp.inf])
    state = (state[0]._replace(nu=nu, mu=nu), *state[1:])
    new = restart_moments(state, params, jnp.array(True), jnp.array(fill))
    assert new[0].nu.tolist() == [2.0, 0.0, 0.0]
    assert new[0].mu.tolist() == [0.0, 0.0, 0.0]


def test_odd_leaves():
    params = {
        "bf16": jnp.ones(3, jnp.bfloat16),
        "complex": jnp.ones(2, jnp.complex64),
        "empty": jnp.ones([0, 3]),
        "integer": jnp.ones(2, jnp.int32),
        "frozen": np.zeros(2, jax.dtypes.float0),
        "nothing": None,
        "masked": optax.MaskedNode(),
    }
    measured = {k: params[k] for k in ("bf16", "complex", "empty")}
    state = optax.scale_by_adam().init(measured)
    state = restart_moments(state, params, jnp.array(True), jnp.array(2.0))
    assert state.nu["bf16"].dtype == jnp.bfloat16
    assert state.nu["bf16"].tolist() == [2.0, 2.0, 2.0]
    assert state.nu["complex"].tolist() == [2.0, 2.0]
    assert state.nu["empty"].shape == (0, 3)


def test_vmap_and_scan():
    params = {"w": jnp.ones([5, 2])}
    restart = jnp.array([True, False, True, False, True])

    def one(params, restart):
        state = ADAM.init(params)
        state = (state[0]._replace(mu={"w": jnp.ones(2)}), *state[1:])
        step = lambda s, r: (restart_moments(s, params, r, jnp.array(1.0)), r)  # noqa: E731
        return jax.lax.scan(step, state, restart[None])[0]

    mu = jax.vmap(one)(params, restart)[0].mu["w"]
    assert jnp.array_equal(mu[:, 0], jnp.where(restart, 0.0, 1.0))


def test_the_kick_of_zeroed_moments_and_its_cure(rng):
    """RMS of Adam's update after a restart, over its steady value; b2 = 0.999."""
    steps, size = 1200, 2000
    grads = jnp.asarray(rng.standard_normal([steps, size]), jnp.float32)
    tx = optax.scale_by_adam()

    @jax.jit
    def run(zeroed):
        def step(state, inputs):
            t, g = inputs
            due = t == 1000
            warm = restart_moments(state, g, due, jnp.ones([]))
            zero = jax.tree.map(jnp.zeros_like, state)._replace(count=state.count)
            cold = jax.tree.map(lambda a, b: jnp.where(due, a, b), zero, state)
            state = jax.tree.map(lambda a, b: jnp.where(zeroed, a, b), cold, warm)
            with jax.numpy_dtype_promotion("standard"):
                update, state = tx.update(g, state)
            return state, jnp.sqrt(jnp.mean(jnp.square(update)))

        return jax.lax.scan(step, tx.init(grads[0]), (jnp.arange(steps), grads))[1]

    cold, warm = run(True), run(False)
    steady = jnp.mean(cold[900:1000])
    assert cold[1000] / steady > 10  # measured 13.5
    assert jnp.max(warm[1000:]) / steady < 1.1
