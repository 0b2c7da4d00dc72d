"""Stable-SPAM and its parts: the formulas, the cured faults, stacked layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_spam import play

from stabil.transforms import (
    gradient_stabilizer,
    scale_by_adaclip,
    scale_by_adafn,
    scale_by_stable_spam,
    stable_spam,
)


def by_hand(grads, period=15, b1=0.9, b2=0.999, eps=1e-8, warmup=4):
    """The cured method as a loop over steps, float64."""
    m = v = np.zeros_like(grads[0])
    top = a = b = 0.0
    age, resets, out = -1, 0, []
    for t, g in enumerate(grads, 1):
        x = np.abs(g).max()
        top = 0.999 * top + 0.001 * x
        level = top / (1 - 0.999**t)
        g = np.where(np.abs(g) > level, g / x * level, g)
        n = np.linalg.norm(g)
        a, b = 0.7 * a + 0.3 * n, 0.9 * b + 0.1 * n * n
        g = g / n * (a / (1 - 0.7**t)) / (np.sqrt(b / (1 - 0.9**t)) + eps)
        age += 1
        if t % period == 0:
            m, v, age, resets = m * 0, v * 0, 0, resets + 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        k = age + 1
        s = 1.0
        if resets and age < warmup:
            s = 1 - 0.99 * (1 + np.cos(np.pi * age / (warmup + 1))) / 2
        out.append(s * m / (1 - b1**k) / (np.sqrt(v / (1 - b2**k)) + eps))
    return np.array(out)


def test_formula_over_two_resets(rng):
    grads = rng.standard_normal([40, 6]) * 1e-3
    grads[22, 1] *= 40
    tx = scale_by_stable_spam(every_steps=15, warmup_steps=4)
    updates, _ = play(tx, jnp.asarray(grads, jnp.float32))
    np.testing.assert_allclose(updates, by_hand(grads), rtol=2e-4, atol=1e-6)


def test_the_reset_does_not_switch_adaclip_off(rng):
    """An entry of 40 sigma, 50 steps after a reset, as AdaClip lets it through."""
    grads = rng.standard_normal([1000, 100]).astype(np.float32)
    grads[950, 3] = 40.0
    kept = {}
    for parity in ("official", ""):
        tx = scale_by_stable_spam(every_steps=900, parity=parity)
        _, state = play(tx, jnp.asarray(grads))
        k = 53.0 if parity else 951.0
        top = np.float64(state.spike_max[950])
        kept[parity] = min(40.0, top / (1 - 0.999**k))
        # AdaFN divides by the norm after AdaClip: what it saw tells what passed.
        a = np.asarray(state.norm_mean, np.float64)
        kept[parity, "norm"] = (a[950] - 0.7 * a[949]) / 0.3
    assert kept["official"] > 30 and kept["official", "norm"] > 30
    assert kept[""] < 5 and kept["", "norm"] < 12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_entry_poisons_no_statistic(rng, bad):
    grads = rng.standard_normal([30, 4]).astype(np.float32)
    grads[9, 2] = bad
    _, official = play(scale_by_stable_spam(parity="official"), jnp.asarray(grads))
    assert not np.isfinite(official.norm_mean[-1])
    updates, state = play(scale_by_stable_spam(), jnp.asarray(grads))
    assert np.all(np.isfinite(updates)) and np.all(updates[9] == 0)
    # The run goes on as if the step had not been.
    short, clean = play(scale_by_stable_spam(), jnp.asarray(np.delete(grads, 9, 0)))
    for field in ("spike_max", "norm_mean", "norm_square_mean", "mu", "nu"):
        np.testing.assert_array_equal(
            getattr(state, field)[-1], getattr(clean, field)[-1]
        )
    assert state.samples[-1] == 29


@pytest.mark.parametrize("make", [scale_by_adaclip, scale_by_adafn])
def test_parts_alone_survive_a_bad_entry(rng, make):
    grads = rng.standard_normal([20, 4]).astype(np.float32)
    grads[5, 0] = np.nan
    _, official = play(make(parity="official"), jnp.asarray(grads))
    assert np.isnan(jax.tree.leaves(official)[0][-1])
    updates, state = play(make(), jnp.asarray(grads))
    assert np.all(np.isfinite(updates)) and np.all(updates[5] == 0)
    assert np.isfinite(jax.tree.leaves(state)[0][-1])


def test_the_step_of_a_reset_is_small(rng):
    """Even a clean restart begins with a sign step, 4.4 times the usual one."""
    grads = jnp.asarray(rng.standard_normal([400, 500]), jnp.float32)
    rms = {}
    for warmup in (0, 40):
        tx = scale_by_stable_spam(every_steps=300, warmup_steps=warmup)
        updates, _ = play(tx, grads)
        size = jnp.sqrt(jnp.mean(jnp.square(updates), axis=1))
        rms[warmup] = float(jnp.max(size[299:]) / jnp.mean(size[200:290]))
    assert rms[0] > 4
    assert rms[40] < 1.2  # measured 1.06


def test_decays_do_not_rise_past_the_end(rng):
    grads = jnp.asarray(rng.standard_normal([24, 3]), jnp.float32)
    means = {}
    for parity in ("official", ""):
        tx = scale_by_stable_spam(total_steps=8, every_steps=100, parity=parity)
        _, state = play(tx, grads)
        mu = np.asarray(state.mu, np.float64)
        means[parity] = mu
    np.testing.assert_allclose(means[""][:8], means["official"][:8], rtol=1e-5)
    assert not np.allclose(means[""][-1], means["official"][-1], rtol=1e-2)


def test_stacked_layers_are_separate_tensors(rng):
    grads = rng.standard_normal([20, 3, 4, 2]).astype(np.float32)
    grads[:, 1] *= 1e3
    for make in (scale_by_adaclip, scale_by_adafn, scale_by_stable_spam):
        stacked, _ = play(make(stacked="layers*"), {"layers": jnp.asarray(grads)})
        alone, _ = play(make(), {str(i): jnp.asarray(grads[:, i]) for i in range(3)})
        for i in range(3):
            np.testing.assert_allclose(
                stacked["layers"][:, i], alone[str(i)], rtol=1e-5, atol=1e-7
            )


def test_norms_become_about_one(rng):
    scale = np.exp(0.3 * rng.standard_normal([60, 1])).astype(np.float32)
    grads = {
        "a": jnp.asarray(rng.standard_normal([60, 9]) * scale * 1e-4, jnp.float32),
        "b": jnp.asarray(rng.standard_normal([60, 9]) * 1e4, jnp.float32),
    }
    updates, _ = play(gradient_stabilizer(), grads)
    for u in updates.values():
        sizes = np.linalg.norm(np.asarray(u), axis=1)
        assert 0.7 < np.median(sizes) < 1.1 and sizes.max() < 1.6


ERRORS = [
    (dict(gamma1=1.0), "scale_by_stable_spam: needed 0 <= gamma1 < 1, got 1.0"),
    (dict(eps=0.0), "scale_by_stable_spam: needed eps > 0, got 0.0"),
    (dict(eta_min=2.0), "scale_by_stable_spam: needed 0 < eta_min <= 1, got 2.0"),
    (
        dict(parity="v2"),
        "scale_by_stable_spam: needed parity to be '', 'official' or "
        "'pytorch_optimizer', got 'v2'",
    ),
]


@pytest.mark.parametrize("options, text", ERRORS)
def test_errors(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        scale_by_stable_spam(**options)


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="theta"):
        stable_spam(1e-3, theta=0.999)
