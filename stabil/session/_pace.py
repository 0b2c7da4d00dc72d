"""What going back costs here: the time of a step and of a load, measured."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

# Until a load has been measured: half a gigabyte a second and a second to begin with.
_BYTES_PER_SECOND, _LEAST_LOAD_SECONDS = 5e8, 1.0


class Pace:
    """Times steps and loads on the host.

    A step lasts from the end of one to the end of the next, which holds the wait for
    data as well; the median leaves out saves, evaluations and compilations.

    Args:
      clock: seconds, for tests.

    Attributes:
      load_seconds: of the newest load; an estimate from the state's size before one.
      is_measured: whether there was a load.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._laps: collections.deque[float] = collections.deque(maxlen=64)
        self._at: float | None = None
        self.load_seconds, self.is_measured = _LEAST_LOAD_SECONDS, False

    @property
    def step_seconds(self) -> float:
        """Median of the newest 64 steps; 0 before the second."""
        return statistics.median(self._laps) if self._laps else 0.0

    def lap(self) -> None:
        """Counts the end of a step."""
        now = self._clock()
        if self._at is not None:
            self._laps.append(now - self._at)
        self._at = now

    def rest(self) -> None:
        """Leaves the time until the next end of a step out."""
        self._at = None

    def expect(self, state: Any) -> None:
        """Estimates the load of a state."""
        if not self.is_measured:
            size = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(state))
            self.load_seconds = _LEAST_LOAD_SECONDS + size / _BYTES_PER_SECOND

    @contextmanager
    def loading(self) -> Generator[None, None, None]:
        """Times a load."""
        begun = self._clock()
        yield
        self.load_seconds, self.is_measured = self._clock() - begun, True
        self.rest()
