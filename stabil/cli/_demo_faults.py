"""The faults of `stabil demo`, and whether the run put its finger on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stabil.testing import inject


@dataclasses.dataclass(frozen=True)
class Planted:
    """One planted fault and what is expected of the run.

    Attributes:
      title: a few words for tables and pictures.
      fault: what is planted; its step counts batches, so that a run which skips data
        after a rollback meets it once.
      layer: the module or leaf that it strikes, or "" where it has none.
    """

    title: str
    fault: inject.Fault
    layer: str


def plan(steps: int, layers: int, seed: int) -> tuple[Planted, ...]:
    """Five faults over a run of `steps` steps, each at its share of the way.

    The gradient outlier, the moment and the activation strike for one step; the burst
    lasts eight batches; the weights stay as they are until something mends them. They
    come late enough for the first half of the runs to be the same, so that what
    differs at the end is owed to the faults and not to the order of the data.

    Examples:
      >>> for planted in plan(1000, 5, 0):
      ...     print(planted.fault)
      garbage in batch tokens at steps 450 to 457
      scale in gradients block_1/attention/qkv/kernel at step 580
      garbage in moments mu/block_0/mlp/down/kernel at step 700
      scale in parameters block_2/mlp at step 820
      nan in activations block_3/mlp at step 920
    """
    deep = [min(i, layers - 1) for i in range(4)]

    def at(title: str, share: float, layer: str, where: str = "", **fields: Any):
        fault = inject.Fault(
            step=int(share * steps), where=where or layer, seed=seed, **fields
        )
        return Planted(title, fault, layer)

    burst = {"kind": "garbage", "place": "batch", "duration": 8, "size": 256}
    outlier = {"kind": "scale", "place": "gradients", "size": 1000.0, "entries": 1024}
    moment = {"kind": "garbage", "place": "moments", "size": 1.0}
    weights = {"kind": "scale", "place": "parameters", "size": 100.0}
    poison = {"kind": "nan", "place": "activations"}
    qkv = f"block_{deep[1]}/attention/qkv/kernel"
    down = f"block_{deep[0]}/mlp/down/kernel"
    return (
        at("corrupted batches", 0.45, "", "tokens", **burst),
        at("gradient outlier", 0.58, qkv, **outlier),
        at("moment overwritten", 0.70, down, f"mu/{down}", **moment),
        at("weights x 100", 0.82, f"block_{deep[2]}/mlp", **weights),
        at("NaN in activations", 0.92, f"block_{deep[3]}/mlp", **poison),
    )


def schedule(plan: Sequence[Planted]) -> tuple[inject.Fault, ...]:
    """The bare faults of a plan, as the injector takes them."""
    return tuple(planted.fault for planted in plan)


def same_place(layer: str, named: str | None) -> bool:
    """Whether a named signal lies at the planted layer.

    Examples:
      >>> same_place("block_2/mlp", "activations/block_2/mlp/up")
      True
      >>> same_place("block_2/mlp", "grads/block_3/mlp/up/kernel")
      False
    """
    if not layer:
        return True
    return f"/{layer}/" in f"/{named or ''}/"
