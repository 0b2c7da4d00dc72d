"""Attention: the largest logit and the entropy of every query, beside the output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stabil.probes._tap import tap_beside

# Named as Flax names them.
_NEEDED = ("query", "key", "bias", "mask", "is_causal")


def attention_fn(
    inner: Callable[..., jax.Array], *, name: str = ""
) -> Callable[..., jax.Array]:
    """An attention function of Flax that also tells the logits it must have made.

    For `nn.MultiHeadDotProductAttention(attention_fn=...)` of Linen and
    `nnx.MultiHeadAttention(attention_fn=...)`, and any function of the same arguments.
    The logits are made again from query, key, bias and mask, by the product that Linen
    writes, so that the compiler keeps one of the two. `jax.nn.dot_product_attention`,
    which NNX calls without dropout, scales its logits another way, and a fused kernel
    keeps them to itself: there the product of query and key is made once more, and only
    in a program that is read.

    It leaves two rows below the path of the attention module: `attn/logit_max`, the
    largest logit of each query (statistic `max` is the largest of all), and
    `attn/entropy`, the entropy of each query's weights in nats, before dropout.

    Args:
      inner: for example `nn.dot_product_attention` or `nnx.dot_product_attention`.
      name: added to the path; for several attentions in one module.
    Returns:
      A function of the same signature, with the same return, bit-identical.
    Raises:
      TypeError: `inner` cannot be called, or has no `query` and `key`.
    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
      >>> attend = stabil.probes.attention_fn(nn.dot_product_attention)
      >>> attention = nn.MultiHeadDotProductAttention(2, attention_fn=attend)
      >>> probed = stabil.probe(attention, where="logit_max", stats="max")
      >>> x = jnp.zeros((1, 5, 8))
      >>> params = probed.init(jax.random.key(0), x)
      >>> probed.apply(params, x)[1].scalars()
      {'activations/logit_max/max': 0.0}
    """
    usable = callable(inner)
    if not usable or not {"query", "key"} <= set(inspect.signature(inner).parameters):
        raise TypeError(
            "needed an attention function with the arguments `query` and `key`, got "
            f"{inner!r}; write for example "
            "stabil.probes.attention_fn(nn.dot_product_attention), or tap the logits "
            "of your own attention with stabil.probes.tap_attention"
        )
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> jax.Array:
        given = signature.bind(*args, **kwargs).arguments
        query, key, bias, mask, causal = (given.get(n) for n in _NEEDED)
        logits = _logits(query, key)
        if bias is not None:
            logits = logits + bias
        allowed = None if mask is None else mask.astype(bool)
        if causal:
            lower = jnp.tril(jnp.ones(logits.shape[-2:], bool))
            allowed = lower if allowed is None else allowed & lower
        return tap_beside(inner(*args, **kwargs), _told(logits, allowed), name)

    return wrapped


def tap_attention(
    logits: jax.Array,
    name: str = "attention",
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Taps the logits of an attention of your own: its largest, and the entropy.

    Leaves the rows `name/logit_max` and `name/entropy`, of every query; inside a
    probed Flax model below the path of the module. See `attention_fn`.

    Args:
      logits: `[..., queries, keys]`, scaled, before the softmax. Entries of minus
        infinity count as masked.
      name: slash path of the place.
      mask: bool, broadcast against `logits`, True where a key may be seen; needed where
        masked logits hold a large finite number. A query that sees no key reads 0.
    Returns:
      `logits`, bit-identical; go on with it.
    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from stabil.probes import collect, tap_attention
      >>> def attend(q, k, v):
      ...     logits = tap_attention(q @ k.T, "attention")
      ...     return jax.nn.softmax(logits) @ v
      >>> x = jnp.eye(4)
      >>> _, readings = collect(attend, stats="max")(7 * x, x, x)
      >>> readings.names, float(readings["max"][0])
      (('attention/logit_max', 'attention/entropy'), 7.0)
    """
    return tap_beside(logits, _told(logits, mask), name)


def _logits(query: jax.Array, key: jax.Array) -> jax.Array:
    """Scaled products `[..., heads, queries, keys]`; fewer key heads are shared."""
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    heads, shared = query.shape[-2], key.shape[-2]
    if heads == shared:
        return jnp.einsum("...qhd,...khd->...hqk", query, key)
    query = query.reshape(*query.shape[:-2], shared, heads // shared, query.shape[-1])
    logits = jnp.einsum("...qhgd,...khd->...hgqk", query, key)
    return logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])


def _told(logits: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
    """Largest logit and entropy of each query, float32 `[..., queries]`."""
    x = jax.lax.stop_gradient(logits).astype(jnp.float32)
    seen = x != -jnp.inf
    seen = seen if mask is None else seen & mask
    some = jnp.any(seen, axis=-1)
    top = jnp.where(some, jnp.max(jnp.where(seen, x, -jnp.inf), axis=-1), 0)
    below = jnp.where(seen, x - top[..., None], 0)
    weight = jnp.where(seen, jnp.exp(below), 0)
    total = jnp.sum(weight, axis=-1)
    entropy = jnp.log(total) - jnp.sum(weight * below, axis=-1) / total
    return {"logit_max": top, "entropy": jnp.where(some, entropy, 0)}
