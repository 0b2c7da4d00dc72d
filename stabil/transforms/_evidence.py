"""What the guard shows its judge of one step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.detectors import Evidence, groups_of, read_rows
from stabil.transforms._moment_levels import MomentLevels
from stabil.vocabulary import Readings


def scalar(loss: Any) -> jax.Array:
    if loss is None:
        return jnp.full([], jnp.nan, jnp.float32)
    if jnp.shape(loss) != ():
        raise ValueError(
            f"guard: needed a scalar loss, got one of shape {jnp.shape(loss)}; write "
            "tx.update(grads, opt_state, params, loss=loss.mean())"
        )
    return jnp.asarray(loss).astype(jnp.float32)


def gather(
    sums: jax.Array,
    moments: MomentLevels,
    loss: Any,
    readings: Any,
    max_readings: int,
) -> Evidence:
    if readings is not None:
        if not isinstance(readings, Readings) or readings.values.ndim != 2:
            got = jnp.shape(getattr(readings, "values", readings))
            raise ValueError(
                "guard: needed stabil.Readings with values [rows, statistics], got "
                f"{type(readings).__name__} of shape {got}; write logits, readings = "
                "probed.apply(...) and hand readings= on as they are"
            )
        if len(readings.names) > max_readings:
            rows = len(readings.names)
            raise ValueError(
                f"guard: needed at most {max_readings} rows of readings, got {rows}; "
                f"write stabil.guard(..., max_readings={rows}) or a narrower "
                "stabil.probe(model, where=...)"
            )
    return Evidence(
        loss=scalar(loss),
        loss_given=jnp.asarray(loss is not None),
        gradient_sums=sums,
        moment_levels=moments.level,
        bad_moments=moments.bad,
        impossible_moments=moments.impossible,
        update_rms=moments.rms,
        rows=read_rows(readings, max_readings),
    )


def sibling_groups(grads: Any, readings: Readings | None, size: int) -> tuple[int, ...]:
    """Which gradient leaves and rows are siblings; rows without a name are none."""
    leaves = [f"grads/{name}" for name in _tree.measured_names(grads)]
    rows = [] if readings is None else [f"rows/{name}" for name in readings.names]
    found = groups_of(leaves + rows)
    return found + tuple(range(-1, -1 - (size - len(rows)), -1))


def mark(old: jax.Array, readings: Readings | None) -> jax.Array:
    if readings is None:
        return old
    return jnp.asarray(_tree.fingerprint(readings.names))
