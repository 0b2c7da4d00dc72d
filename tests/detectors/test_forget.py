"""Announced changes start a warm-up and raise no alarm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stabil
from stabil.detectors import LossState, forget, judge_loss


def test_announced_shift_is_no_event_and_an_unannounced_one_is(rng):
    losses = np.concatenate([np.full(300, 2.1), np.full(300, 2.9)])
    losses = (losses * np.exp(0.01 * rng.normal(size=600))).astype(np.float32)

    @jax.jit
    def run(change):
        def step(state, row):
            i, loss = row
            state = forget(state, i == change)
            state, found = judge_loss(state, loss, jnp.float32(0))
            return state, found.severity

        rows = (jnp.arange(600), jnp.asarray(losses))
        return jax.lax.scan(step, LossState.empty(), rows)[1]

    assert not np.any(run(300))
    unannounced = np.flatnonzero(run(-1) >= 2)
    assert unannounced[0] <= 303 and np.all(np.diff(unannounced) == 1)


def test_only_what_was_learnt_is_forgotten():
    tx = stabil.guard(optax.sgd(0.1, momentum=0.9))
    empty = tx.init({"w": jnp.ones(3)})
    full = jax.tree.map(lambda x: jnp.full_like(x, 1), empty)
    fresh = forget(full)
    learnt = [(s.judge_state[:3], s.clip_state.baseline) for s in (fresh, empty)]
    kept = [
        (s.inner_state, s.tally, s.clip_state.threshold_norm) for s in (fresh, full)
    ]
    for pair in (learnt, kept, (forget(full, jnp.bool_(False)), full)):
        jax.tree.map(np.testing.assert_array_equal, *pair)
