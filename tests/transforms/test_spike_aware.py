"""The link before any optimizer: what it clips, what it zeroes, what it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.vocabulary import Cause, Severity, Verdict


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


def verdict(severity=Severity.OK, cause=0):
    clear = Verdict.clear()
    return clear._replace(severity=jnp.int32(severity), flags=jnp.int32(cause))


WARNED = verdict(Severity.WARN, Cause.LOSS_SPIKE)


def of_norm(size):
    return jnp.zeros(8).at[3].set(size)


ALARMS = {
    "WARN of the loss": (Severity.WARN, Cause.LOSS_SPIKE, 1.0, True),
    "WARN of the norm": (Severity.WARN, Cause.LEVEL_SHIFT, 50.0, False),
    "loss and norm": (Severity.WATCH, Cause.LOSS_SPIKE, 50.0, True),
    "loss alone": (Severity.WATCH, Cause.LOSS_SPIKE, 1.0, False),
    "norm alone": (Severity.WATCH, Cause.GRADIENT_SPIKE, 50.0, False),
}


@pytest.mark.parametrize("alarm", ALARMS)
def test_after_an_alarm_the_norm_is_held_down(rng, alarm):
    severity, cause, times, holds = ALARMS[alarm]
    tx = stabil.spike_aware(hold_steps=3)
    _, state = warm(tx, rng)
    level = float(jnp.exp(state.baseline.location[0]))
    _, state = tx.update(
        of_norm(times * level), state, verdict=verdict(severity, cause)
    )
    assert int(state.held_steps) == 2 * holds
    np.testing.assert_allclose(state.held_norm, level, rtol=0.02)
    for step, times in enumerate((1.5, 0.8, 1.5)):
        before, g = state, of_norm(times * level)
        updates, state = tx.update(g, before, verdict=verdict())
        if holds and step == 0:
            limit = 1.1 * before.held_norm
            np.testing.assert_allclose(jnp.max(updates), limit, rtol=1e-5)
            np.testing.assert_allclose(state.threshold_norm, limit, rtol=1e-5)
        else:
            np.testing.assert_array_equal(updates, g)
    assert int(state.held_steps) == 0


def test_held_norm_falls_with_the_norms_and_rises_slowly(rng):
    tx = stabil.spike_aware(hold_steps=1000)
    _, state = warm(tx, rng)
    level = float(jnp.exp(state.baseline.location[0]))
    _, state = tx.update(of_norm(level), state, verdict=WARNED)

    @jax.jit
    def run(state, size):
        def step(state, _):
            g = of_norm(size)
            updates, state = tx.update(g, state, verdict=verdict())
            return state, jnp.max(updates)

        return jax.lax.scan(step, state, None, length=100)

    low, passed = run(state, 0.2 * level)
    np.testing.assert_allclose(passed, 0.2 * level, rtol=1e-6)
    np.testing.assert_allclose(low.held_norm, 0.2 * level, rtol=0.05)
    _, passed = run(low, 5 * level)
    expected = 1.1 * low.held_norm * 1.005 ** np.arange(100)
    np.testing.assert_allclose(passed, expected, rtol=1e-3)


def test_alarm_in_the_warm_up_holds_as_soon_as_there_is_a_level(rng):
    tx = stabil.spike_aware(warmup_steps=20)
    state = tx.init(jnp.ones(8))
    for step in range(21):
        said = WARNED if step == 5 else verdict()
        updates, state = tx.update(of_norm(0.5), state, verdict=said)
        np.testing.assert_array_equal(updates, of_norm(0.5))
        assert not np.isnan(state.held_norm)
    np.testing.assert_allclose(state.held_norm, 0.5, rtol=1e-5)
    updates, _ = tx.update(of_norm(1.0), state, verdict=verdict())
    np.testing.assert_allclose(jnp.max(updates), 0.55, rtol=1e-5)


def test_hold_of_no_steps_is_none(rng):
    tx = stabil.spike_aware(hold_steps=0)
    _, state = warm(tx, rng)
    g = of_norm(2 * jnp.exp(state.baseline.location[0]))
    updates, _ = tx.update(g, state, verdict=WARNED)
    np.testing.assert_array_equal(updates, g)


def test_bad_batches_under_a_guard_hold_the_norm_and_quiet_ones_do_not(rng):
    tx = stabil.guard(optax.sgd(1.0), clip=stabil.spike_aware(hold_steps=50))

    @jax.jit
    def run(state, norms, losses):
        def step(state, row):
            _, state = tx.update(of_norm(row[0]), state, loss=row[1])
            return state, (state.clip_state.held_steps, state.measures.clip_factor)

        return jax.lax.scan(step, state, (norms, losses))[1]

    norms = jnp.asarray(0.5 * np.exp(0.1 * rng.normal(size=150)), jnp.float32)
    losses = jnp.asarray(2 + 0.02 * rng.normal(size=150), jnp.float32)
    state = tx.init(jnp.ones(8))
    held, factors = run(state, norms, losses)
    assert not np.any(held)
    np.testing.assert_array_equal(factors, 1)
    held, factors = run(state, norms.at[60:62].set(9), losses.at[60:62].set(3))
    assert not np.any(held[:60]) and np.all(held[60:110]) and not np.any(held[115:])
    np.testing.assert_allclose(factors[60:62], 0.55 / 9, rtol=0.2)
    clipped = np.mean(factors[62:110] < 1)
    assert 0.2 < clipped < 0.8 and np.all(factors[62:110] > 0.6)
    np.testing.assert_array_equal(factors[115:], 1)
