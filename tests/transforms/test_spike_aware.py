"""The link before any optimizer: what it clips, what it zeroes, what it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stabil


def warm(tx, rng, steps=60):
    state = tx.init(jnp.ones(8))
    update = jax.jit(tx.update)
    for _ in range(steps):
        g = rng.normal(size=8)
        g *= 0.5 * np.exp(0.1 * rng.normal()) / np.linalg.norm(g)
        g = jnp.asarray(g, jnp.float32)
        updates, state = update(g, state)
        np.testing.assert_array_equal(updates, g)
    return update, state


def test_spike_is_bounded_in_its_direction(rng):
    update, before = warm(stabil.spike_aware(), rng)
    g = 100 * jnp.arange(1.0, 9.0)
    updates, state = update(g, before)
    limit = np.linalg.norm(updates)
    assert 0.5 < limit < 1.5
    np.testing.assert_allclose(updates, g * limit / np.linalg.norm(g), rtol=1e-5)
    np.testing.assert_allclose(state.clip_factor, limit / np.linalg.norm(g), rtol=1e-5)
    level = np.exp(before.baseline.location[0])
    np.testing.assert_allclose(state.threshold_norm, 4 * level, rtol=1e-5)


@pytest.mark.parametrize("least, clipped", [(4.0, False), (2.5, True)])
def test_norm_of_few_times_its_level_is_told_and_not_touched(rng, least, clipped):
    update, state = warm(stabil.spike_aware(least_ratio=least), rng)
    g = jnp.zeros(8).at[0].set(3 * jnp.exp(state.baseline.location[0]))
    updates, state = update(g, state)
    assert stabil.vitals(state).causes == ("gradient_spike",)
    assert bool(jnp.any(updates != g)) == clipped == (state.clip_factor < 1)
    assert int(stabil.vitals(state).tally.clipped_steps) == clipped


def test_finite_gradient_beyond_the_square_root_of_float32_is_clipped(rng):
    update, state = warm(stabil.spike_aware(), rng)
    g = jnp.zeros(8).at[0].set(1e30).at[1].set(1.0)
    updates, state = update(g, state)
    assert 0.1 < updates[0] / state.threshold_norm <= 1
    assert stabil.vitals(state, params=g).causes == ("norm_overflow",)
    tx = stabil.spike_aware()
    updates, _ = tx.update(g, tx.init(g))
    assert 0.1 < updates[0] <= 1


def test_constant_limit_holds_from_the_first_step():
    tx = stabil.spike_aware(max_norm=1.0)
    updates, _ = tx.update(jnp.full(4, 5.0), tx.init(jnp.ones(4)))
    np.testing.assert_allclose(updates, 0.5, rtol=1e-6)


def test_zero_gradient_is_no_event(rng):
    update, state = warm(stabil.spike_aware(), rng)
    updates, new = update(jnp.zeros(8), state)
    assert not np.any(updates)
    assert stabil.vitals(new).causes == ()
    np.testing.assert_array_equal(new.baseline.location, state.baseline.location)


def test_known_norms_save_a_pass():
    tx = stabil.spike_aware(max_norm=1.0)
    updates, state = tx.update(
        jnp.ones(4), tx.init(jnp.ones(4)), norms=jnp.array([4.0])
    )
    np.testing.assert_allclose(updates, 0.25)
    assert float(state.measures.grad_norm) == 4.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norm_is_taken_in_float32(dtype):
    tx = stabil.spike_aware()
    g = jnp.full([3, 3], 100, dtype)
    _, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(state.measures.grad_norm, 300, rtol=1e-6)


def test_complex_gradients_are_scaled_too():
    tx = stabil.spike_aware(max_norm=1.0)
    g = jnp.array([3 + 4j, 0], jnp.complex64)
    updates, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, g / 5, rtol=1e-6)
