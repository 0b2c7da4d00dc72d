"""A destroyed middle layer of the demo's model: repaired, against a restart.

    python -m pytest -n 0 -s -m slow tests/checkpoints/test_repair_demo.py

The last checkpoint is 200 steps old when block 2 is lost. A restart needs these 200
steps to be back at the loss that it had; the repaired model must need no more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stabil.checkpoints import repair_layer
from stabil.cli._demo_data import batch_at, held_out_batches, read_corpus
from stabil.cli._demo_model import Gpt, Size, adamw, cross_entropy

SIZE, STEPS, LOST_AT, LOST_STEPS, EVERY = Size(), 1500, 700, 200, 20
TX = adamw(SIZE, STEPS)
MODEL = Gpt(SIZE)
LAYERS = [f"block_{i}" for i in range(SIZE.layers)]


def loss_of(params, tokens):
    logits = MODEL.apply({"params": params}, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train(params, opt_state, scale, batches):
    """Also the gradient norm of each block in the last step."""

    def step(carry, tokens):
        params, opt_state = carry
        grads = jax.grad(loss_of)(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        updates = jax.tree.map(lambda u, s: u * s, updates, scale)
        norms = jnp.stack([optax.tree.norm(grads[name]) for name in LAYERS])
        return (optax.apply_updates(params, updates), opt_state), norms

    with jax.numpy_dtype_promotion("standard"):
        carry, norms = jax.lax.scan(step, (params, opt_state), batches)
    return *carry, norms[-1]


@jax.jit
def evaluate(params, batches):
    return jnp.mean(jax.lax.map(lambda tokens: loss_of(params, tokens), batches))


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["squared", "norm"])
def test_a_destroyed_block_of_the_demo_costs_no_more_than_a_restart(weighting):
    corpus = read_corpus()
    held_out = jnp.asarray(held_out_batches(corpus, SIZE, 16))
    batches = lambda start: np.stack(  # noqa: E731
        [batch_at(corpus, SIZE, 0, start + n)["tokens"] for n in range(EVERY)]
    )
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, SIZE.context), jnp.int32))
    params = params["params"]
    with jax.numpy_dtype_promotion("standard"):
        opt_state = TX.init(params)
    ones = jax.tree.map(lambda p: jnp.ones([1] * p.ndim), params)
    for start in range(0, LOST_AT, EVERY):
        params, opt_state, norms = train(params, opt_state, ones, batches(start))
    goal = float(evaluate(params, held_out))
    params["block_2"] = jax.tree.map(lambda x: x * jnp.nan, params["block_2"])
    assert np.isnan(evaluate(params, held_out))
    repaired = repair_layer(
        params,
        opt_state,
        layers=LAYERS,
        lost=2,
        grad_norms=np.asarray(norms),
        weighting=weighting,
    )
    at_once = float(evaluate(repaired.params, held_out))
    scale = jax.tree.map(lambda s, one: s * one, repaired.update_scale, ones)
    params, opt_state = repaired.params, repaired.opt_state
    needed, loss = 0, at_once
    while loss > goal and needed < LOST_STEPS:
        params, opt_state, _ = train(
            params, opt_state, scale, batches(LOST_AT + needed)
        )
        needed += EVERY
        loss = float(evaluate(params, held_out))
    print(
        f"\n{weighting}: loss {goal:.3f} before, {at_once:.3f} repaired, {loss:.3f} "
        f"after {needed} steps; a restart needs {LOST_STEPS}"
    )
    assert loss <= goal
