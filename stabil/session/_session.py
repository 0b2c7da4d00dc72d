"""Joins telemetry, policy and checkpoints to anybody's train step."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

from stabil.policy import Ladder
from stabil.session._agree import claim
from stabil.session._controls import ControlBoard
from stabil.session._data import Data
from stabil.session._ending import Ending
from stabil.session._flight import InFlight, start_copy
from stabil.session._reporter import Reporter
from stabil.session._rescue import Return
from stabil.session._stop import TrainingStopped
from stabil.session._watch import Watch
from stabil.telemetry import Event, ProgressLine
from stabil.vocabulary import Controls, Vitals


class Session:
    """Watches a run from the host, and acts when the ladder says so.

    The loop stays the user's own. Values of step t are read while t + 1 runs; nothing
    waits for the running step, apart from a rollback, a test of the parameters after
    two non-finite steps in a row, and the end. Processes that read the same vitals do
    the same, so vitals must be replicated, as they are when `tx.update` computes them.

    A checkpoint holds the number of the step that runs next. When the run folder's
    keeper has a healthy one, `steps` resumes from it: the first step of the loop then
    runs on the state that was handed in, its result is thrown away and `end_step` hands
    the restored state over. Call `resume` before the loop to spare that step.

    Args:
      run_dir: local folder for logs and notes, of this run alone.
      checkpoints: a `stabil.checkpoints.Keeper`; without one the run cannot go back.
      policy: decides; `stabil.policy.Ladder()` when None.
      sinks: objects with `write_scalars(step, scalars)`.
      alerts: objects with `send(title, text, severity)`.
      total_steps: where the run ends; None runs until the data ends.
      progress: True shows a progress line on a terminal, "always" elsewhere too.

    Raises:
      ValueError: `run_dir` holds something else; nothing is changed.
      TypeError: a sink or an alert lacks its method.

    Examples:
      >>> import tempfile, jax, jax.numpy as jnp, optax, stabil
      >>> tx = stabil.guard(optax.sgd(0.1))
      >>> @jax.jit
      ... def train_step(state, batch, controls):
      ...     params, opt_state = state
      ...     loss, grads = jax.value_and_grad(lambda p: (p - batch) ** 2)(params)
      ...     updates, opt_state = tx.update(
      ...         grads, opt_state, params, loss=loss, controls=controls
      ...     )
      ...     vitals = stabil.vitals(opt_state, params=params)
      ...     return (optax.apply_updates(params, updates), opt_state), vitals
      >>> batches = [1.0, 2.0, float("nan"), 4.0]
      >>> with Session(tempfile.mkdtemp(), total_steps=4) as session:
      ...     state = (jnp.float32(0), tx.init(jnp.float32(0)))
      ...     for step, batch in session.steps(state, lambda i: batches[i]):
      ...         state, vitals = train_step(state, batch, session.controls)
      ...         state = session.end_step(state, vitals)
      >>> session.summary()["blocked"], session.summary()["events"][1]["cause"]
      (1, 'nonfinite_loss,nonfinite_gradient')
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        checkpoints: Any = None,
        policy: Ladder | None = None,
        sinks: Iterable[Any] = (),
        alerts: Iterable[Any] = (),
        total_steps: int | None = None,
        progress: bool | str = True,
    ):
        own = getattr(checkpoints, "directory", None)
        self.folder = claim(run_dir, ignore=[own] if own else [])
        self.policy = Ladder() if policy is None else policy
        shown = bool(progress) and jax.process_index() == 0
        line = ProgressLine(total_steps, on=shown, always=progress == "always")
        self._reporter = Reporter(self.folder, sinks, alerts, line)
        self._watch = Watch(self.folder, checkpoints, self.policy, self._reporter)
        self._ending = Ending(self._reporter)
        self._total = total_steps
        self._data: Any = None  # `Data` from the first `steps` or `resume` on
        self._step = 0
        self._open: tuple[int, int] | None = None  # step and position being run
        self._return: Return | None = None  # handed over by the next end_step
        self._flight: collections.deque[InFlight] = collections.deque()
        self._board = ControlBoard()
        self._running = self._closed = False

    @property
    def controls(self) -> Controls:
        """`stabil.Controls` for the next step: device scalars, replaced on change."""
        return self._board.controls

    def resume(self, state: Any, batch_for_step: Any) -> Any:
        """The state to begin the loop with: restored if there is one, else `state`.

        Optional. Hand the same `batch_for_step` to `steps` afterwards.

        Args:
          state: initial state; gives structure, dtypes and placement.
          batch_for_step: as for `steps`.
        """
        self._begin(state, batch_for_step)
        if self._return is None:
            return state
        found, self._return = self._return, None
        return found.state

    def steps(
        self, state: Any, batch_for_step: Callable[[int], Any] | Iterable[Any]
    ) -> Generator[tuple[int, Any], None, None]:
        """Yields step number and batch until the run has `total_steps` or the data end.

        Args:
          state: initial state; gives structure, dtypes and placement for restoring.
          batch_for_step: a function `data_index -> batch`; or an iterator with
            `get_state` and `set_state`; or any other iterable, which can be skipped
            forwards but not rewound: after a restart it must begin anew. The data index
            counts batches; it runs ahead of the step when data were skipped.

        Raises:
          TypeError: the data are none of these.
          LookupError: the keeper holds steps, and none of them is healthy.
          RuntimeError: the loop's body did not call `end_step`, or another loop runs.
        """
        if self._running:
            raise RuntimeError(
                "steps: needed one loop at a time, got a second; end the first loop or "
                "make another Session in another run_dir"
            )
        self._begin(state, batch_for_step)
        return self._loop()

    def end_step(
        self, state: Any, vitals: Vitals, *, batch_id: str | None = None
    ) -> Any:
        """Ends a step; returns the state to go on with, which may be an older one.

        Args:
          state: the train step's new state.
          vitals: the step's vitals, not yet read.
          batch_id: what you call the batch, for events and alerts; for example the
            file and row it came from.

        Raises:
          RuntimeError: no step is open.
          TypeError: `vitals` is no `Vitals`.
          TrainingStopped: the ladder has given up; every event is on the disk.
        """
        if self._open is None:
            raise RuntimeError(
                "end_step: needed an open step, got none; call it once per turn of "
                "`for step, batch in session.steps(state, batch_for_step)`"
            )
        start_copy(vitals)
        (step, index), self._open = self._open, None
        if self._return is not None:
            found, self._return = self._return, None
            return found.state
        self._flight.append(InFlight(step, index, batch_id, vitals))
        self._step = step + 1
        is_last = self._step == self._total
        # A save waits for the running step in any case, so it may as well be judged.
        judge_all = is_last or self._ending.asked
        judge_all = judge_all or self._watch.rescue.is_due(self._step)
        while len(self._flight) > (0 if judge_all else 1):
            older = self._observe(state)
            if older is not None:
                return older
        self._watch.save(self._step, state, is_last or self._ending.asked)
        self._reporter.heart.beat(self._step)
        self._watch.pace.lap()
        if self._ending.asked and not is_last:
            self._watch.finish(self._step)
            raise self._ending.leave(self._step)
        return state

    def end_on_signal(self, *signals: int) -> None:
        """Ends the run with an emergency checkpoint when one of the signals comes.

        The step that runs is ended, judged and saved; then `end_step` raises
        `Preempted`, which leaves the process with `ExitCode.RESTART`. Call it in the
        main thread, for one process; several would have to agree on the step.

        Args:
          signals: for example `signal.SIGTERM`, which most schedulers send.
        """
        self._ending.listen(signals)

    def announce(self, text: str) -> None:
        """Says that data, batch size or schedule change now: their jump is no event.

        The ladder learns the level of the loss anew; call it on every process.
        """
        self.policy.expect_change()
        self._reporter.record(Event(action="announce", step=self._step, text=text))

    def summary(self) -> dict[str, Any]:
        """Counts, steps lost, skipped data and the newest events, ready for JSON."""
        return {
            "run": self.folder.run,
            "next_step": self._step,
            "skipped_data": [list(w) for w in self._data.windows] if self._data else [],
            **self._watch.account.summary(),
            **self._reporter.summary(),
        }

    def close(self) -> None:
        """Reads what is in flight, waits for saves, and flushes everything."""
        if self._closed:
            return
        self._closed = True
        self._read_rest()
        self._watch.finish(self._step)
        account = self._watch.account
        text = f"{account.lost} of {account.observed} steps lost"
        self._reporter.record(Event(action="end", step=self._step, text=text))
        self._reporter.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._ending.exit(self._step, kind, error)
        self.close()

    def _begin(self, state: Any, batch_for_step: Any) -> None:
        if self._data is not None:
            self._data.use(batch_for_step)
            return
        data = Data(batch_for_step)
        kind = "start" if self.folder.is_new else "restart"
        self._reporter.record(Event(action=kind, text=f"data source: {data.kind}"))
        found = self._watch.begin(state, data)
        self._data = data
        if found is None:
            return
        self._step, self._return = found.step, found
        numbers = dict(data_index=data.position, windows=data.windows)
        text = f"resumed at step {found.step}"
        self._reporter.record(
            Event(action="resume", step=found.step, text=text, numbers=numbers)
        )

    def _loop(self) -> Generator[tuple[int, Any], None, None]:
        self._running = True
        try:
            while self._total is None or self._step < self._total:
                try:
                    # The first step after a resume runs twice, see above.
                    index, batch = self._data.draw(again=self._return is not None)
                except StopIteration:
                    break
                self._open = (self._step, index)
                self._board.set(
                    self.policy.learning_rate_scale,
                    self._watch.take_reset(),
                    self.policy.probe_level,
                )
                yield self._step, batch
                if self._open is not None:
                    raise RuntimeError(
                        f"step {self._step} was not ended; call state = "
                        "session.end_step(state, vitals) once in the loop's body"
                    )
            if self._return is not None:
                raise RuntimeError(
                    f"the run is complete at step {self._step}, and no step is left to "
                    "hand its state over; call state = session.resume(state, "
                    "batch_for_step) before the loop"
                )
        finally:
            self._running, self._open = False, None
            self._read_rest()
            self._reporter.log.flush()

    def _observe(self, state: Any) -> Any:
        """Reads the oldest step in flight; the state to go back to, or None."""
        oldest = self._flight.popleft()
        try:
            found = self._watch.observe(oldest, state, self._step)
        except TrainingStopped as error:
            self._flight.clear()
            self._ending.stop(self._step, error)
            raise
        if found is None:
            return None
        self._flight.clear()
        self._step = found.step
        return found.state

    def _read_rest(self) -> None:
        while self._flight:
            self._observe(None)
