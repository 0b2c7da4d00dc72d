"""The z-loss: keeps output logits from drifting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil.transforms import _leafwise, _leaves


def z_loss(logits: jax.Array, weight: float = 1e-4, where: Any = None) -> jax.Array:
    """Auxiliary loss `weight * mean(log(Z)^2)` with `Z = sum exp(logits)`.

    Keeps the logits from drifting: softmax does not see a shift that is common to all
    classes, rounding does. Add it to the loss before taking gradients.

    Args:
      logits: `[..., classes]`, any floating dtype; computed in float32 or wider.
      weight: factor of the term; >= 0. PaLM: 1e-4.
      where: bool `[...]`, positions that count, or None for all; where none counts the
        term is 0.

    Returns:
      float32 scalar (wider for wider logits).

    Raises:
      ValueError: `weight` is negative, or there is no class axis.

    Examples:
      >>> import jax.numpy as jnp
      >>> term = z_loss(jnp.zeros([2, 8]), weight=1.0)  # log(8) squared
      >>> print(f"{term:.3f}")
      4.324

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, section 5.
    """
    _leafwise.check_not_negative("z_loss", weight=weight)
    x = jnp.asarray(logits)
    if x.ndim == 0:
        raise ValueError(
            "z_loss: needed logits with a class axis [..., classes], got a scalar; "
            "hand it the logits, not the loss"
        )
    square = jnp.square(jax.nn.logsumexp(x.astype(_leaves.wide(x)), axis=-1))
    if where is None:
        return weight * jnp.mean(square)
    counts = jnp.broadcast_to(jnp.asarray(where, bool), square.shape)
    total = jnp.sum(jnp.where(counts, square, jnp.zeros_like(square)))
    return weight * total / jnp.maximum(jnp.sum(counts), 1).astype(total.dtype)
