"""Ends a process whose steps have stopped, so that another can take over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Watchdog:
    """Calls `bark` from a thread of its own when no beat has come for too long.

    It waits for the first beat: how long a program takes to compile is not known.
    A process that waits for a dead peer in a collective cannot be woken by Python code
    on its main thread; a thread can still end it.

    Args:
      seconds: longest time between two beats; None never barks.
      bark: called with the seconds since the newest beat, at most once.

    Raises:
      ValueError: `seconds` is not above 0.
    """

    def __init__(self, seconds: float | None, bark: Callable[[float], None]):
        if seconds is not None and not seconds > 0:
            raise ValueError(
                f"Session: needed hang_seconds > 0, or None for none, got {seconds}"
            )
        self._seconds, self._bark = seconds, bark
        self._at: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def beat(self) -> None:
        """Says that a step has ended; costs a clock read."""
        if self._seconds is None:
            return
        self._at = time.monotonic()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._watch, name="stabil-watchdog", daemon=True
            )
            self._thread.start()

    def asleep(self) -> AbstractContextManager[None]:
        """Lets something take as long as it takes."""
        return nullcontext() if self._seconds is None else self._wait(math.inf)

    def patient(self) -> AbstractContextManager[None]:
        """Lets something take ten times as long as a step may."""
        if self._seconds is None:
            return nullcontext()
        return self._wait(9 * self._seconds)

    @contextmanager
    def _wait(self, more_seconds: float) -> Generator[None, None, None]:
        before = self._at
        if before is not None:
            self._at = time.monotonic() + more_seconds
        try:
            yield
        finally:
            if before is not None:
                self.beat()

    def close(self) -> None:
        with self._changed:
            self._closed, self._at = True, None
            self._changed.notify_all()

    def _watch(self) -> None:
        limit = self._seconds or 0.0
        with self._changed:
            while not self._closed:
                at = self._at
                waited = 0.0 if at is None else time.monotonic() - at
                if waited > limit:
                    break
                # Woken now and then, as a beat only moves the time.
                self._changed.wait(min(limit - waited, 5.0) + 0.01)
            else:
                return
        self._bark(waited)
