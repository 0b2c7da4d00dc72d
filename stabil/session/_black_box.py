"""The last steps before a rollback or a stop, kept for whoever reads its event."""

from __future__ import annotations

import collections
from typing import Any

from stabil.policy import Action, Observation
from stabil.vocabulary import Vitals

_STEPS, _MOST_READINGS = 32, 500


class BlackBox:
    """Remembers the newest 32 steps in plain numbers."""

    def __init__(self) -> None:
        self._rows: collections.deque[Observation] = collections.deque(maxlen=_STEPS)

    def take(self, seen: Observation) -> None:
        self._rows.append(seen)

    def open(self, action: Action, vitals: Vitals) -> None:
        """Adds the steps, and the step's readings where it has any, to an action."""
        names = ("step", "severity", "loss", "grad_norm", "score")
        window: dict[str, list[Any]] = {
            name: [getattr(seen, name) for seen in self._rows] for name in names
        }
        action.numbers["window"] = window
        readings = vitals.readings
        if readings is not None and readings.values.ndim == 2:
            table = readings.scalars()
            action.numbers["readings"] = dict([*table.items()][:_MOST_READINGS])
