"""How often other thresholds would have fired: evidence to choose one by."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stabil.vocabulary import SHADOW_GROUPS, Shadow


def fresh_shadow(thresholds: Sequence[float]) -> Shadow:
    """Counters at zero."""
    return Shadow(
        jnp.asarray(thresholds, jnp.float32).reshape(-1),
        jnp.zeros([len(thresholds), len(SHADOW_GROUPS)], jnp.int32),
    )


def count_shadow(shadow: Shadow, scores: Sequence[jax.Array]) -> Shadow:
    """Adds one step, given the largest score of each group, float32 scalars."""
    beyond = jnp.stack(list(scores))[None, :] > shadow.thresholds[:, None]
    steps = shadow.steps + beyond.astype(jnp.int32)
    return shadow._replace(steps=jnp.minimum(steps, jnp.iinfo(jnp.int32).max - 1))
