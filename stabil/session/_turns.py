"""Which step runs on which batch, and which one is being read meanwhile."""

from __future__ import annotations

import collections
from collections.abc import Generator
from typing import Any

from stabil.policy import Ladder
from stabil.session._controls import ControlBoard
from stabil.session._data import Data
from stabil.session._ending import Ending
from stabil.session._flight import InFlight, start_copy
from stabil.session._reporter import Reporter
from stabil.session._rescue import Return
from stabil.session._stop import TrainingStopped
from stabil.session._watch import Watch
from stabil.telemetry import Event


class Turns:
    """Turns of the training loop: draw, run, and read the step before.

    Attributes:
      step: step that runs next.
      data: source of the batches; None before `begin`.
      board: what the host asks of the next steps.
      running: whether a loop is under way.
    """

    def __init__(
        self,
        watch: Watch,
        reporter: Reporter,
        ending: Ending,
        policy: Ladder,
        total: int | None,
    ):
        self._watch, self._reporter, self._ending = watch, reporter, ending
        self._policy, self._total = policy, total
        self.step = 0
        self.data: Any = None
        self.board = ControlBoard()
        self.running = False
        self._open: tuple[int, int] | None = None  # step and position being run
        self._return: Return | None = None  # handed over by the next `end`
        self._flight: collections.deque[InFlight] = collections.deque()

    def begin(self, state: Any, source: Any, kind: str) -> None:
        """Takes the data over and resumes; another source if that was done before."""
        if self.data is not None:
            self.data.use(source)
            return
        data = Data(source)
        self._reporter.record(Event(action=kind, text=f"data source: {data.kind}"))
        found = self._watch.begin(state, data)
        self.data = data
        if found is None:
            return
        self.step, self._return = found.step, found
        numbers = dict(data_index=data.position, windows=data.windows)
        text = f"resumed at step {found.step}"
        self._reporter.record(
            Event(action="resume", step=found.step, text=text, numbers=numbers)
        )

    def take_restored(self, state: Any) -> Any:
        """The restored state if it waits to be handed over, else the one given."""
        if self._return is None:
            return state
        found, self._return = self._return, None
        return found.state

    def loop(self) -> Generator[tuple[int, Any], None, None]:
        """Step and batch until `total` steps are done or the data end."""
        self.running = True
        try:
            while self._total is None or self.step < self._total:
                try:
                    # The first step after a resume runs twice: its first result is
                    # thrown away, see `Session`.
                    index, batch = self.data.draw(again=self._return is not None)
                except StopIteration:
                    break
                self._open = (self.step, index)
                self.board.set(
                    self._policy.learning_rate_scale,
                    self._watch.take_reset(),
                    self._policy.probe_level,
                )
                yield self.step, batch
                self._require_ended()
            self._require_handed_over()
        finally:
            self.running, self._open = False, None
            self.read_rest()
            self._reporter.log.flush()

    def end(self, state: Any, vitals: Any, **names: Any) -> Any:
        """Ends the open step; the state to go on with.

        Args:
          state: as of `Session.end_step`.
          vitals: likewise.
          names: fields of `InFlight` that the user gave.
        """
        if self._open is None:
            raise RuntimeError(
                "end_step: needed an open step, got none; call it once per turn of "
                "`for step, batch in session.steps(state, batch_for_step)`"
            )
        start_copy(vitals)
        (step, index), self._open = self._open, None
        if self._return is not None:
            return self.take_restored(state)
        self._flight.append(InFlight(step, index, vitals, **names))
        self.step = step + 1
        is_last = self.step == self._total
        leaves = self._ending.asks(self.step)
        # A save waits for the running step in any case, so it may as well be judged.
        judge_all = self._watch.is_about_to_save(self.step) or is_last or leaves
        while len(self._flight) > (0 if judge_all else 1):
            is_newest = len(self._flight) == 1
            older = self._read(state, judge_all and is_newest)
            if older is not None:
                return older
        self._watch.save(self.step, state, is_last or leaves)
        self._watch.end_of_step(self.step)
        if leaves and not is_last:
            self._watch.finish(self.step)
            raise self._ending.leave(self.step)
        return state

    def skipped(self) -> list[list[int]]:
        """First and last positions of the data left out so far."""
        return [list(w) for w in self.data.windows] if self.data else []

    def read_rest(self) -> None:
        """Reads what is in flight when it is too late to act."""
        while self._flight:
            self._read(None)

    def _read(self, state: Any, is_kept: bool = False) -> Any:
        """Reads the oldest step in flight; the state to go back to, or None."""
        oldest = self._flight.popleft()
        try:
            found = self._watch.observe(oldest, state, self.step, is_kept)
        except TrainingStopped as error:
            self._flight.clear()
            self._ending.stop(self.step, error)
            raise
        if found is None:
            return None
        self._flight.clear()
        self.step = found.step
        return found.state

    def _require_ended(self) -> None:
        if self._open is not None:
            raise RuntimeError(
                f"step {self.step} was not ended; call state = "
                "session.end_step(state, vitals) once in the loop's body"
            )

    def _require_handed_over(self) -> None:
        if self._return is not None:
            raise RuntimeError(
                f"the run is complete at step {self.step}, and no step is left to hand "
                "its state over; call state = session.resume(state, batch_for_step) "
                "before the loop"
            )
