"""MSign against NumPy's decomposition; stacked, degenerate and triggered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stabil.transforms import _polar, msign

# Without jit every call compiles its loops anew.
matrix_sign, restored = jax.jit(_polar.matrix_sign), jax.jit(_polar.restored)
stable_rank = jax.jit(_polar.stable_rank)


def by_hand(w):
    """`||W||_F / ||U V^T||_F U V^T` from a decomposition, float64."""
    u, s, vh = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    keep = s > 1e-5 * np.linalg.norm(s)
    sign = u[:, keep] @ vh[keep]
    return np.linalg.norm(s) / np.linalg.norm(sign) * sign


@pytest.mark.parametrize("shape", [(7, 7), (40, 12), (12, 40), (5, 1)])
def test_formula(rng, shape):
    w = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    out = restored(jnp.asarray(w, jnp.float32))
    np.testing.assert_allclose(out, by_hand(w), rtol=2e-3, atol=2e-4)


def test_null_directions_stay_null(rng):
    w = rng.standard_normal([60, 4]) @ rng.standard_normal([4, 50]) * 1e-3
    out = restored(jnp.asarray(w, jnp.float32))
    s = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
    np.testing.assert_allclose(s[:4], np.linalg.norm(w) / 2, rtol=1e-4)
    assert s[4] < 1e-6 * s[0]
    np.testing.assert_allclose(stable_rank(out), 4, rtol=1e-3)


def test_sizes_far_from_one_and_complex(rng):
    w = jnp.asarray(rng.standard_normal([6, 6]), jnp.float32)
    expected = np.asarray(matrix_sign(w))
    for scale in (1e-30, 1e25):
        np.testing.assert_allclose(matrix_sign(w * scale), expected, atol=2e-5)
    z = jnp.asarray(rng.standard_normal([5, 3]) + 1j * rng.standard_normal([5, 3]))
    gram = matrix_sign(z.astype(jnp.complex64))
    np.testing.assert_allclose(gram.mT.conj() @ gram, np.eye(3), atol=1e-5)


def play(tx, params, grads, steps):
    def step(carry, t):
        params, state = carry
        updates, state = tx.update(jax.tree.map(lambda g: g[t], grads), state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        return (params, state), (params, state)

    carry = (params, tx.init(params))
    return jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps))[1])(carry)


def test_every_third_step_on_chosen_weights_and_each_layer(rng):
    params = {
        "bias": jnp.ones(4),
        "embedding": jnp.asarray(rng.standard_normal([8, 4]), jnp.float32),
        "kernel": jnp.asarray(rng.standard_normal([3, 5, 4]), jnp.float32),
    }
    params["kernel"] = params["kernel"].at[1].set(0.0)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal([7, *p.shape]), jnp.float32) * 0.01,
        params,
    )
    grads["kernel"] = grads["kernel"].at[:, 1].set(0.0)
    after, state = play(msign(every_steps=3), params, grads, 7)
    plain = jax.tree.map(lambda p, g: p + jnp.cumsum(g, 0), params, grads)
    for name in ("bias", "embedding"):
        np.testing.assert_allclose(after[name], plain[name], rtol=1e-5, atol=1e-6)
    kernel = np.asarray(after["kernel"])
    np.testing.assert_allclose(kernel[1], plain["kernel"][1], rtol=1e-5, atol=1e-6)
    for layer in (0, 2):
        before = plain["kernel"][2, layer]
        np.testing.assert_allclose(kernel[2, layer], by_hand(before), atol=1e-4)
        norms = np.linalg.norm(kernel[2, layer]), np.linalg.norm(before)
        np.testing.assert_allclose(*norms, rtol=1e-5)
    assert np.all(kernel[:, 1] == 0)
    assert state.rewrites["kernel"][-1].tolist() == [2, 0, 2]


def test_a_bad_matrix_is_left_alone(rng):
    w = jnp.asarray(rng.standard_normal([2, 4, 4]), jnp.float32)
    params = {"w": w.at[0, 1, 1].set(jnp.nan)}
    tx = msign(every_steps=1)
    bad = jnp.full([2, 4, 4], 1e-3).at[1, 0, 0].set(jnp.inf)
    updates, state = jax.jit(tx.update)({"w": bad}, tx.init(params), params)
    assert np.all(np.isfinite(updates["w"]))
    np.testing.assert_array_equal(updates["w"][0], bad[0])
    assert state.rewrites["w"].tolist() == [0, 1]


def test_falling_stable_rank_is_what_triggers(rng):
    base = np.linalg.qr(rng.standard_normal([8, 8]))[0]
    direction = np.outer(base[:, 0], base[:, 1])
    params = {"w": jnp.asarray(base, jnp.float32), "v": None}
    growth = np.zeros([12])
    growth[6:] = 2.0
    grads = {
        "w": jnp.asarray(growth[:, None, None] * direction, jnp.float32),
        "v": None,
    }
    _, state = play(msign(every_steps=2, below=0.5), params, grads, 12)
    rewrites = np.asarray(state.rewrites["w"])
    assert rewrites[5] == 0 and rewrites[-1] >= 1
    still = jax.tree.map(jnp.zeros_like, grads)
    _, state = play(msign(every_steps=2, below=0.5), params, still, 12)
    assert state.rewrites["w"][-1] == 0


def test_bfloat16_weights(rng):
    w = jnp.asarray(rng.standard_normal([16, 8]), jnp.bfloat16)
    tx = msign(every_steps=1)
    zero = {"w": jnp.zeros_like(w)}
    updates, _ = jax.jit(tx.update)(zero, tx.init({"w": w}), {"w": w})
    assert updates["w"].dtype == jnp.bfloat16
    new = np.asarray(w + updates["w"], np.float32)
    np.testing.assert_allclose(new, by_hand(np.asarray(w, np.float32)), atol=0.03)


ERRORS = [
    (dict(every_steps=0), "msign: needed a whole number every_steps >= 1, got 0"),
    (dict(below=1.0), "msign: needed 0 <= below < 1, got 1.0"),
    (dict(below=0.0), "msign: needed below > 0, got 0.0"),
]


@pytest.mark.parametrize("options, text", ERRORS)
def test_errors(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        msign(**options)


def test_params_are_needed():
    tx = optax.chain(msign())
    text = (
        "msign: needed params, whose matrices it rewrites, got None; write "
        "tx.update(grads, opt_state, params)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tx.update({"w": jnp.eye(2)}, tx.init({"w": jnp.eye(2)}))
