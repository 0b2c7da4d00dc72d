"""The demo's model, guarded and probed through 200 sound steps, against a bare loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.cli import _demo_data, _demo_model


@pytest.mark.slow
def test_two_hundred_sound_steps_are_bit_equal(standard_promotion):
    size = _demo_model.Size()
    corpus = _demo_data.read_corpus()
    model = _demo_model.Gpt(size)
    probed = stabil.probe(model, stats=("finite", "absmax", "rms"), where="**")
    tokens = jnp.zeros([1, size.context], jnp.int32)
    start = jax.jit(model.init)(jax.random.key(0), tokens)["params"]

    def train(tx, apply, **extra):
        @jax.jit
        def step(params, state, tokens):
            def loss_of(params):
                logits, readings = apply({"params": params}, tokens[:, :-1])
                return _demo_model.cross_entropy(logits, tokens[:, 1:]), readings

            (loss, readings), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            seen = dict(loss=loss, readings=readings, **extra) if extra else {}
            updates, state = tx.update(grads, state, params, **seen)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for i in range(200):
            batch = _demo_data.batch_at(corpus, size, 0, i)
            params, state = step(params, state, batch["tokens"])
        return params, state

    adamw = _demo_model.adamw(size, 1000)
    plain = train(adamw, lambda v, x: (model.apply(v, x), None))
    controls = stabil.Controls.untouched()
    params, state = train(stabil.guard(adamw), probed.apply, controls=controls)
    tally = stabil.vitals(state).tally
    assert (int(tally.judged_steps), int(tally.blocked_steps)) == (200, 0)
    assert int(tally.clipped_steps) == 0
    both = (plain, (params, state.inner_state))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(a, b)
