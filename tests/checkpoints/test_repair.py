"""Layers rebuilt from their neighbours: the published numbers, and a whole run."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.checkpoints import merge_neighbours, repair_layer

VECTORS = json.loads(
    (pathlib.Path(__file__).parents[1] / "vectors" / "checkfree_merge.json").read_text()
)
NAMES = {
    "norm": "weights_norm",
    "squared": "weights_norm_squared",
    "code": "released_code",
}


def whole(text):
    return "^" + re.escape(text) + "$"


@pytest.mark.parametrize("weighting", NAMES)
@pytest.mark.parametrize("case", VECTORS["cases"])
def test_merges_as_published(weighting, case):
    before, after = (np.float32(VECTORS[k]) for k in ("W_prev", "W_next"))
    norms = case["grad_norm_prev"], case["grad_norm_next"]
    merged = merge_neighbours(before, after, *norms, weighting=weighting)
    expected = case[NAMES[weighting]]
    if expected is None:  # 0 / 0 in print; here the plain mean
        expected = (before + after) / 2
    np.testing.assert_allclose(merged, expected, rtol=2e-6, atol=1e-6)


def separate(dtype=jnp.float32):
    return {
        "embed": jnp.ones((4, 3)),
        **{
            f"block_{n}": {"w": jnp.full((3, 3), n + 1.0).astype(dtype)}
            for n in range(4)
        },
    }


def stacked():
    return {
        "embed": jnp.ones((4, 3)),
        "blocks": {"w": jnp.stack([jnp.full((3, 3), n + 1.0) for n in range(4)])},
    }


def trained(params, tx):
    opt_state = tx.init(params)
    grads = jax.tree.map(lambda x: -x, params)
    return jax.jit(tx.update)(grads, opt_state, params)[1]


@pytest.mark.parametrize("layout", ["separate", "stacked"])
@pytest.mark.parametrize("tx", [optax.adamw(1e-3), stabil.guard(optax.adamw(1e-3))])
def test_parameters_and_moments_of_the_layer_alone_change(layout, tx):
    params = separate() if layout == "separate" else stacked()
    layers = [f"block_{n}" for n in range(4)] if layout == "separate" else "blocks"
    with jax.numpy_dtype_promotion("standard"):
        opt_state = trained(params, tx)
    ill = jax.tree.map(lambda x: x, params)
    if layout == "separate":
        ill["block_2"] = {"w": jnp.full((3, 3), jnp.nan)}
    else:
        ill["blocks"] = {"w": params["blocks"]["w"].at[2].set(jnp.nan)}
    repaired = repair_layer(
        ill, opt_state, layers=layers, lost=2, grad_norms=[9, 1, 9, 3], weighting="norm"
    )
    pick = lambda tree: (  # noqa: E731
        jnp.stack([tree[f"block_{n}"]["w"] for n in range(4)])
        if layout == "separate"
        else tree["blocks"]["w"]
    )
    # A quarter of layer 1, which holds 2, and three of layer 3, which holds 4.
    np.testing.assert_allclose(pick(repaired.params)[2], np.full((3, 3), 3.5))
    kept = [0, 1, 3]
    np.testing.assert_array_equal(pick(repaired.params)[kept,], pick(params)[kept,])
    (mu, *_), (nu, *_) = (
        [v for _, v in optax.tree.get_all_with_path(t, name)]
        for t, name in ((repaired.opt_state, "mu"), (repaired.opt_state, "nu"))
    )
    (old_mu, *_), (old_nu, *_) = (
        [v for _, v in optax.tree.get_all_with_path(opt_state, name)]
        for name in ("mu", "nu")
    )
    assert not pick(mu)[2].any()
    expected = 0.25 * pick(old_nu)[1] + 0.75 * pick(old_nu)[3]
    np.testing.assert_allclose(pick(nu)[2], expected, rtol=1e-6)
    for new, old in ((mu, old_mu), (nu, old_nu)):
        np.testing.assert_array_equal(pick(new)[kept,], pick(old)[kept,])
        np.testing.assert_array_equal(new["embed"], old["embed"])
    scale = repaired.update_scale
    raised = pick(jax.tree.map(lambda s, p: s * jnp.ones_like(p), scale, params))
    np.testing.assert_allclose(raised[:, 0, 0], [1, 1, 1.1, 1])
    assert float(scale["embed"]) == 1
    assert jax.tree.structure(repaired.opt_state) == jax.tree.structure(opt_state)


@pytest.mark.parametrize(("lost", "neighbour"), [(0, 1), (3, 2)])
def test_an_end_becomes_a_copy_of_its_neighbour(lost, neighbour):
    repaired = repair_layer(
        stacked(), (), layers="blocks", lost=lost, grad_norms=[1, 2, 3, 4]
    )
    w = repaired.params["blocks"]["w"]
    np.testing.assert_allclose(w[lost], w[neighbour], rtol=1e-6)


def test_the_dtype_stays():
    layers = [f"block_{n}" for n in range(4)]
    params = separate(jnp.bfloat16)
    repaired = repair_layer(params, (), layers=layers, lost=1, grad_norms=[1, 1, 1, 1])
    assert repaired.params["block_1"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(repaired.params["block_1"]["w"], np.full((3, 3), 2.0))


def test_refuses():
    settings = dict(layers="blocks", lost=1, grad_norms=[1, 1, 1, 1])
    cases = [
        (
            {"lost": 4},
            "needed lost in [0, 4) and 4 gradient norms, got lost=4 and 4 norms",
        ),
        (
            {"grad_norms": [1, 1]},
            "needed lost in [0, 4) and 4 gradient norms, got lost=1 and 2 norms",
        ),
        (
            {"weighting": "cubed"},
            "needed weighting as one of squared, norm, code, got 'cubed'",
        ),
        (
            {"grad_norms": [float("nan"), 1, 1, 1]},
            "needed finite gradient norms >= 0, got nan and 1.0: take those of the "
            "last "
            "healthy step",
        ),
        (
            {"layers": "block"},
            "needed a layer's path in the parameters, got 'block'; the first levels "
            "are "
            "blocks, embed",
        ),
        (
            {"layers": ["blocks"], "lost": 0, "grad_norms": [1]},
            "needed at least two layers, got one: it has no neighbour",
        ),
    ]
    for change, text in cases:
        with pytest.raises(ValueError, match=whole(text)):
            repair_layer(stacked(), (), **{**settings, **change})
    ill = stacked()
    ill["blocks"]["w"] = ill["blocks"]["w"].at[1:3].set(jnp.nan)
    text = (
        "needed finite neighbours of layer 1, got layer 2 with NaN or infinite "
        "entries: "
        "restore a checkpoint"
    )
    with pytest.raises(ValueError, match=whole(text)):
        repair_layer(ill, (), **settings)


# --- in a run -------------------------------------------------------------------------

LAYERS, WIDTH, SAVED, LOST_AT = 6, 32, 600, 800
TX = optax.adam(3e-3)


def forward(params, x):
    def layer(h, w):
        return h + 0.3 * jnp.tanh(h @ w["in"]) @ w["out"], None

    h, _ = jax.lax.scan(layer, x @ params["first"], params["blocks"])
    return h @ params["last"]


def loss_of(params, step):
    key = jax.random.fold_in(jax.random.key(1), step)
    x = jax.random.normal(key, (64, 8))
    y = jnp.sin(2 * x[:, :4]) + x[:, 4:] * x[:, :4]
    return jnp.mean(jnp.square(forward(params, x) - y))


@jax.jit
def train(params, opt_state, scale, start, stop):
    """Also the gradient norm of each block in the last step."""

    def body(step, carry):
        params, opt_state, _ = carry
        grads = jax.grad(loss_of)(params, step)
        updates, opt_state = TX.update(grads, opt_state)
        updates = jax.tree.map(lambda u, s: u * s, updates, scale)
        squares = jax.tree.map(
            lambda g: jnp.sum(jnp.square(g), axis=(1, 2)), grads["blocks"]
        )
        norms = jnp.sqrt(squares["in"] + squares["out"])
        return optax.apply_updates(params, updates), opt_state, norms

    with jax.numpy_dtype_promotion("standard"):
        return jax.lax.fori_loop(
            start, stop, body, (params, opt_state, jnp.zeros(LAYERS))
        )


@jax.jit
def evaluate(params):
    """Mean loss of batches that no training step sees."""
    return jnp.mean(jax.vmap(lambda n: loss_of(params, 1_000_000 + n))(jnp.arange(8)))


def first_params():
    key = jax.random.split(jax.random.key(0), 4)
    init = jax.nn.initializers.lecun_normal()
    return {
        "first": init(key[0], (8, WIDTH)),
        "last": init(key[1], (WIDTH, 4)),
        "blocks": {
            "in": init(key[2], (LAYERS, WIDTH, WIDTH)),
            "out": init(key[3], (LAYERS, WIDTH, WIDTH)),
        },
    }


@pytest.mark.slow
def test_a_destroyed_layer_costs_less_than_a_restart():
    """The last save is 200 steps old: a restart needs 200 steps to be back."""
    params = first_params()
    ones = jax.tree.map(lambda x: jnp.ones([1] * x.ndim), params)
    params, opt_state, norms = train(params, TX.init(params), ones, 0, LOST_AT)
    ill = jax.tree.map(lambda x: x, params)
    ill["blocks"] = jax.tree.map(lambda x: x.at[2].set(jnp.nan), params["blocks"])
    assert np.isnan(evaluate(ill))
    repaired = repair_layer(
        ill, opt_state, layers="blocks", lost=2, grad_norms=np.asarray(norms)
    )
    scale = jax.tree.map(
        lambda s, p: s * jnp.ones([1] * p.ndim), repaired.update_scale, params
    )
    end = LOST_AT + (LOST_AT - SAVED)
    after, _, _ = train(repaired.params, repaired.opt_state, scale, LOST_AT, end)
    assert evaluate(after) <= evaluate(params)
