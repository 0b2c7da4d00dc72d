"""Attention logits and router loads: told beside an output that stays as it was."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stabil.probes import attention_fn, collect, probe, tap_attention, tap_router

X = np.random.default_rng(11).normal(size=(2, 5, 8)).astype(np.float32)
CAUSAL = nn.make_causal_mask(jnp.ones((2, 5)), dtype=bool)


def reference(logits, mask):
    """Largest logit and entropy of each query, in float64."""
    x = np.where(mask, np.asarray(logits, np.float64), -np.inf)
    some = np.broadcast_to(mask, x.shape).any(-1)
    with np.errstate(all="ignore"):
        p = np.exp(x - x.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        entropy = -np.sum(np.where(p > 0, p * np.log(p), 0), -1)
    return np.where(some, x.max(-1), 0), np.where(some, entropy, 0)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class Layer(nn.Module):
    """One attention layer, for a scan."""

    attend: callable

    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, attention_fn=self.attend, name="attn"
        )
        return x + attention(x, mask=CAUSAL), None


class Stack(nn.Module):
    """Checkpointed layers, scanned."""

    attend: callable = nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(self.attend, name="layers")(x, None)[0]


def test_linen_attention_in_scanned_checkpointed_layers():
    plain, tapped = Stack(), Stack(attention_fn(nn.dot_product_attention))
    shapes = jax.eval_shape(plain.init, jax.random.key(0), X)
    rng = np.random.default_rng(3)
    variables = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes
    )
    assert jax.eval_shape(tapped.init, jax.random.key(0), X) == shapes
    probed = probe(tapped, where=("**/logit_max", "**/entropy"), stats="all")

    def loss(apply, variables):
        out = apply(variables, X)
        y, readings = out if isinstance(out, tuple) else (out, None)
        return jnp.sum(y**2), readings

    @jax.jit
    def run(variables):
        def step(apply):
            grad = jax.value_and_grad(loss, argnums=1, has_aux=True)
            return grad(apply, variables)

        outer = collect(lambda: step(tapped.apply), stats="all", backward=True)
        return [step(plain.apply), step(tapped.apply), step(probed.apply), outer()]

    want, same, ((got, inner), grads), (again, outer) = run(variables)
    assert_same(same, want)
    assert_same(again, want)
    assert_same((got, grads), (want[0][0], want[1]))
    per = ("layers/attn/logit_max", "layers/attn/entropy")
    assert inner.names == tuple(f"{n}[{i}]" for i in range(3) for n in per)
    assert outer.names == tuple(n.removeprefix("layers/attn/") for n in inner.names)
    np.testing.assert_array_equal(outer.values, inner.values)


def test_nnx_attention():
    def make(attend):
        return nnx.MultiHeadAttention(
            2, 8, rngs=nnx.Rngs(0), decode=False, attention_fn=attend
        )

    @jax.jit
    def run():
        plain = make(nnx.dot_product_attention)(X, mask=CAUSAL)
        attend = attention_fn(nnx.dot_product_attention)
        return plain, probe(make(attend), stats="max", where="**")(X, mask=CAUSAL)

    want, (got, readings) = run()
    np.testing.assert_array_equal(got, want)
    names = ("query", "key", "value", "logit_max", "entropy", "out")
    assert readings.names == (*names, "MultiHeadAttention")
    entropy = float(readings["max"][4])
    assert 0 < entropy <= np.log(5)


def fake(query, key, value, bias=None, mask=None, is_causal=False):
    """An attention whose logits nobody sees."""
    return value


def test_values_with_bias_causality_and_shared_heads(rng):
    q, k, bias = (rng.normal(size=s) for s in ((2, 5, 4, 8), (2, 5, 2, 8), (4, 5, 5)))
    q, k, bias = (x.astype(np.float32) for x in (q, k, bias))

    def run(q, k):
        return attention_fn(fake, name="cross")(q, k, k, bias, is_causal=True)

    out, readings = jax.jit(collect(run, stats="all"))(q, k)
    np.testing.assert_array_equal(out, k)
    logits = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, axis=2)) / 8**0.5 + bias
    top, entropy = reference(logits, np.tril(np.ones((5, 5), bool)))
    assert readings.names == ("cross/logit_max", "cross/entropy")
    for row, want in zip(np.asarray(readings.values), (top, entropy), strict=True):
        stats = dict(zip(readings.statistics, row, strict=True))
        np.testing.assert_allclose(stats["max"], want.max(), rtol=1e-5)
        np.testing.assert_allclose(stats["mean"], want.mean(), rtol=1e-5)


def test_masks_and_bad_logits_of_an_attention_of_ones_own(rng):
    logits = rng.normal(size=(3, 4, 6)).astype(np.float32) * 5
    mask = rng.random((3, 4, 6)) < 0.6
    mask[0, 1] = False
    filled = np.where(mask, logits, -np.inf).astype(np.float32)

    @jax.jit
    def run(logits, filled, spoilt):
        def loss(tap):
            return jax.grad(lambda x: jnp.sum(jax.nn.softmax(tap(x)) ** 2))(logits)

        def told(x, mask):
            read = collect(lambda x: tap_attention(x, "a", mask=mask), stats="all")
            return read(x)[1]

        rows = told(logits, mask), told(filled, None), told(spoilt, None)
        return rows, [loss(tap_attention), loss(lambda x: x)]

    spoilt = logits.copy()
    spoilt[0, 0, 0] = np.nan
    (masked, minus_inf, bad), grads = run(logits, filled, spoilt)
    np.testing.assert_array_equal(*grads)
    np.testing.assert_array_equal(masked.values, minus_inf.values)
    for row, want in zip(masked.values, reference(logits, mask), strict=True):
        np.testing.assert_allclose(row[3:5], [want.min(), want.max()], rtol=1e-5)
        assert row[0] == row[1] == 0 and row[2] >= 1  # the query that sees no key
    assert bad["nan_count"][1] == 1


def test_router_loads_in_scanned_checkpointed_layers(rng):
    gates = rng.normal(size=(2, 7, 5)).astype(np.float32)
    gates[..., 3] = -9

    def layer(x, w):
        probs = tap_router(jax.nn.softmax(w), "moe", selected=2, per_expert=True)
        return x + jnp.sum(probs[..., 0]), None

    def loss(gates):
        return jax.lax.scan(jax.checkpoint(layer), 0.0, gates)[0]

    step = jax.value_and_grad(loss)
    run = jax.jit(lambda g: (step(g), collect(step, stats="all", backward=True)(g)))
    want, (got, readings) = run(gates)
    assert_same(got, want)
    names = ("load", *(f"expert_{i}" for i in range(5)))
    assert readings.names == tuple(f"moe/{n}[{i}]" for i in range(2) for n in names)
    for i, g in enumerate(gates):
        chosen = np.argsort(-g, axis=-1)[:, :2]
        load = np.bincount(chosen.ravel(), minlength=5) / 14
        np.testing.assert_allclose(readings["max"][6 * i], load.max(), rtol=1e-6)
        np.testing.assert_allclose(readings["max"][6 * i + 1 :][:5], load, rtol=1e-6)
        assert int(readings["zero_count"][6 * i]) == (load == 0).sum() >= 1


def test_router_with_its_own_choice():
    chosen = jnp.array([[0, 2], [2, -1]])
    run = collect(lambda g: tap_router(g, chosen=chosen), stats=("min", "max"))
    gates = jnp.zeros((2, 4))
    out, readings = run(gates)
    np.testing.assert_array_equal(out, gates)
    assert readings.scalars() == {
        "activations/router/load/min": 0.0,
        "activations/router/load/max": pytest.approx(2 / 3),
    }


def test_refusals():
    text = (
        "needed an attention function with the arguments `query` and `key`, got "
        f"{len!r}; write for example stabil.probes.attention_fn("
        "nn.dot_product_attention), or tap the logits of your own attention with "
        "stabil.probes.tap_attention"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        attention_fn(len)
    text = (
        "needed `selected` as a number of experts from 1 to 4, got 5; write for "
        "example stabil.probes.tap_router(gates, selected=2)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tap_router(jnp.zeros((2, 4)), selected=5)
