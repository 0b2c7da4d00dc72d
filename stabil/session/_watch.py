"""Reads vitals, asks the ladder, and carries out what it says."""

from __future__ import annotations

import functools
from typing import Any

import jax

from stabil.policy import Action, Ladder, Observation
from stabil.session._account import Account
from stabil.session._black_box import BlackBox
from stabil.session._data import Data
from stabil.session._flight import (
    DamageCheck,
    InFlight,
    fetch,
    number,
    to_observation,
    worst,
)
from stabil.session._leaps import LeapCheck
from stabil.session._pace import Pace
from stabil.session._reporter import Reporter
from stabil.session._rescue import Rescue, Return
from stabil.session._stop import TrainingStopped
from stabil.session._watchdog import Watchdog
from stabil.telemetry import Event, RunFolder
from stabil.vocabulary import Vitals

_LONGEST_POSTPONEMENT = 50  # steps
_SATURATED = 2**31 - 1  # where a tally stops to count


class Watch:
    """The part of a session that judges and acts.

    Attributes:
      account: steps lost so far.
      rescue: checkpoints and data position.
      pace: times of steps and loads.
    """

    def __init__(
        self,
        folder: RunFolder,
        keeper: Any,
        policy: Ladder,
        reporter: Reporter,
        watchdog: Watchdog,
    ):
        self.account = Account()
        self.pace = Pace()
        self.rescue = Rescue(keeper, policy, folder, self.pace)
        self._policy, self._reporter, self._watchdog = policy, reporter, watchdog
        self._black_box = BlackBox()
        self._is_alone = jax.process_count() == 1
        self._judged = -1
        self._damage, self._leaps = DamageCheck(), LeapCheck()
        self._data: Any = None  # `Data` from `begin` on
        self._resets = self._postponed = 0
        self._reset_due = self._is_due = self._is_put_off = False

    def begin(self, state: Any, data: Data) -> Return | None:
        """Takes the data over, and resumes an older run where there is one."""
        self._data = data
        if self.rescue.keeper is not None:
            self._damage.begin(state)
        return self.rescue.begin(state, data)

    def take_reset(self) -> bool:
        """Whether the next step is to restart the moments; once per request."""
        due, self._reset_due = self._reset_due, False
        return due

    def observe(
        self, flown: InFlight, state: Any, next_step: int, is_kept: bool = False
    ) -> Return | None:
        """Reads one step's vitals and acts on them.

        Args:
          flown: the step, which may still be running.
          state: the newest state, or None when the loop has ended and it is too late
            for anything but a line in the log.
          next_step: step that would run next.
          is_kept: whether the state is about to be saved, or the run's last: all of it
            is looked at then, since the guard sees but a part of the parameters.

        Returns:
          Where to go back to, or None to go on.

        Raises:
          TrainingStopped: the ladder has given up.
        """
        vitals, at_fault = worst(fetch(flown.vitals))
        if at_fault >= 0:
            flown = flown._replace(micro_batch=at_fault)
        if self._is_old(vitals):
            return None
        can_roll_back = self.rescue.keeper is not None
        seen = to_observation(flown, vitals, self._resets, can_roll_back)
        self._resets = number(vitals.tally.resets)
        if state is not None:
            seen = self._damage(seen, state, is_kept and can_roll_back)
            if can_roll_back:
                seen = self._leaps(seen, state, vitals.signals, is_kept)
        self._black_box.take(seen)
        costs = functools.partial(self.rescue.price, next_step=next_step)
        actions = self._policy.decide(self._shared(seen), costs)
        self.account.observe(seen)
        if self.rescue.tags:
            self.rescue.tags.observe(
                seen.step,
                self._policy.in_trouble,
                ", ".join(seen.causes),
                in_event=self._policy.event_open,
            )
            problem = self.rescue.tags.take_problem()
            if problem is not None:
                self._failed_save(seen.step, problem)
        found = None
        for action in actions:
            if state is None and action.kind in ("rollback", "stop"):
                action = action._replace(report_only=True)
            if action.kind == "rollback" and not action.report_only:
                self._black_box.open(action, vitals)
                found = self._roll_back(action, seen, state, next_step)
            elif action.kind == "stop":
                self._black_box.open(action, vitals)
                self._stop(action, seen, state, next_step)
            else:
                self._carry_out(action, seen)
        self._reporter.step(seen, vitals)
        return found

    def end_of_step(self, step: int) -> None:
        """Notes that the training thread has got through a step."""
        self.pace.lap()
        self._watchdog.beat()
        self._reporter.beat(step)

    def is_about_to_save(self, step: int) -> bool:
        """Whether a save is due that no step judged so far puts off."""
        self._is_due = self.rescue.is_due(step)
        self._is_put_off = self._is_due and self._puts_off()
        return self._is_due and not self._is_put_off

    def save(self, step: int, state: Any, is_last: bool) -> None:
        """Offers a state to the keeper; one amid an event only after a while.

        Raises:
          Exception: what the keeper raised, when it has failed three times in a row
            and for twice its cadence: a run that cannot be saved must not go on.
        """
        # What was put off before the newest step was judged still is.
        if self._is_due and not is_last and (self._is_put_off or self._puts_off()):
            self._postponed += 1
            return
        try:
            # Bounded, since a save of several processes waits for all of them.
            with self._watchdog.patient():
                taken = self.rescue.save(step, state, self._data, force=is_last)
            if taken:
                self._postponed = 0
        except Exception as error:
            self._failed_save(step, error)
            if self.rescue.gives_up(step):
                self._reporter.log.flush()
                raise

    def _puts_off(self) -> bool:
        # Worth little, but trouble that lasts must not end saving for good.
        waits = self._postponed + 1 < _LONGEST_POSTPONEMENT
        return waits and not self._policy.is_settled

    def finish(self, step: int) -> None:
        """Waits for the last save and tags it; a failure is told and not raised."""
        try:
            wrong = self._policy.event_open or self._policy.in_trouble
            self.rescue.finish(healthy=not wrong)
        except Exception as error:
            self._failed_save(step, error)

    def _shared(self, seen: Observation) -> Observation:
        """What all processes know of a step, for decisions to rest on.

        Several may each call their part of a batch by another name.
        """
        return seen if self._is_alone else seen._replace(batch_id=None)

    def _is_old(self, vitals: Vitals) -> bool:
        """Whether the guard has judged nothing since: a micro-batch was accumulated."""
        judged = number(vitals.tally.judged_steps)
        is_old = 0 < judged == self._judged < _SATURATED
        self._judged = judged
        return is_old

    def _carry_out(self, action: Action, seen: Observation) -> None:
        self._reporter.action(action, seen)
        if action.report_only:
            return
        if action.kind == "reset" and action.numbers.get("by") != "device":
            self._reset_due = True

    def _stop(
        self, action: Action, seen: Observation, state: Any, next_step: int
    ) -> None:
        self._reporter.action(action, seen)
        if action.report_only:
            return
        if state is not None:
            self._save_evidence(action, state, next_step)
        self._reporter.log.flush()
        advice = action.numbers.get("advice", ())
        raise TrainingStopped(action.reason, advice, seen.causes)

    def _save_evidence(self, action: Action, state: Any, step: int) -> None:
        cause = f"the run was stopped: {action.reason}"
        try:
            with self._watchdog.patient():
                saved = self.rescue.save_evidence(step, state, self._data, cause)
        except Exception as error:  # the reason of the stop is what must be heard
            self._failed_save(step, error)
            return
        if saved:
            text = "the last state is saved, as a suspect, to be looked at"
            event = Event(action="emergency_save", step=step, text=text)
            self._reporter.record(event)

    def _roll_back(
        self, action: Action, seen: Observation, state: Any, next_step: int
    ) -> Return:
        try:
            newest = self._data.position - 1
            with self._watchdog.asleep():
                try:
                    self.rescue.settle()
                except Exception as error:  # older steps may still be there
                    self._failed_save(next_step, error)
                found = self.rescue.roll_back(action, self._data, newest)
        except Exception as error:
            reason = f"{action.reason}; the rollback failed: {error}"
            # A save of several processes needs all of them, and this one may be alone
            # with its error.
            state = state if self._is_alone else None
            self._stop(Action("stop", reason, action.numbers), seen, state, next_step)
            raise
        self._policy.rolled_back(
            self._shared(seen), found.step, found.window, found.policy
        )
        self.account.rolled_back(found.step, next_step)
        action.numbers.update(to_step=found.step, skipped=list(found.window))
        self._reporter.action(action, seen)
        self.rescue.note(self._data)
        self._damage.forget()
        self._judged = -1
        self._reporter.log.flush()
        return found

    def _failed_save(self, step: int, error: Exception) -> None:
        text = f"checkpoint {step}: {type(error).__name__}: {error}"
        self._reporter.record(Event(action="save_failed", step=step, text=text))
