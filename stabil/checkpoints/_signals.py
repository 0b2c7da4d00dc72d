"""A signal that asks for one more save before the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any


class SignalWatch:
    """Notes the first of some signals; the second goes where it would have gone.

    Attributes:
      seen: name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.seen: str | None = None
        self._before: dict[int, Any] = {}

    def start(self, signals: Sequence[int]) -> None:
        """Puts the handlers in place.

        Raises:
          RuntimeError: not called in the main thread, the only one that may.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "needed the main thread, the only one in which Python takes signals, "
                "got "
                f"{threading.current_thread().name}: call watch_signals there"
            )
        for number in signals:
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self.seen is None:
            self.seen = signal.Signals(number).name
            return
        before = self._before.pop(number, signal.SIG_DFL)
        signal.signal(number, before or signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def stop(self) -> None:
        """Puts back the handlers that were there before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before or signal.SIG_DFL)
        self._before.clear()
