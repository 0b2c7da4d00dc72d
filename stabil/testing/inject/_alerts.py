"""A channel for alerts that is dead for a while."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from stabil.testing.inject._fault import Fault, due


class AlertChannel:
    """Passes messages on to a channel, and does not while a fault strikes `alerts`.

    `fail` raises a ConnectionError; `hang` holds the message for `size` seconds, or
    until `close` if None, and then raises.

    Args:
      schedule: the planted faults; those of places other than `alerts` are ignored.
      inner: a channel with `send(title, text, severity)`; None delivers nowhere.

    Attributes:
      sent: messages that were passed on.
      refused: messages that were not.

    Examples:
      >>> fault = Fault(kind="fail", place="alerts", step=1)
      >>> channel = AlertChannel((fault,))
      >>> channel.send("stabil", "all is well", "info")
      >>> channel.at(1)
      >>> channel.send("stabil", "all is not well", "warning")
      Traceback (most recent call last):
        ...
      ConnectionError: fail in alerts at step 1
      >>> channel.sent, channel.refused
      (1, 1)
    """

    def __init__(self, schedule: Sequence[Fault], inner: Any = None):
        self._schedule, self._inner = tuple(schedule), inner
        self._due: Sequence[Fault] = ()
        self._ended = threading.Event()
        self.sent = self.refused = 0
        self.at(0)

    def at(self, step: int) -> None:
        """Makes the channel what it is to be at `step`, a Python integer."""
        self._due = due(self._schedule, step, "alerts")

    def close(self) -> None:
        """Lets go of messages that hang."""
        self._ended.set()

    def send(self, title: str, text: str, severity: str) -> None:
        """Passes one message on.

        Raises:
          ConnectionError: a fault strikes.
        """
        for fault in self._due:
            self.refused += 1
            if fault.kind == "hang":
                self._ended.wait(fault.size)
            raise ConnectionError(str(fault))
        if self._inner is not None:
            self._inner.send(title, text, severity)
        self.sent += 1
