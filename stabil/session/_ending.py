"""The ways in which a run ends, each told before the process is gone."""

from __future__ import annotations

import signal
from typing import Any

from stabil.session._exit import ExitCode, Preempted, exit_code
from stabil.session._reporter import Reporter
from stabil.session._stop import TrainingStopped
from stabil.telemetry import Event


class Ending:
    """Listens for signals, and says in log and heartbeat why a run ends.

    Attributes:
      asked: whether a signal has asked the run to end.
    """

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self.asked = False

    def listen(self, signals: tuple[int, ...]) -> None:
        """Lets the signals ask the run to end, instead of what they did before."""

        def ask(number: int, frame: Any) -> None:
            self.asked = True

        for number in signals:
            signal.signal(number, ask)

    def leave(self, step: int) -> Preempted:
        """Tells that the run ends because it was asked to; the exception to raise."""
        text = "asked to end by a signal; the state is saved"
        self._reporter.record(Event(action="preempted", step=step, text=text))
        code = int(ExitCode.RESTART)
        self._reporter.heart.beat(step, "preempted", exit_code=code, text=text)
        self._reporter.log.flush()
        return Preempted(step)

    def stop(self, step: int, error: TrainingStopped) -> None:
        """Tells that the ladder has given up."""
        code = int(exit_code(error))
        self._reporter.heart.beat(step, "stopped", exit_code=code, text=error.reason)

    def exit(self, step: int, kind: Any, error: BaseException | None) -> None:
        """Tells how a `with` block over the session was left."""
        if error is None:
            self._reporter.heart.beat(step, "ended")
        elif not isinstance(error, (TrainingStopped, Preempted)):
            text = f"{kind.__name__}: {error}"
            self._reporter.record(Event(action="failed", step=step, text=text))
            self._reporter.heart.beat(step, "failed", text=text)
            self._reporter.log.flush()
