"""Which steps are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil.vocabulary import Controls


def check_every(every: Any, name: str) -> None:
    """Refuses what is no number of steps; `name` is that of what has the cadence.

    Raises:
      ValueError: `every` is no positive integer.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"needed `every` as a number of steps from 1 on, got {every!r}; write for "
            f"example every=10 and {name}.at(step) in the train step"
        )


def is_due(every: int, step: Any, controls: Controls | None) -> jax.Array | None:
    """Whether a step is read, a bool scalar; None is always."""
    if every == 1:
        return None
    due = jnp.asarray(step) % every == 0
    if controls is not None:
        due |= controls.probe_level >= 1
    return due


def check_due(every: int, due: jax.Array | bool | None, example: str) -> None:
    """Refuses a cadence without a step.

    Raises:
      ValueError: `every` is above 1 and nobody said whether the step is due.
    """
    if every > 1 and due is None:
        name = example.partition(".")[0]
        raise ValueError(
            f"needed the step number for every={every}, got none; write "
            f"{name}.at(step) in place of {name}, for example {example}"
        )
