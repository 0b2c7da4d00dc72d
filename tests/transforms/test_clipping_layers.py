"""Stacked layers, left-out leaves, norms measured elsewhere, and idle steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stabil import _tree
from stabil.transforms import (
    adagc,
    adaptive_gradient_clip,
    autoclip,
    clip_by_global_norm,
    clip_update_norm,
    clip_update_rms,
    clippy,
    skip_nonfinite,
    skip_spikes,
    zclip,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, STEPS = 3, 6


def layered_rules(**paths):
    """Every rule that tells tensors apart, set so that most steps are clipped."""
    return {
        "adagc": adagc(warmup_steps=1, **paths),
        "adaptive_gradient_clip": adaptive_gradient_clip(0.5, **paths),
        "autoclip": autoclip(window=4, percentile=50.0, scope="tensor", **paths),
        "clip_update_rms": clip_update_rms(0.5, **paths),
        "clippy": clippy(**paths),
    }


def play(rules, params, grads, chosen=lambda t: {}):
    """All rules over all steps in one program: updates and states, stacked."""

    @jax.jit
    def run(params, grads):
        states = {k: tx.init(params) for k, tx in rules.items()}

        def step(states, g):
            out = {
                k: tx.update(g, states[k], params, **chosen(g))
                for k, tx in rules.items()
            }
            return {k: s for k, (_, s) in out.items()}, out

        return jax.lax.scan(step, states, grads)[1]

    return run(params, grads)


def example(rng):
    shapes = {"blocks": (LAYERS, 4, 2), "head": (4, 2)}
    params = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    size = np.exp(rng.normal(size=(STEPS, LAYERS, 1, 1)))
    grads = {
        "blocks": jnp.asarray(
            size * rng.normal(size=(STEPS, *shapes["blocks"])), jnp.float32
        ),
        "head": jnp.asarray(rng.normal(size=(STEPS, *shapes["head"])), jnp.float32),
    }
    return params, grads


def test_a_stacked_leaf_is_as_many_tensors_as_layers(rng):
    params, grads = example(rng)

    def apart(tree, axis):
        layers = {
            f"block_{i}": jnp.take(tree["blocks"], i, axis=axis) for i in range(LAYERS)
        }
        return {**layers, "head": tree["head"]}

    stacked = play(layered_rules(stacked="blocks*"), params, grads)
    single = play(layered_rules(), apart(params, 0), apart(grads, 1))
    for name, (updates, state) in stacked.items():
        assert int(state.clipped_steps[-1]) > 0, name
        wanted, _ = single[name]
        for key, value in apart(updates, 1).items():
            np.testing.assert_allclose(value, wanted[key], rtol=1e-5, err_msg=name)
        # One factor for the whole stack would be another method.
        scaled = np.linalg.norm(updates["blocks"], axis=(2, 3))
        scaled /= np.linalg.norm(grads["blocks"], axis=(2, 3))
        assert np.ptp(scaled, axis=1).max() > 0.1, name


def test_a_left_out_leaf_is_neither_measured_nor_scaled(rng):
    params, grads = example(rng)
    grads["head"] *= 1e3
    rules = layered_rules(exclude="head", stacked=lambda name: name == "blocks")
    only = play(
        layered_rules(stacked="blocks"),
        {"blocks": params["blocks"]},
        {"blocks": grads["blocks"]},
    )
    for name, (updates, _) in play(rules, params, grads).items():
        np.testing.assert_array_equal(updates["head"], grads["head"], err_msg=name)
        wanted = only[name][0]["blocks"]
        np.testing.assert_allclose(updates["blocks"], wanted, rtol=1e-5, err_msg=name)


def test_norms_measured_elsewhere_give_the_same_result(rng):
    params, grads = example(rng)
    rules = {
        "adagc": adagc(warmup_steps=1),
        "autoclip": autoclip(window=4, percentile=50.0),
        "clip_by_global_norm": clip_by_global_norm(1.0),
        "zclip": zclip(warmup_steps=2, max_norm=1.0),
    }
    given = play(
        rules, params, grads, lambda g: {"norms": jnp.sqrt(_tree.sums_of_squares(g))}
    )
    own = play(rules, params, grads)
    for a, b in zip(*map(jax.tree.leaves, (given, own)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    # They are read; but not when their length is that of another tree.
    tx = clip_by_global_norm(1.0)
    step = jax.jit(lambda g, n: tx.update(g, tx.init(g), norms=n)[1].norm)
    assert step(params, jnp.array([3.0, 4.0])) == 5.0
    assert step(params, jnp.array([3.0, 4.0, 12.0])) == step(params, None)


IDLE = {
    "adagc": lambda tx: optax.chain(adagc(lambda_rel=100.0, lambda_abs=1e6), tx),
    "agc": lambda tx: optax.chain(adaptive_gradient_clip(1e3), tx),
    "autoclip": lambda tx: optax.chain(autoclip(percentile=100.0), tx),
    "clip_by_global_norm": lambda tx: optax.chain(clip_by_global_norm(1e6), tx),
    "clip_update_norm": lambda tx: optax.chain(tx, clip_update_norm()),
    "clip_update_rms": lambda tx: optax.chain(tx, clip_update_rms(1e3)),
    "clippy": lambda tx: optax.chain(tx, clippy(lambda_abs=1e3)),
    "skip_nonfinite": skip_nonfinite,
    "skip_spikes": skip_spikes,
    "zclip": lambda tx: optax.chain(zclip(), tx),
}


@pytest.mark.bits
def test_an_idle_rule_leaves_the_training_bit_identical(rng):
    """Ten steps of AdamW, compiled with and without each rule."""
    params = {"w": jnp.asarray(rng.normal(size=(17, 13)), jnp.float32)}
    x = jnp.asarray(rng.normal(size=(32, 17)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(32, 13)), jnp.float32)

    def train(tx):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
            updates, state = tx.update(grads, state, params, loss=jnp.float32(1))
            return (optax.apply_updates(params, updates), state), None

        run = lambda p: jax.lax.scan(step, (p, tx.init(p)), None, 10)[0][0]  # noqa: E731
        return jax.jit(run)(params)["w"]

    inner = optax.adamw(1e-2, weight_decay=0.1)
    wanted = train(optax.with_extra_args_support(inner))
    for name, around in IDLE.items():
        np.testing.assert_array_equal(train(around(inner)), wanted, err_msg=name)


def test_masked_and_partitioned_trees_are_clipped_by_group(rng):
    params, grads = example(rng)
    rules = {
        name: optax.multi_transform(
            {"rule": tx, "none": optax.set_to_zero()},
            {"blocks": "rule", "head": "none"},
        )
        for name, tx in layered_rules().items()
    }
    only = play(
        layered_rules(), {"blocks": params["blocks"]}, {"blocks": grads["blocks"]}
    )
    for name, (updates, _) in play(rules, params, grads).items():
        assert not np.any(updates["head"])
        wanted = only[name][0]["blocks"]
        np.testing.assert_allclose(updates["blocks"], wanted, rtol=1e-5, err_msg=name)
