"""The CUSUM of the global scalars against a plain loop, and its promises."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.detectors import DriftState, drift

STEPS = 1500
play = jax.jit(lambda x: jax.lax.scan(drift, DriftState.empty(x.shape[1]), x))


def reference(values):
    """The module docstring as a loop in float64 over one signal."""
    a = s = c = 0.0
    n, out = 0, []
    for t, x in enumerate(values):
        if not np.isfinite(x):
            continue
        a = x if n == 0 else a
        scale = max(1.2533141373155003 * s, 0.01)
        z = np.clip((x - a) / scale, -3, 3)
        armed = n >= 100
        c = max(c + z - 1, 0) if armed else 0.0
        n += 1
        rate = max(1 / n, 1 / 1000)
        held = np.clip(x - a, -3 * scale, 3 * scale) if armed else x - a
        s += rate * (abs(held) - s)
        if c > 100:
            out.append(t)
            a, c = x, 0.0
        else:
            a += rate * held
    return out


def streams(rng):
    x = 0.1 * rng.normal(size=(STEPS, 5))
    x[800:, 1] += np.linspace(0, 2, STEPS - 800)
    x[900:, 2] += 0.4
    x[::7, 3] = np.nan
    x[700:, 3] += 0.3
    x[:, 4] -= np.linspace(0, 3, STEPS)
    return x.astype(np.float32)


def test_equals_the_loop(rng):
    x = streams(rng)
    _, risen = play(x)
    expected = [reference(x[:, i].astype(float)) for i in range(5)]
    assert [np.flatnonzero(r).tolist() for r in risen.T] == expected
    assert [len(e) > 0 for e in expected] == [False, True, True, True, False]


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 3))
@settings(max_examples=20, deadline=None)
def test_noise_of_any_size_is_no_drift(seed, size):
    x = size * np.random.default_rng(seed).standard_t(4, size=(STEPS, 5))
    _, risen = play(x.astype(np.float32))
    assert not np.any(risen)


def test_constants_and_nonfinite_values_change_nothing(rng):
    _, risen = play(np.full((STEPS, 5), 3.0, np.float32))
    assert not np.any(risen)
    x = streams(rng)
    before, _ = play(x)
    bad = np.full((STEPS, 5), np.nan, np.float32)
    after, _ = jax.jit(lambda s, x: jax.lax.scan(drift, s, x))(before, bad)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_told_is_no_drift(rng):
    x = streams(rng)[:, :3]
    told = np.arange(STEPS) == 900

    def step(state, row):
        return drift(state, row[0], row[1])

    _, risen = jax.lax.scan(step, DriftState.empty(3), (jnp.asarray(x), told))
    assert not np.any(risen[:, 2])
