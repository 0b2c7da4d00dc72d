"""How the guard obeys the host's controls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.vocabulary import Controls, Verdict


def inward(controls: Controls) -> Controls:
    """What is left of the controls for a wrapper inside: the probe level."""
    plain = Controls.untouched()
    return plain._replace(probe_level=controls.probe_level)


def scale(controls: Controls | None, verdict: Verdict) -> jax.Array:
    """The learning-rate scale; without controls a 1 that XLA cannot know beforehand.

    Behind a select on a scale and a select on the verdict XLA on CPU contracts the
    optimizer's closing multiply with the caller's add, as it does without a guard;
    behind a select on the verdict alone it does not.
    """
    if controls is None:
        return 1 + 0 * verdict.score
    return controls.learning_rate_scale


def slowed(updates: Any, scale: jax.Array) -> Any:
    def slow(u: Any) -> Any:
        if not _tree.is_measured(u):
            return u
        # A select, since a product with 1.0 changes last bits after fusion.
        u = jnp.asarray(u)
        return jnp.where(scale == 1, u, u * scale.astype(u.dtype))

    return jax.tree.map(slow, updates)
