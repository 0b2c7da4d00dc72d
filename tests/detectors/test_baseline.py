"""The robust baseline against a plain NumPy loop, and its promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.detectors import BaselineState, deviate, observe

RULE = dict(threshold=6.0, decay=0.98, warmup_steps=20, max_consecutive_steps=5)
FLOOR, FIRST = 0.05, 0.5


@jax.jit
def play(values):
    """Scores `[steps, S]` and re-learnt rises of a stream `[steps, S]`."""

    def step(state, x):
        d = deviate(state, x, floor=jnp.float32(FLOOR), warmup_steps=20)
        state, risen = observe(state, x, d, first_deviation=jnp.float32(FIRST), **RULE)
        return state, (d.score, risen, state.location)

    return jax.lax.scan(step, BaselineState.empty(values.shape[1]), values)


def reference(values):
    """The module docstring as a loop in float64 over one signal."""
    m = d = 0.0
    prior, n, streak, out = np.inf, 0, 0, []
    for x in values:
        if not np.isfinite(x):
            out.append((0.0, False, m))
            continue
        s = max(1.2533141373155003 * d, FLOOR) * (1 + 4 / max(n, 1))
        gap = x - m
        z = gap / s if n >= RULE["warmup_steps"] else 0.0
        n += 1
        a = max(1 / n, 1 - RULE["decay"])
        side = int(np.sign(gap))
        outlier = abs(z) > RULE["threshold"]
        streak = (streak + side if side == np.sign(streak) else side) * outlier
        old = m
        if n == 1:
            m, d = x, FIRST
        else:
            m += a * np.clip(gap, -3 * s, 3 * s)
            d += a * (min(abs(gap), 3 * s) - d)
        risen = False
        if abs(streak) >= RULE["max_consecutive_steps"]:
            m, streak, risen = x, 0, side > 0
            prior = old if risen else prior
        elif outlier and side < 0 and abs(x - prior) <= 3 * s:
            m, prior, streak = prior, np.inf, 0
        out.append((z, risen, m))
    return np.array(out)


def noisy(rng, steps=400):
    x = 0.15 * rng.normal(size=steps)
    x[100] += 4
    x[130] += 3
    x[200:260] += 2.3
    x[300] = np.nan
    x[330:] -= 5
    return x


def test_equals_the_loop(rng):
    streams = np.stack([noisy(rng) for _ in range(6)], axis=1)
    _, (score, risen, location) = play(jnp.asarray(streams, jnp.float32))
    for i in range(streams.shape[1]):
        expected = reference(streams[:, i].astype(np.float32).astype(np.float64))
        np.testing.assert_allclose(score[:, i], expected[:, 0], rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(risen[:, i], expected[:, 1] != 0)
        np.testing.assert_allclose(location[:, i], expected[:, 2], atol=1e-4)


def test_nonfinite_values_change_nothing(rng):
    x = jnp.asarray(noisy(rng)[:, None], jnp.float32)
    before, _ = play(x)
    after, _ = play(jnp.concatenate([x, jnp.array([[jnp.nan], [jnp.inf], [-jnp.inf]])]))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e6])
def test_constants_never_alarm(value):
    _, (score, risen, _) = play(jnp.full([300, 1], value, jnp.float32))
    assert not np.any(score)
    assert not np.any(risen)


def test_any_finite_past_is_overcome(rng):
    """After any finite stream, a healthy one is normal again within ten steps."""
    past = rng.normal(size=(200, 8)) * 10.0 ** rng.integers(0, 5, size=8)
    healthy = 0.15 * rng.normal(size=(100, 8)) + rng.normal(size=8) * 5
    _, (score, _, _) = play(jnp.asarray(np.concatenate([past, healthy]), jnp.float32))
    assert np.all(np.abs(score[210:]) <= RULE["threshold"])


def test_burst_does_not_hide_what_follows(rng):
    x = 0.15 * rng.normal(size=300)
    x[100:108] += 3
    x[120] += 3
    _, (score, risen, _) = play(jnp.asarray(x[:, None], jnp.float32))
    assert int(risen.sum()) == 1
    assert score[120, 0] > RULE["threshold"]


def test_scores_shift_with_the_level(rng):
    x = noisy(rng)[:, None]
    _, (at_zero, _, _) = play(jnp.asarray(x, jnp.float32))
    _, (shifted, _, _) = play(jnp.asarray(x + 2, jnp.float32))
    np.testing.assert_allclose(at_zero, shifted, rtol=5e-3, atol=5e-3)
