"""Agreement of layers and replicas, and idle signals, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.detectors import IdleState, agree, groups_of, watch_idle

GROUPS = (0, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2)
agree_jit = jax.jit(lambda values: agree(values, GROUPS))
compare = jax.jit(agree, static_argnums=1)
watch_jit = jax.jit(lambda state, values: watch_idle(state, values, steps=3))


def reference(values, groups, threshold=8.0, ratio=4.0, floor=0.1):
    score, apart = np.zeros(len(values)), np.zeros(len(values))
    for group in set(groups):
        at = [
            i
            for i, g in enumerate(groups)
            if g == group and np.isfinite(values[i]) and values[i] > 0
        ]
        if len(at) < 4:
            continue
        x = np.log(np.asarray(values, np.float64)[at])
        away = x - np.median(x)
        apart[at] = away
        score[at] = away / max(1.482602218505602 * np.median(np.abs(away)), floor)
    return score, apart, (np.abs(score) > threshold) & (np.abs(apart) > np.log(ratio))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_agreement_equals_the_loop(seed):
    rng = np.random.default_rng(seed)
    values = np.exp(0.3 * rng.normal(size=12)) * 10.0 ** rng.integers(-3, 3)
    values[rng.integers(12)] *= 10.0 ** rng.integers(-3, 4)
    odd = rng.integers(12)
    values[odd] = rng.choice([values[odd], np.nan, np.inf, 0.0, -1.0])
    values = values.astype(np.float32)
    found = agree_jit(values)
    score, apart, departs = reference(values, GROUPS)
    np.testing.assert_allclose(found.score, score, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.ratio, apart, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.departs, departs)


@given(st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_agreement_does_not_depend_on_unit_or_order(unit, seed):
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(size=12)).astype(np.float32)
    one, other = agree_jit(values), agree_jit(values * np.float32(unit))
    np.testing.assert_allclose(one.score, other.score, rtol=1e-2, atol=1e-2)
    swapped = values.copy()
    swapped[[0, 4]] = swapped[[4, 0]]
    score = np.array(one.score)
    score[[0, 4]] = score[[4, 0]]
    np.testing.assert_allclose(agree_jit(swapped).score, score, rtol=1e-5, atol=1e-5)


def test_the_block_that_departs_is_named():
    names = [f"block_{i}/{part}" for i in range(12) for part in ("attn", "mlp")]
    values = np.ones(24, np.float32)
    values[names.index("block_10/mlp")] = 9.0
    (at,) = np.flatnonzero(compare(values, groups_of(names)).departs)
    assert names[at] == "block_10/mlp"


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_few_replicas_raise_no_false_alarm(replicas):
    values = jnp.asarray([1.0, 50.0, 1.0][:replicas])
    found = compare(values, (0,) * replicas)
    assert not np.any(found.departs) and not np.any(found.score)


def test_nothing_to_compare():
    found = compare(jnp.zeros([0]), ())
    assert found.score.shape == (0,)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, np.nan, np.inf]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_idle_equals_the_loop(values):
    state, zero, still, last = IdleState.empty(1), 0, 0, np.inf
    for x in values:
        if np.isfinite(x):
            zero = zero + 1 if x == 0 else 0
            still = still + 1 if x == last else 0
            last = x
        state, dead, stuck = watch_jit(state, jnp.asarray([x], jnp.float32))
        assert bool(dead[0]) == (zero >= 3)
        assert bool(stuck[0]) == (still >= 3 and zero < 3)
