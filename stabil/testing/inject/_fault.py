"""What goes wrong, where and when: one small frozen record."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax

KINDS = ("nan", "inf", "bit_flip", "scale", "garbage")
# Places outside the arrays of a step, each with the kinds that it takes.
HOST_KINDS = {
    "checkpoint": ("bit_flip", "truncate", "remove"),
    "process": ("die", "hang"),
    "disk": ("full", "gone"),
    "alerts": ("fail", "hang"),
}
PLACES = (
    "batch",
    "activations",
    "loss",
    "gradients",
    "parameters",
    "moments",
    *HOST_KINDS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    Attributes:
      kind: for places that hold arrays one of `KINDS`: `nan` and `inf` overwrite,
        `bit_flip` flips one bit of an entry, `scale` multiplies, `garbage` overwrites
        with random numbers. For the others one of `HOST_KINDS[place]`, see the
        function of the place's name.
      place: one of `PLACES`: the part of the run that it strikes.
      step: the first step that it strikes; steps, >= 0.
      duration: how many steps it strikes in a row; steps, >= 1.
      where: which leaves, by whole components of their slash paths: `mlp/kernel`
        strikes `block_1/mlp/kernel` and `mu/mlp/kernel` but not `fast_mlp/kernel`. For
        activations, the end of a module's path. Empty: every leaf that has the kind,
        or the output of the whole model. For a checkpoint, which of its files.
      entries: how many entries of each leaf, drawn anew each step; 0 strikes all.
      size: the factor of `scale` (1000 if None); the standard deviation of `garbage`
        (1 if None), for integers its exclusive upper bound (needed); the bit that
        `bit_flip` flips, counted from the lowest (the highest exponent bit if None).
        For other places, see their functions.
      seed: what the draws depend on, besides the step and the leaf's name.
      device: id of the device whose shard of each leaf is struck, between steps;
        None strikes the whole array. Of a replicated array one copy is struck, so
        that the replicas no longer agree.

    Raises:
      ValueError: a field is out of range.

    Examples:
      >>> print(Fault(kind="garbage", place="batch", step=40, duration=8, size=256))
      garbage in batch at steps 40 to 47
    """

    kind: str
    place: str
    step: int
    duration: int = 1
    where: str = ""
    entries: int = 0
    size: float | None = None
    seed: int = 0
    device: int | None = None

    def __post_init__(self) -> None:
        _one_of("place", self.place, PLACES)
        kinds = HOST_KINDS.get(self.place, KINDS)
        note = f" of {self.place}" if self.place in HOST_KINDS else ""
        _one_of(f"kind{note}", self.kind, kinds)
        _at_least("step", self.step, 0)
        _at_least("duration", self.duration, 1)
        _at_least("entries", self.entries, 0)
        if self.kind == "bit_flip" and self.size is not None:
            _at_least("size", self.size, 0, note=" for a bit_flip, the bit's position")
        if self.device is not None:
            _at_least("device", self.device, 0)
            if self.place not in ("gradients", "parameters", "moments"):
                raise ValueError(
                    "needed device=None, since only gradients, parameters and moments "
                    f"are struck on one device, got device={self.device} for "
                    f"{self.place}"
                )
        if self.place == "moments" and not self.where:
            raise ValueError(
                "needed where=, the moment to strike, got ''; write the end of its "
                "path in the optimizer's state, for example where='mu/mlp/kernel'"
            )

    def is_due(self, step: Any) -> Any:
        """Whether the fault strikes at `step`; a bool, or a traced bool scalar."""
        return (step >= self.step) & (step < self.step + self.duration)

    def __str__(self) -> str:
        last = self.step + self.duration - 1
        when = f"step {self.step}" if self.duration == 1 else ""
        when = when or f"steps {self.step} to {last}"
        where = f" {self.where}" if self.where else ""
        where += "" if self.device is None else f" on device {self.device}"
        return f"{self.kind} in {self.place}{where} at {when}"


def due(schedule: Sequence[Fault], step: int, place: str | None = None) -> tuple:
    """The faults of `schedule` that strike at `step`, a Python integer.

    Args:
      schedule: the planted faults.
      step: the step asked about.
      place: keep only faults of this place; None keeps all.

    Returns:
      A tuple of `Fault`, in the schedule's order.

    Examples:
      >>> burst = Fault(kind="nan", place="loss", step=5, duration=2)
      >>> [len(due((burst,), step)) for step in range(4, 8)]
      [0, 1, 1, 0]
    """
    return tuple(f for f in schedule if f.is_due(step) and place in (None, f.place))


def candidates(schedule: Sequence[Fault], step: Any, place: str) -> tuple[Fault, ...]:
    """Faults of `place` that may strike: all for a traced step, else the due ones."""
    for fault in schedule:
        if not isinstance(fault, Fault):
            raise TypeError(
                f"needed a schedule of stabil.testing.inject.Fault, got "
                f"{type(fault).__name__}; write inject.Fault(kind=..., place=..., "
                "step=...)"
            )
    if isinstance(step, jax.core.Tracer):
        return tuple(f for f in schedule if f.place == place)
    return due(schedule, operator.index(step), place)


def runs_through(where: str, path: str) -> bool:
    """Whether `where` is a run of whole components of the slash path `path`.

    Examples:
      >>> runs_through("mlp/kernel", "mu/mlp/kernel"), runs_through("mlp", "my_mlp")
      (True, False)
    """
    return f"/{where}/" in f"/{path}/" or not where


def ends_path(where: str, path: str) -> bool:
    """Whether a module's path ends with `where`; only the whole model with ''.

    Examples:
      >>> ends_path("mlp", "block_1/mlp"), ends_path("", "block_1")
      (True, False)
    """
    return path == where or bool(where) and f"/{path}".endswith(f"/{where}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"needed {name} to be one of {', '.join(allowed)}, got {value!r}"
        )


def _at_least(name: str, value: Any, least: int, note: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"needed {name} to be an integer of at least {least}{note}, got {value!r}"
        )
