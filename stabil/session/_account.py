"""What a run has cost so far: steps blocked, steps run twice."""

from __future__ import annotations

from stabil.policy import BLOCK, Observation


class Account:
    """Counts the steps that brought no progress.

    Attributes:
      observed: steps whose vitals were read.
      redone: steps run again after rollbacks.
    """

    def __init__(self):
        self.observed = self.redone = 0
        self._blocked: set[int] = set()  # in the history that still counts
        self._older_blocked = 0

    @property
    def lost(self) -> int:
        """Blocked steps and steps run twice; a blocked step run twice counts once."""
        return self.redone + len(self._blocked) + self._older_blocked

    def summary(self) -> dict[str, int]:
        return {
            "observed_steps": self.observed,
            "steps_lost": self.lost,
            "redone_steps": self.redone,
        }

    def observe(self, seen: Observation) -> None:
        self.observed += 1
        if seen.severity >= BLOCK:
            self._blocked.add(seen.step)
        if len(self._blocked) > 10_000:  # a run that is blocked for good
            self._older_blocked += len(self._blocked)
            self._blocked.clear()

    def rolled_back(self, target: int, dispatched: int) -> None:
        """Steps `target` to `dispatched - 1` are run again."""
        self.redone += dispatched - target
        self._blocked = {s for s in self._blocked if s < target}
