"""A tiny decoder and its language, for `natural.py`: six post-LN blocks of width 32.

The language has 32 tokens. With probability 0.8 the next token is a fixed function of
the one before it, else any token, so that a perfect model has a loss of 1.25 nats and a
model that knows nothing one of 3.47.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, BLOCKS, HEADS, LENGTH, BATCH = 32, 32, 6, 2, 16, 16
CLEAR = 0.8


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters; the blocks are stacked on the first axis."""
    shapes = {
        "qkv": (BLOCKS, WIDTH, 3 * WIDTH),
        "out": (BLOCKS, WIDTH, WIDTH),
        "up": (BLOCKS, WIDTH, 4 * WIDTH),
        "down": (BLOCKS, 4 * WIDTH, WIDTH),
    }
    keys = iter(jax.random.split(key, len(shapes) + 3))
    blocks = {
        name: jax.random.normal(next(keys), shape) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    blocks |= {name: jnp.ones((BLOCKS, WIDTH)) for name in ("norm_1", "norm_2")}
    return {
        "embed": jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "position": 0.3 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "head": jax.random.normal(next(keys), (WIDTH, VOCABULARY)) / WIDTH**0.5,
        "blocks": blocks,
    }


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-6) * gain


def _attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Causal attention without QK-norm."""
    q, k, v = (
        y.reshape(*y.shape[:-1], HEADS, -1) for y in jnp.split(x @ qkv, 3, axis=-1)
    )
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH / HEADS) ** 0.5
    hidden = ~jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(hidden, jnp.finfo(x.dtype).min, logits))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ out


def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of `tokens`, int32 `[batch, LENGTH + 1]`, float32."""

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        # Post-LN: the norm stands on the residual path, as in the first transformer.
        x = _norm(x + _attention(x, p["qkv"], p["out"]), p["norm_1"])
        x = _norm(x + jax.nn.gelu(x @ p["up"]) @ p["down"], p["norm_2"])
        return x, None

    x = params["embed"][tokens[:, :-1]] + params["position"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = x @ params["head"]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def language(seed: int) -> np.ndarray:
    """Which token follows which."""
    return np.random.default_rng(seed).permutation(VOCABULARY)


def text(table: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Sequences of the language, int32 `[rows, LENGTH + 1]`."""
    noise = rng.integers(0, VOCABULARY, (rows, LENGTH + 1))
    clear = rng.random((rows, LENGTH + 1)) < CLEAR
    out = noise.copy()
    for t in range(1, LENGTH + 1):
        told = table[out[:, t - 1]]
        out[:, t] = np.where(clear[:, t], told, noise[:, t])
    return out.astype(np.int32)
