"""Faults in what one device holds of an array."""

from __future__ import annotations

from typing import Any

import jax

from stabil.testing.inject._corrupt import corrupt
from stabil.testing.inject._fault import Fault


def struck_shard(fault: Fault, step: Any, name: str, leaf: Any) -> jax.Array:
    """The leaf with the shard of `fault.device` as the fault leaves it.

    An array with no shard on that device, or on none of this process, stays as it is.

    Raises:
      ValueError: the step or the leaf is traced, or the leaf lies on no device.
    """
    if isinstance(leaf, jax.core.Tracer) or isinstance(step, jax.core.Tracer):
        raise ValueError(
            f"needed {fault} between steps, got a traced step: inside a compiled step "
            "an array has no devices yet; call inject.parameters or inject.moments on "
            "the state before the step"
        )
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"needed a jax.Array for {fault}, got {type(leaf).__name__} at "
            f"{name or 'the only leaf'}; put it on devices with jax.device_put"
        )
    if all(shard.device.id != fault.device for shard in leaf.addressable_shards):
        return leaf
    parts = [
        jax.device_put(corrupt(fault, step, name, shard.data), shard.device)
        if shard.device.id == fault.device
        else shard.data
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
