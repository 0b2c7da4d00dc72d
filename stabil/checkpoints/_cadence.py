"""When a checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


class Cadence:
    """Every so many steps or minutes, whichever comes first.

    A save is due when the step passes a multiple of `every_steps` that lies after the
    last save, so that the steps on disk are the same in every run of one program.
    Minutes are counted by a clock that never goes backwards.

    Args:
      every_steps: steps; >= 1.
      every_minutes: minutes, or None for no limit of time.
      milestones: steps that are due in any case.
      clock: seconds since any moment.

    Examples:
      >>> cadence = Cadence(100, None)
      >>> cadence.saved(200)
      >>> cadence.due(299), cadence.due(300), cadence.due(301)
      (False, True, True)
    """

    def __init__(
        self,
        every_steps: int,
        every_minutes: float | None,
        milestones: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._milestones = frozenset(milestones)
        self._clock = clock
        self._last: int | None = None
        self._at = clock()

    def due(self, step: int) -> bool:
        """Whether to save at this step; the first step that is asked about is due."""
        if self.due_by_steps(step):
            return True
        waited = self._clock() - self._at
        return self._every_seconds is not None and waited >= self._every_seconds

    def due_by_steps(self, step: int) -> bool:
        """Whether the step alone makes it due, the same on every process."""
        if self._last is None:
            return True
        if step in self._milestones and step > self._last:
            return True
        return step // self._every_steps > self._last // self._every_steps

    def saved(self, step: int) -> None:
        """Counts from here."""
        self._last, self._at = step, self._clock()
