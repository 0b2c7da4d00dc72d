"""The faults of `campaign.py`: drawn at random, each by its trial's number and seed.

What is drawn, and how wide, stands here once and is not fitted to what is survived: a
fault may strike in any step from the first to the last, at any layer, with a size from
harmless to absurd.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from stabil.testing import inject

# Place and weight.
PLACES = {
    "none": 10,
    "activations": 14,
    "gradients": 14,
    "parameters": 16,
    "moments": 12,
    "batch": 10,
    "loss": 6,
    "checkpoint": 8,
    "disk": 5,
    "alerts": 3,
    "process": 2,
}
SEEDS = 8  # of model and data; a clean run each


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
      number: its number.
      seed: of the model and of the order of the data.
      place: where it strikes, a key of `PLACES`.
      fault: what strikes the arrays, or None.
      other: what strikes files, disk, channel or process, or None.
    """

    number: int
    seed: int
    place: str
    fault: inject.Fault | None
    other: inject.Fault | None = None

    @property
    def kind(self) -> str:
        """The kind of the fault that gives the trial its place."""
        found = self.other or self.fault
        return found.kind if found else "none"

    @property
    def layer(self) -> str:
        """The module that the array fault strikes, or "" where it strikes none."""
        if self.fault is None or self.fault.place in ("batch", "loss"):
            return ""
        path = self.fault.where.removeprefix("mu/").removeprefix("nu/")
        if self.fault.place == "activations":
            return path
        head, _, last = path.rpartition("/")
        return head or last


def draw(number: int, seed: int, steps: int, names: dict, process: bool) -> Trial:
    """Trial `number` of campaign `seed`.

    Args:
      number: from 0.
      seed: of the campaign.
      steps: of a run.
      names: leaf paths under "parameters" and module paths under "activations".
      process: whether a trial may kill or hang a process of its own.
    """
    rng = np.random.default_rng((seed, number))
    weights = dict(PLACES) if process else dict(PLACES, process=0)
    shares = np.array(list(weights.values())) / sum(weights.values())
    place = str(rng.choice(list(weights), p=shares))
    trial = Trial(number, int(rng.integers(SEEDS)), place, None)
    if place == "none":
        return trial
    if place in names or place in ("gradients", "moments", "batch", "loss"):
        return dataclasses.replace(trial, fault=_in_arrays(rng, place, steps, names))
    at = int(rng.integers(steps // 4, steps * 3 // 4))
    kind = str(rng.choice(inject.HOST_KINDS[place]))
    given = {"kind": kind, "place": place, "step": at, "seed": number}
    if place == "disk":
        given["duration"] = int(rng.integers(1, 50))
    if place == "alerts":
        given |= {"step": 0, "duration": steps, "size": 0.2}
    if place == "process":
        return dataclasses.replace(trial, other=inject.Fault(**given))
    # Something must happen for which checkpoint, disk or channel are needed.
    worst = "parameters" if place == "checkpoint" else "activations"
    where = str(rng.choice(names[worst]))
    later = {"step": at + int(rng.integers(1, 30)), "where": where, "seed": number}
    kind, size = ("scale", 100.0) if place == "checkpoint" else ("nan", None)
    fault = inject.Fault(kind=kind, place=worst, size=size, **later)
    return dataclasses.replace(trial, fault=fault, other=inject.Fault(**given))


def _in_arrays(
    rng: np.random.Generator, place: str, steps: int, names: dict
) -> inject.Fault:
    kinds = ("bit_flip", "garbage") if place == "batch" else inject.KINDS
    kind = str(rng.choice(kinds))
    size = {
        "scale": float(rng.choice([-1, 1]) * 10 ** rng.uniform(0.3, 6)),
        "garbage": float(10 ** rng.uniform(-1, 4)),
        "bit_flip": int(rng.integers(32)),
    }.get(kind)
    where, duration = "", 1
    entries = int(rng.choice([0, 1, 16]))
    if place == "batch":
        size, duration = 256.0 if kind == "garbage" else int(rng.integers(8)), 0
        duration, entries = int(rng.integers(1, 17)), int(rng.choice([0, 1, 16]))
    elif place == "activations":
        where = str(rng.choice(names["activations"]))
    elif place != "loss":
        where = str(rng.choice(names["parameters"]))
    if place == "moments":
        where = f"{rng.choice(['mu', 'nu'])}/{where}"
    if place in ("activations", "gradients", "loss"):
        duration = int(rng.choice([1, 1, 1, 2, 4, 8]))
    return inject.Fault(
        kind=kind,
        place=place,
        step=int(rng.integers(steps)),
        duration=duration,
        where=where,
        entries=entries,
        size=size,
        seed=int(rng.integers(1 << 31)),
    )
