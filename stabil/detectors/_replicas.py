"""Which device departs from the others, from the statistics of what each one holds.

Devices that hold different parts of a tensor differ for ever, and one odd batch makes
any device differ for a step. So a device is named only if, in some row, all agreed for
20 steps and it then stood apart for 20 steps on end, or if its values are not finite
and those of most others are. Of fewer than four devices nothing is said.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._agreement import stand

_FEWEST = 4
PATIENCE_STEPS = 20


class ReplicaState(NamedTuple):
    """What each of R rows says of the devices.

    Attributes:
      agreed: int32 `[R]`, steps on which no device stood apart.
      apart: int32 `[R]`, steps in a row for which the same device stands apart.
      device: int32 `[R]`, which one.
    """

    agreed: jax.Array
    apart: jax.Array
    device: jax.Array

    @classmethod
    def empty(cls, rows: int) -> ReplicaState:
        """No device was seen yet; every leaf has its own buffer."""
        return cls(*(jnp.zeros([rows], jnp.int32) for _ in range(3)))


class Outsider(NamedTuple):
    """What the comparison found.

    Attributes:
      device: int32 scalar, the device that departs; -1 for none.
      lasting: bool scalar, whether one has stood apart for long; True on one step.
      nonfinite: bool scalar, whether the values of a few devices alone are not finite.
    """

    device: jax.Array
    lasting: jax.Array
    nonfinite: jax.Array


def compare_replicas(
    state: ReplicaState, shards: jax.Array, marks: jax.Array
) -> tuple[ReplicaState, Outsider]:
    """Compares devices at one step.

    Args:
      state: what was usual.
      shards: float32 `[devices, R]`, magnitude of each row on each device; NaN where it
        was not read.
      marks: bool `[devices, R]`, whether the row is not finite there.
    """
    devices = shards.shape[0]
    if devices < _FEWEST or shards.shape[1] == 0:
        no = jnp.zeros([], bool)
        return state, Outsider(jnp.full([], -1, jnp.int32), no, no)
    usable = jnp.isfinite(shards) & (shards > 0)
    x = jnp.where(usable, jnp.log(jnp.where(usable, shards, 1.0)), jnp.nan)
    found = stand(x.T, (0,) * devices)
    away = jnp.where(found.departs, jnp.abs(found.score), 0.0)
    device = jnp.argmax(away, axis=1).astype(jnp.int32)
    differs = jnp.any(found.departs, axis=1)
    read = jnp.sum(usable, axis=0) >= _FEWEST
    again = jnp.where(device == state.device, state.apart + 1, 1)
    new = ReplicaState(
        agreed=jnp.minimum(state.agreed + (~differs).astype(jnp.int32), 1 << 30),
        apart=jnp.minimum(jnp.where(differs, again, 0), 1 << 30),
        device=jnp.where(differs, device, state.device),
    )
    new = ReplicaState(
        *(jnp.where(read, n, o) for n, o in zip(new, state, strict=True))
    )
    lasts = read & (new.apart == PATIENCE_STEPS) & (new.agreed >= PATIENCE_STEPS)
    ill = jnp.any(marks, axis=1)
    few = jnp.any(ill) & (2 * jnp.sum(ill) < devices)
    named = jnp.where(
        few, jnp.argmax(ill).astype(jnp.int32), new.device[jnp.argmax(lasts)]
    )
    found_any = few | jnp.any(lasts)
    return new, Outsider(jnp.where(found_any, named, -1), jnp.any(lasts), few)
