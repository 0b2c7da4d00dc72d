"""Siblings, dead layers and devices that depart, against plain NumPy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.detectors import (
    ReplicaState,
    SiblingState,
    compare,
    compare_replicas,
    groups_of,
)

NAMES = [f"block_{i}/{part}" for i in range(6) for part in ("attn", "mlp")] + ["head"]
GROUPS = groups_of(NAMES)
STEPS = 400


@jax.jit
def play(levels, noise=0.05):
    """Departed `[steps, S]` of a stream of levels `[steps, S]`, on the logarithm."""

    def step(state, given):
        level, noise = given
        no = jnp.zeros(len(NAMES), bool)
        none = jnp.zeros_like(level)
        return compare(state, level, none, noise, no, jnp.exp(level), ~no, GROUPS)

    given = levels, jnp.broadcast_to(noise, levels.shape)
    return jax.lax.scan(step, SiblingState.empty(len(NAMES)), given)[1]


def reference(levels, noise):
    """The module docstring as loops in float64: signals that begin, that are away."""
    steps, size = levels.shape
    habit, followed, apart = np.zeros(size), np.zeros(size, int), np.zeros(size, int)
    begins, away = np.zeros((steps, size), bool), np.zeros((steps, size), bool)
    for t in range(steps):
        known = np.isfinite(levels[t])
        settled = known & (followed >= 20)
        drift = np.where(settled, levels[t] - habit, np.nan)
        departs, usual = np.zeros(size, bool), noise[t].copy()
        for group in set(GROUPS):
            at = [i for i, g in enumerate(GROUPS) if g == group and known[i]]
            if len(at) >= 4:
                usual[at] = np.median(noise[t, at])
            at = [i for i in at if settled[i]]
            if len(at) < 4:
                continue
            r = drift[at] - np.median(drift[at])
            s = max(1.482602218505602 * np.median(np.abs(r)), 0.1)
            departs[at] = (np.abs(r) > np.log(4)) & (np.abs(r) / s > 8)
        for i in np.flatnonzero(known):
            followed[i] += 1
            begins[t, i] = departs[i] and apart[i] == 0
            apart[i] = apart[i] + 1 if departs[i] else 0
            if apart[i] >= 50:
                away[t, i], apart[i], habit[i] = True, 0, levels[t, i]
            elif not departs[i]:
                rate = max(1 / followed[i], 1 / 2000, min(usual[i], 1) ** 2 / 20)
                habit[i] += rate * (levels[t, i] - habit[i])
    return begins, away


def healthy(rng, steps=STEPS):
    """Siblings with sizes of their own, which all fall together."""
    own = rng.normal(size=len(NAMES))
    fall = -np.linspace(0, 2, steps)[:, None]
    return own + fall + 0.05 * rng.normal(size=(steps, len(NAMES)))


def test_equals_the_loop(rng):
    levels = healthy(rng)
    levels[150:170, 4] += 3  # away and back
    levels[200:, 9] += np.linspace(0, 5, STEPS - 200)  # goes away for good
    levels[260:, 3] -= 3
    levels[300:310] = np.nan
    noise = 0.1 * np.exp(rng.normal(size=levels.shape))
    noise[100:130] *= 20
    levels, noise = levels.astype(np.float32), noise.astype(np.float32)
    found = play(levels, noise)
    begins, away = reference(levels.astype(float), noise.astype(float))
    np.testing.assert_array_equal(found.alone, begins)
    np.testing.assert_array_equal(found.away, away)
    assert begins.any(axis=0).nonzero()[0].tolist() == [3, 4, 9]
    assert away.sum(axis=0)[[3, 4, 9]].tolist() == [1, 0, 1 + away[:, 9].sum() - 1]


@given(st.integers(0, 2**32 - 1), st.floats(-10, 10))
@settings(max_examples=20, deadline=None)
def test_siblings_of_different_size_that_change_together_are_left_alone(seed, shift):
    levels = healthy(np.random.default_rng(seed))
    levels[200:] += shift
    found = play(levels.astype(np.float32))
    assert not np.any(found.alone) and not np.any(found.away)


def test_after_a_wild_time_a_group_has_no_habit(rng):
    levels = healthy(rng)
    # What the level, and the noise, have of the wild time is forgotten in 50 steps.
    left = np.exp(-np.maximum(np.arange(STEPS) - 150, 0) / 50)
    levels[:, 4] += 3 * left
    noise = np.full(levels.shape, 2.0) * left[:, None]
    levels, noise = levels.astype(np.float32), noise.astype(np.float32)
    assert np.any(play(levels).away) and not np.any(play(levels, noise).alone)


@given(st.permutations(range(6)))
@settings(max_examples=10, deadline=None)
def test_order_of_the_layers_is_indifferent(order):
    levels = healthy(np.random.default_rng(3))
    levels[150:, 5] += 4
    blocks = [2 * b + part for b in order for part in (0, 1)] + [12]
    one, other = (play(x.astype(np.float32)) for x in (levels, levels[:, blocks]))
    np.testing.assert_array_equal(one.alone[:, blocks], other.alone)
    np.testing.assert_array_equal(one.away[:, blocks], other.away)


def test_a_layer_that_dies_is_told_once_and_one_that_never_lived_apart():
    @functools.partial(jax.jit, static_argnums=1)
    def run(values, groups):
        def step(state, value):
            nothing = jnp.full(2, jnp.nan)
            no = jnp.zeros(2, bool)
            alive = jnp.array([True, False])
            return compare(state, *[nothing] * 3, no, value, alive, groups)

        return jax.lax.scan(step, SiblingState.empty(2), values)[1]

    values = np.ones((200, 2), np.float32)
    values[:, 1] = 0.0
    values[60:, 0] = 0.0
    values[80, 0] = np.nan  # says nothing, and ends nothing
    found = run(values, (0, 0))
    assert np.flatnonzero(found.died[:, 0]).tolist() == [110]
    assert np.flatnonzero(found.silent[:, 1]).tolist() == [49]
    assert not np.any(found.died[:, 1]) and not np.any(found.silent[:, 0])


@functools.partial(jax.jit, static_argnums=1)
def watch(values, devices):
    """Outsider `[steps]` of magnitudes `[steps, devices, rows]`."""

    def step(state, shards):
        ill = ~jnp.isfinite(shards)
        return compare_replicas(state, shards, ill)

    return jax.lax.scan(step, ReplicaState.empty(values.shape[2]), values)[1]


def shards(rng, devices, steps=120):
    return np.exp(0.1 * rng.normal(size=(steps, devices, 3))).astype(np.float32)


def test_the_device_that_departs_is_named_once_after_twenty_steps(rng):
    values = shards(rng, 8)
    values[50, 2] *= 9  # one odd batch
    values[70:, 5, 1] *= 9
    found = watch(values, 8)
    assert np.flatnonzero(found.lasting).tolist() == [89]
    assert int(found.device[89]) == 5
    assert np.all(np.delete(np.asarray(found.device), 89) == -1)


def test_devices_that_differ_from_the_start_are_left_alone(rng):
    values = shards(rng, 8)
    values[:, 3] *= 20
    assert np.all(watch(values, 8).device == -1)


def test_a_device_that_alone_is_not_finite_is_named_at_once(rng):
    values = shards(rng, 4)
    values[60, 1, 2] = np.nan
    values[80] = np.nan
    found = watch(values, 4)
    assert np.flatnonzero(found.nonfinite).tolist() == [60]
    assert int(found.device[60]) == 1 and not np.any(found.lasting)


@pytest.mark.parametrize("devices", [0, 1, 2, 3])
def test_of_few_devices_nothing_is_said(rng, devices):
    values = shards(rng, devices)
    values[70:, :1] *= 100
    found = watch(values, devices)
    assert np.all(found.device == -1) and not np.any(found.lasting)
