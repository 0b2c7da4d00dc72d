"""Checks of initial parameters, and the z-loss."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.transforms import check_parameters, z_loss
from stabil.vocabulary import Severity


def model(rng, width=256, layers=4, qk_norm=False):
    """A Megatron-like initialisation: `sqrt(2 / 5 d)`, outputs scaled down."""
    sigma = np.sqrt(2 / (5 * width))
    small = sigma / np.sqrt(2 * layers)

    def normal(*shape, std=sigma):
        return {"kernel": jnp.asarray(rng.standard_normal(shape) * std, jnp.float32)}

    def block():
        attention = {
            "query": normal(width, width),
            "key": normal(width, width),
            "out": normal(width, width, std=small),
        }
        if qk_norm:
            attention["query_norm"] = {"scale": jnp.ones(width)}
        return {
            "attn": attention,
            "mlp": {
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width, std=small),
            },
        }

    table = jnp.asarray(rng.standard_normal([300, width]) * sigma, jnp.float32)
    return {
        "embed": {"embedding": table},
        "pos_embed": {"embedding": table[:8] * 0.01},
        "block_0": block(),
        "block_1": block(),
    }


def rules(findings):
    return {(f.path, f.rule) for f in findings}


def test_a_small_embedding_is_found_with_paths_and_numbers(rng):
    found = check_parameters(model(rng))
    assert rules(found) == {
        ("embed/embedding", "embedding_std"),
        ("block_0/mlp", "ffn_gain"),
        ("block_1/mlp", "ffn_gain"),
        ("block_0/attn", "attention_gain"),
        ("block_1/attn", "attention_gain"),
        ("block_0/attn", "qk_norm"),
        ("block_1/attn", "qk_norm"),
    }
    severities = [f.severity for f in found]
    assert severities == sorted(severities, reverse=True)
    values = {(f.path, f.rule): f.value for f in found}
    sigma = np.sqrt(2 / (5 * 256))
    np.testing.assert_allclose(
        values["embed/embedding", "embedding_std"], sigma, rtol=0.02
    )
    gain = sigma * sigma / np.sqrt(8) * (16 + 32) ** 2 / sigma
    np.testing.assert_allclose(values["block_0/mlp", "ffn_gain"], gain, rtol=0.03)
    gain = 2 * 16 * sigma / np.sqrt(8) / sigma
    np.testing.assert_allclose(
        values["block_1/attn", "attention_gain"], gain, rtol=0.03
    )


def test_the_logit_estimate_is_what_attention_computes(rng):
    params = model(rng)
    found = check_parameters(params, embedding_scale=16.0)
    assert rules(found) == {("block_0/attn", "qk_norm"), ("block_1/attn", "qk_norm")}
    assert all(f.severity == Severity.WATCH for f in found)
    attention = params["block_0"]["attn"]
    x = jnp.asarray(rng.standard_normal([400, 256]), jnp.float32)
    q, k = x @ attention["query"]["kernel"], x[::-1] @ attention["key"]["kernel"]
    heads = lambda a: a.reshape(400, 4, 64)  # noqa: E731
    logits = jnp.einsum("nhd,nhd->nh", heads(q), heads(k)) / 8.0
    np.testing.assert_allclose(found[0].value, jnp.std(logits), rtol=0.15)


def test_each_remedy_ends_its_finding(rng):
    params = model(rng, qk_norm=True)
    assert check_parameters(params, embedding_scale=16.0) == ()
    assert check_parameters(params, embedding_scale=None) == ()
    params["embed"]["norm"] = {"scale": jnp.ones(256)}
    assert check_parameters(params) == ()
    loud = model(rng)
    loud["block_0"]["attn"]["query"]["kernel"] *= 100
    (first, *_) = check_parameters(loud, embedding_scale=16.0)
    assert (first.rule, first.severity) == ("qk_norm", Severity.WARN)
    assert check_parameters(loud, embedding_scale=16.0, expect_qk_norm=False) == ()


def test_trees_without_known_names_give_nothing():
    odd = {"a": jnp.ones([2, 2]), "n": None, "i": jnp.ones([2, 2], jnp.int32)}
    assert check_parameters(odd) == ()
    with pytest.raises(
        ValueError, match=r"^check_parameters: needed embedding_scale > 0, got 0\.0$"
    ):
        check_parameters(odd, embedding_scale=0.0)


def test_z_loss(rng):
    logits = rng.standard_normal([4, 5, 7]) * 10
    z = np.log(np.exp(logits).sum(-1))
    got = z_loss(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(got, 1e-4 * np.mean(z**2), rtol=1e-5)
    mask = rng.random([4, 5]) < 0.5
    got = z_loss(jnp.asarray(logits, jnp.float32), 1.0, where=jnp.asarray(mask))
    np.testing.assert_allclose(got, np.mean(z[mask] ** 2), rtol=1e-5)
    assert z_loss(jnp.ones([2, 3]), where=jnp.zeros(2, bool)) == 0


def test_z_loss_of_large_low_precision_logits():
    logits = jnp.full([2, 4], 3e4, jnp.float16)
    value, grad = jax.value_and_grad(z_loss)(logits)
    assert value.dtype == jnp.float32 and grad.dtype == jnp.float16
    np.testing.assert_allclose(value, 1e-4 * (3e4 + np.log(4)) ** 2, rtol=1e-3)
    assert np.all(np.isfinite(grad))
    masked = jnp.array([[0.0, 1.0], [jnp.nan, 1.0]])
    assert np.isfinite(z_loss(masked, where=jnp.array([True, False])))


def test_z_loss_errors():
    text = (
        "z_loss: needed logits with a class axis [..., classes], got a scalar; hand it "
        "the logits, not the loss"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        z_loss(jnp.float32(1.0))
    with pytest.raises(
        ValueError, match=r"^z_loss: needed a number weight >= 0, got -1\.0$"
    ):
        z_loss(jnp.ones(2), weight=-1.0)
