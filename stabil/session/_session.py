"""Joins telemetry, policy and checkpoints to anybody's train step.

Longer than a module should be, because it is one class that is mostly its own manual;
what it does is done in the modules that it imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from stabil.policy import Ladder
from stabil.session._agree import claim
from stabil.session._ending import Ending
from stabil.session._reporter import Reporter
from stabil.session._turns import Turns
from stabil.session._watch import Watch
from stabil.session._watchdog import Watchdog
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
      hang_seconds: ends the process with `ExitCode.RESTART` when no step has ended for
        so long, as when another process is dead or hangs; None never does. Counts from
        the end of the first step on; ten times as long in a save, and not in a
        rollback or `pause`.

    Raises:
      ValueError: `run_dir` holds something else; nothing is changed. Or `hang_seconds`
        is not above 0.
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
      >>> batches = [1.0, 2.0, float("nan"), 2.0]
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
        hang_seconds: float | None = None,
    ):
        own = getattr(checkpoints, "directory", None)
        self.folder = claim(run_dir, ignore=[own] if own else [])
        self.policy = Ladder() if policy is None else policy
        shown = bool(progress) and jax.process_index() == 0
        line = ProgressLine(total_steps, on=shown, always=progress == "always")
        self._reporter = Reporter(self.folder, sinks, alerts, line)
        self._ending = Ending(self._reporter)
        self._watchdog = Watchdog(hang_seconds, self._ending.hung)
        self._watch = Watch(
            self.folder, checkpoints, self.policy, self._reporter, self._watchdog
        )
        self._turns = Turns(
            self._watch, self._reporter, self._ending, self.policy, total_steps
        )
        self._closed = False

    @property
    def controls(self) -> Controls:
        """`stabil.Controls` for the next step: device scalars, replaced on change."""
        return self._turns.board.controls

    def resume(self, state: Any, batch_for_step: Any) -> Any:
        """The state to begin the loop with: restored if there is one, else `state`.

        Optional. Hand the same `batch_for_step` to `steps` afterwards.

        Args:
          state: initial state; gives structure, dtypes and placement.
          batch_for_step: as for `steps`.
        """
        self._begin(state, batch_for_step)
        return self._turns.take_restored(state)

    def steps(
        self, state: Any, batch_for_step: Callable[[int], Any] | Iterable[Any]
    ) -> Generator[tuple[int, Any], None, None]:
        """Yields step number and batch until the run has `total_steps` or the data end.

        Args:
          state: initial state; gives structure, dtypes and placement for restoring.
          batch_for_step: a function `data_index -> batch`; or an iterator with
            `get_state` and `set_state`; or any other iterable, which can be skipped
            forwards but not rewound: after a restart it must begin anew. The data index
            counts batches; it runs ahead of the step when data were skipped. The state
            of an iterator is kept for each process; a run that goes on with another
            number of processes draws and discards up to its position instead.

        Raises:
          TypeError: the data are none of these.
          LookupError: the keeper holds steps, and none of them is healthy.
          RuntimeError: the loop's body did not call `end_step`, or another loop runs.
        """
        if self._turns.running:
            raise RuntimeError(
                "steps: needed one loop at a time, got a second; end the first loop or "
                "make another Session in another run_dir"
            )
        self._begin(state, batch_for_step)
        return self._turns.loop()

    def end_step(
        self,
        state: Any,
        vitals: Vitals,
        *,
        batch_id: str | None = None,
        micro_batch: int | None = None,
        sample_ids: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    ) -> Any:
        """Ends a step; returns the state to go on with, which may be an older one.

        Args:
          state: the train step's new state.
          vitals: the step's vitals, not yet read. Of a step that scans over several
            micro-batches they may be stacked, with a leading axis: the worst judges,
            and events name it.
          batch_id: what you call the batch, for events and alerts; for example the
            file and row it came from.
          micro_batch: position in the accumulation window, from 0, where each
            micro-batch is a step of its own.
          sample_ids: what you call the samples, for events; or a function that makes
            them, which is called only for a step that makes an event.

        Raises:
          RuntimeError: no step is open.
          TypeError: `vitals` is no `Vitals`.
          TrainingStopped: the ladder has given up; every event is on the disk.
        """
        return self._turns.end(
            state,
            vitals,
            batch_id=batch_id,
            micro_batch=-1 if micro_batch is None else micro_batch,
            sample_ids=sample_ids,
        )

    def run(
        self,
        train_step: Callable[[Any, Any, Controls], tuple[Any, Vitals]],
        state: Any,
        batch_for_step: Callable[[int], Any] | Iterable[Any],
        *,
        after_step: Iterable[Callable[[int, Any], Any]] = (),
    ) -> Any:
        """The whole loop, for those who need no other; returns the last state.

        Args:
          train_step: `(state, batch, controls) -> (state, vitals)`.
          state: as for `steps`; an older run is resumed.
          batch_for_step: as for `steps`.
          after_step: called in order with the number of the step that runs next and
            the state that it starts from, for example to evaluate within `pause`.
        """
        state = self.resume(state, batch_for_step)
        for _, batch in self.steps(state, batch_for_step):
            state, vitals = train_step(state, batch, self.controls)
            state = self.end_step(state, vitals)
            for call in after_step:
                call(self._turns.step, state)
        return state

    @contextmanager
    def pause(self, text: str = "evaluation") -> Generator[None, None, None]:
        """Says that no step runs for a while: `with session.pause(): evaluate(state)`.

        Neither `hang_seconds` nor a supervisor's limit for steps counts meanwhile, and
        the time is that of no step.
        """
        begun = self._reporter.pause(self._turns.step, text)
        try:
            with self._watchdog.asleep():
                yield
        finally:
            self._watch.pace.rest()
            self._reporter.resume(self._turns.step, text, begun)

    def end_on_signal(self, *signals: int) -> None:
        """Ends the run with an emergency checkpoint when one of the signals comes.

        The step that runs is ended, judged and saved; then `end_step` raises
        `Preempted`, which leaves the process with `ExitCode.RESTART`. Call it in the
        main thread, and on every process of several: these compare notes at every 16th
        step, so that one that was asked takes the others along.

        Args:
          signals: for example `signal.SIGTERM`, which most schedulers send.
        """
        self._ending.listen(signals)

    def announce(self, text: str) -> None:
        """Says that data, batch size or schedule change now: their jump is no event.

        The ladder learns the level of the loss anew; call it on every process.
        """
        self.policy.expect_change()
        self._reporter.record(
            Event(action="announce", step=self._turns.step, text=text)
        )

    def summary(self) -> dict[str, Any]:
        """Counts, steps lost, skipped data and the newest events, ready for JSON."""
        return {
            "run": self.folder.run,
            "next_step": self._turns.step,
            "skipped_data": self._turns.skipped(),
            **self._watch.account.summary(),
            **self._reporter.summary(),
        }

    def close(self) -> None:
        """Reads what is in flight, waits for saves, and flushes everything."""
        self._close(in_order=True)

    def _close(self, in_order: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._watchdog.close()
        if in_order or jax.process_count() == 1:
            # After an error the other processes may be gone, and both ask for them.
            self._turns.read_rest()
            self._watch.finish(self._turns.step)
        account = self._watch.account
        text = f"{account.lost} of {account.observed} steps lost"
        self._reporter.record(Event(action="end", step=self._turns.step, text=text))
        self._reporter.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._ending.exit(self._turns.step, kind, error)
        self._close(in_order=error is None)

    def _begin(self, state: Any, batch_for_step: Any) -> None:
        kind = "start" if self.folder.is_new else "restart"
        self._turns.begin(state, batch_for_step, kind)
