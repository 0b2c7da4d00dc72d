"""The model of `stabil demo`: a byte-level GPT of about one million parameters."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the model is, and how it is trained.

    Attributes:
      layers: number of blocks.
      width: features of the residual stream; a multiple of `heads`.
      heads: attention heads of a block.
      context: bytes that a prediction may look back on.
      batch: sequences of a step.
      peak: the peak learning rate of the cosine schedule.
    """

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 8
    peak: float = 2e-3


class Attention(nn.Module):
    """Causal self-attention over `[batch, context, width]`."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        qkv = nn.Dense(3 * d, use_bias=False, name="qkv")(x)
        q, k, v = jnp.split(qkv.reshape(b, t, self.heads, -1), 3, axis=-1)
        score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (d // self.heads) ** -0.5
        score = jnp.where(jnp.tri(t, dtype=bool), score, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score), v)
        return nn.Dense(d, use_bias=False, name="out")(mixed.reshape(b, t, d))


class Mlp(nn.Module):
    """Two dense layers, four times as wide between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = x.shape[-1]
        return nn.Dense(d, name="down")(nn.gelu(nn.Dense(4 * d, name="up")(x)))


class Block(nn.Module):
    """One pre-LN transformer block."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(self.heads, name="attention")(nn.LayerNorm(name="ln_1")(x))
        return x + Mlp(name="mlp")(nn.LayerNorm(name="ln_2")(x))


class Gpt(nn.Module):
    """Bytes `[batch, context]` to logits `[batch, context, 256]`."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.size
        small = nn.initializers.normal(0.02)
        place = self.param("positions", small, (s.context, s.width))
        embed = nn.Embed(VOCABULARY, s.width, embedding_init=small, name="embed")
        x = embed(tokens.astype(jnp.int32)) + place[: tokens.shape[1]]
        for i in range(s.layers):
            x = Block(s.heads, name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(
            nn.LayerNorm(name="ln")(x)
        )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, float32 scalar, nats a byte."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, targets.astype(jnp.int32)
    )
    return jnp.mean(losses)


def adamw(size: Size, steps: int) -> optax.GradientTransformation:
    """AdamW with a tenth of warm-up and a cosine down to a hundredth of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, size.peak, max(1, steps // 10), steps, 0.01 * size.peak
    )
    return optax.adamw(schedule, b2=0.99, weight_decay=0.1)
