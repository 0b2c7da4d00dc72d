"""Decides, step by step, what is due: from a line in the log to the end of the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stabil.policy._episode import Episode, Streaks
from stabil.policy._level import LossLevel
from stabil.policy._rate import Rate
from stabil.policy._recorded import recorded, where
from stabil.policy._relapses import Relapses
from stabil.policy._rungs import FULL, Ledger, Rung, check_rungs
from stabil.policy._words import Action, Observation


class Ladder:
    """Turns one observation a step into actions, gentle ones first.

    What the device did (clip, skip, restart of moments) is reported, and every other
    verdict above OK logged. Beyond that the strongest rung that is due, has budget left
    and is not cooling down acts; a rollback without budget, or at a place that has
    relapsed `max_relapses` times, becomes a stop with advice. Plain arithmetic on what
    it is told, with no clock and no chance: processes that read the same observations
    decide the same.

    Args:
      rungs: interventions, gentle ones first.
      report_only: True writes all interventions down and does none.
      quiet_steps: steps without a warning or a high loss that end an event.
      healthy_after_steps: later steps without a warning after which a checkpoint
        counts as healthy.
      same_place_steps: rollbacks for events that begin within so many steps of each
        other, and share a cause or a layer, are relapses at one place.
      max_relapses: rollbacks at one place, after which the next stops the run.
      lowest_scale: bound that repeated cuts of the learning rate do not cross.

    Attributes:
      learning_rate_scale: what the next step's update is to be multiplied by.
      probe_level: 1 while probes are to read everything on every step, else 0.

    Raises:
      ValueError: a rung or number is out of range.
      TypeError: an entry of `rungs` is no `Rung`.

    Examples:
      >>> ladder = Ladder()
      >>> ladder.decide(Observation(6, loss=2.0))
      ()
      >>> bad = Observation(7, severity=3, causes=("nonfinite_loss",), first="loss")
      >>> for step in (7, 8, 9):
      ...     actions = ladder.decide(bad._replace(step=step))
      >>> [a.kind for a in actions], actions[-1].numbers["event_step"]
      (['skip', 'rollback'], 7)
    """

    def __init__(
        self,
        rungs: Iterable[Rung] = FULL,
        *,
        report_only: bool = False,
        quiet_steps: int = 20,
        healthy_after_steps: int = 20,
        same_place_steps: int = 100,
        max_relapses: int = 3,
        lowest_scale: float = 0.1,
    ):
        rungs = tuple(rungs)
        check_rungs(rungs)
        whole = dict(
            quiet_steps=quiet_steps,
            healthy_after_steps=healthy_after_steps,
            max_relapses=max_relapses,
        )
        for name, value in whole.items():
            if value < 1:
                raise ValueError(f"Ladder: needed {name} >= 1, got {value}")
        self.rungs = tuple(r._replace(report_only=True) for r in rungs)
        if not report_only:
            self.rungs = rungs
        self.report_only = report_only
        self.healthy_after_steps = healthy_after_steps
        self._max_relapses = max_relapses
        self._level = LossLevel()
        self._ledger = Ledger()
        self._quiet_steps = quiet_steps
        self._episode = Episode(quiet_steps)
        self._streaks = Streaks(self.rungs)
        self._rate = Rate(lowest_scale)
        self._look_until = -1
        self._relapses = Relapses(same_place_steps)

    @property
    def learning_rate_scale(self) -> float:
        return self._rate.scale

    @property
    def probe_level(self) -> int:
        return int(self._ledger.seen < self._look_until)

    @property
    def event_open(self) -> bool:
        """Whether something is wrong, or was within the last `quiet_steps` steps."""
        return self._episode.is_open

    @property
    def in_trouble(self) -> bool:
        """Whether the newest step was bad, or its loss high within an event."""
        return not self._episode.is_quiet

    def decide(self, observation: Observation) -> tuple[Action, ...]:
        """The actions that this step calls for, gentle ones first; often none.

        Settings that last are read from `learning_rate_scale` and `probe_level`. After
        carrying out a `rollback`, call `rolled_back`.
        """
        self._ledger.observe(observation.step)
        height = self._level.observe(observation.loss)
        self._episode.observe(observation, height)
        self._streaks.observe(observation)
        actions = recorded(observation)
        for rung in self.rungs:
            due = rung.kind == "look" and self._may(rung, observation)
            if due and self._ledger.left(rung):
                actions.append(self._act(rung, observation, "verdict"))
        actions += self._intervene(observation)
        if self._rate.ease(self._episode.is_quiet):
            numbers = {"learning_rate_scale": 1.0}
            actions.append(Action("return", "the learning rate is back", numbers))
        return tuple(actions)

    def rolled_back(
        self, observation: Observation, target: int, window: tuple[int, ...]
    ) -> None:
        """Takes note that the state of step `target` runs again without `window`.

        Args:
          observation: the one that called for the rollback.
          target: step that runs next.
          window: first and last position of the data that is skipped.
        """
        seen, start = self._whole(observation), self._start(observation)
        cuts = [r for r in self.rungs if r.kind == "cut" and not r.report_only]
        if self._relapses.near(start, seen) and cuts:
            self._rate.cut(cuts[0].amount, cuts[0].lasting_steps)
        self._relapses.note(start, seen, target, window)
        self._episode.close()
        self._streaks.restart()

    def expect_change(self) -> None:
        """Announces a change of data, batch size or schedule: re-learns the level."""
        self._level.forget()
        self._episode.close()

    def get_state(self) -> dict[str, Any]:
        """Everything that must survive a restart, ready for JSON."""
        return {
            "seen": self._ledger.seen,
            "ledger": self._ledger.get_state(),
            "level": self._level.get_state(),
            "rate": self._rate.get_state(),
            "relapses": self._relapses.rows,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._ledger.set_state(state["ledger"])
        self._ledger.seen = int(state["seen"])
        self._level.set_state(state["level"])
        self._rate.set_state(state["rate"])
        self._relapses.rows = list(state["relapses"])

    def _may(self, rung: Rung, seen: Observation) -> bool:
        due = self._streaks.is_due(rung, seen) or self._loss_is_due(rung)
        return due and not self._ledger.is_cooling(rung)

    def _loss_is_due(self, rung: Rung) -> bool:
        high, extreme = self._episode.high_steps, self._episode.extreme_steps
        return 0 < rung.high_loss_steps <= high or (
            0 < rung.extreme_loss_steps <= extreme
        )

    def _intervene(self, seen: Observation) -> list[Action]:
        if seen.damaged is not None:
            return [self._save_damaged(seen)]
        for rung in reversed(self.rungs):
            if rung.kind == "look" or not self._may(rung, seen):
                continue
            if rung.kind == "rollback":
                if seen.can_roll_back:
                    return [self._roll_back(rung, seen)]
            elif self._ledger.left(rung) and not (
                rung.kind == "cut" and self._rate.is_lowest
            ):
                return [self._act(rung, seen, self._why(rung))]
        return []

    def _save_damaged(self, seen: Observation) -> Action:
        why = f"{seen.damaged} is not finite, so that skipping steps is of no use"
        rungs = [r for r in self.rungs if r.kind == "rollback"]
        if rungs and seen.can_roll_back:
            return self._roll_back(rungs[0], seen, why)
        why += "" if rungs else "; the ladder has no rollback"
        why += "" if seen.can_roll_back else "; there is no checkpoint to go back to"
        return self._stop(seen, why, self.report_only)

    def _roll_back(self, rung: Rung, seen: Observation, why: str = "") -> Action:
        start = self._start(seen)
        why = why or self._why(rung)
        near = len(self._relapses.near(start, self._whole(seen)))
        left = self._ledger.left(rung)
        self._ledger.use(rung)
        if near >= self._max_relapses:
            why = f"{near} rollbacks near step {start} did not help: {why}"
            return self._stop(seen, why, rung.report_only)
        if not left:
            why = f"the budget of {rung.budget} rollbacks is spent: {why}"
            return self._stop(seen, why, rung.report_only)
        high = self._episode.high_steps
        numbers = self._relapses.numbers(start, self._whole(seen), high)
        return Action("rollback", f"{why}{where(seen)}", numbers, rung.report_only)

    def _act(self, rung: Rung, seen: Observation, why: str) -> Action:
        self._ledger.use(rung)
        if rung.kind == "stop":
            return self._stop(seen, why, rung.report_only)
        numbers: dict[str, Any] = {}
        if rung.kind == "look":
            numbers["steps"] = rung.lasting_steps
            if not rung.report_only:
                self._look_until = self._ledger.seen + rung.lasting_steps
        if rung.kind == "cut":
            numbers["from_scale"] = self._rate.scale
            if not rung.report_only:
                self._rate.cut(rung.amount, rung.lasting_steps)
            numbers["learning_rate_scale"] = self._rate.scale
        return Action(rung.kind, f"{why}{where(seen)}", numbers, rung.report_only)

    def _stop(self, seen: Observation, why: str, report_only: bool) -> Action:
        start = self._start(seen)
        return self._relapses.stop(start, self._whole(seen), why, report_only)

    def _whole(self, seen: Observation) -> Observation:
        """The observation with the causes and the first signal of the whole event."""
        first = self._episode.first or seen.first
        causes = self._episode.causes | set(seen.causes)
        return seen._replace(first=first, causes=tuple(sorted(causes)))

    def _start(self, seen: Observation) -> int:
        """The step at which what is wrong now began."""
        if self._streaks.blocked_since is not None and not self._episode.high_steps:
            return self._streaks.blocked_since
        if self._episode.step is None:
            return seen.step
        # On noisy data an event may have been open for long; its beginning is then not
        # where the loss went wrong.
        recent = seen.step - self._episode.high_steps - 2 * self._quiet_steps
        return max(self._episode.step, recent)

    def _why(self, rung: Rung) -> str:
        if self._loss_is_due(rung):
            return f"the loss stayed high for {self._episode.high_steps} steps"
        steps = self._streaks.length(rung)
        return f"{steps} blocked steps in a row" if steps > 1 else "the verdict"
