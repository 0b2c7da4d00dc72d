"""Clocks and signals differ between processes: now and then they are compared."""

from __future__ import annotations

import time
from collections.abc import Callable

from stabil.checkpoints import _processes

# Each comparison is a collective, which every process waits for.
_SECONDS = 5.0
# Steps: fast ones may be followed by slow ones.
_LONGEST = 256


class Comparison:
    """Asks all processes about one step in so many, for about one in 5 seconds.

    How many steps those are is told by the first process, from the time that they took
    since the comparison before, so that all compare at the same steps; it at most
    doubles from one to the next.

    Args:
      clock: seconds since any moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._at = clock, clock()
        self._last: int | None = None
        self._next = 0
        self._answer = False

    def anywhere(self, step: int, asked: bool, due: bool) -> bool:
        """Whether a save is to be made; False at a step that is not compared.

        Args:
          step: the same on all processes, as must be the steps asked about before.
          asked: a signal has asked this process.
          due: the clock of this process says so; that of the first one counts.
        """
        if self._last is not None:
            if step == self._last:
                return self._answer
            if self._last < step < self._next:
                return False
        table = _processes.gathered([int(asked), int(due), self._gap(step)])
        self._answer = bool(table[:, 0].any() or table[0, 1])
        self._last, self._next = step, step + int(table[0, 2])
        self._at = self._clock()
        return self._answer

    def saved(self) -> None:
        """Forgets an answer that was followed."""
        self._answer = False

    def _gap(self, step: int) -> int:
        steps = 0 if self._last is None else max(step - self._last, 0)
        seconds = max(self._clock() - self._at, 1e-6)
        return max(1, int(min(2 * steps, steps * _SECONDS / seconds, _LONGEST)))
