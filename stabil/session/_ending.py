"""The ways in which a run ends, each told before the process is gone."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

import jax

from stabil.session._agree import anywhere
from stabil.session._exit import ExitCode, Preempted, crash_code, exit_code
from stabil.session._reporter import Reporter
from stabil.session._stop import TrainingStopped
from stabil.telemetry import Event

_COMPARE_EVERY = 16  # steps between comparisons of several processes


class Ending:
    """Listens for signals, and says in log and heartbeat why a run ends.

    Attributes:
      asked: whether a signal has asked the run to end.
    """

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self._listens = False
        self.asked = False

    def listen(self, signals: tuple[int, ...]) -> None:
        """Lets the signals ask the run to end, instead of what they did before."""

        def ask(number: int, frame: Any) -> None:
            self.asked = True

        self._listens = True
        for number in signals:
            signal.signal(number, ask)

    def asks(self, step: int) -> bool:
        """Whether the run is to end before `step`, on all processes alike."""
        if jax.process_count() == 1 or not self._listens:
            return self.asked
        return step % _COMPARE_EVERY == 0 and anywhere(self.asked)

    def leave(self, step: int) -> Preempted:
        """Tells that the run ends because it was asked to; the exception to raise."""
        text = "asked to end by a signal; the state is saved"
        self._reporter.record(Event(action="preempted", step=step, text=text))
        code = int(ExitCode.RESTART)
        self._reporter.heart.beat(step, "preempted", exit_code=code, text=text)
        self._reporter.log.flush()
        return Preempted(step)

    def hung(self, seconds: float) -> None:
        """Ends the process at once, from a thread: its main thread is stuck."""
        code = int(ExitCode.RESTART)
        text = f"no step has ended for {seconds:.0f} seconds"
        print(f"stabil: {text}; every thread's stack follows", file=sys.stderr)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        self._reporter.record(Event(action="hung", text=text))
        self._reporter.heart.beat(self._reporter.newest, "hung", exit_code=code)
        self._reporter.log.flush(timeout_seconds=2.0)
        self._reporter.desk.close(timeout_seconds=5.0)
        self._reporter.heart.close()
        os._exit(code)

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
            code = crash_code(error)
            code = code if code == int(ExitCode.RESTART) else 0
            self._reporter.heart.beat(step, "failed", exit_code=code, text=text)
            self._reporter.log.flush()
