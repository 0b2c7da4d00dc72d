"""Which rung acts on a step, and what its action says."""

from __future__ import annotations

from typing import Any

from stabil.policy._choice import Choice, Price
from stabil.policy._rate import Rate
from stabil.policy._recorded import where
from stabil.policy._rungs import Rung
from stabil.policy._track import Track
from stabil.policy._words import Action, Observation


class Interventions:
    """The rungs of one ladder at work on the group that a step is about.

    Attributes:
      rungs: gentle ones first.
      rate: what the learning rate is multiplied by.
      choice: weighs waiting against a rollback.
      look_until: observed steps up to which probes look closer.
    """

    def __init__(
        self, rungs: tuple[Rung, ...], rate: Rate, choice: Choice, max_relapses: int
    ):
        self.rungs, self.rate, self.choice = rungs, rate, choice
        self._max_relapses = max_relapses
        self.look_until = -1

    @property
    def report_only(self) -> bool:
        return all(r.report_only for r in self.rungs)

    def only_report(self) -> None:
        self.rungs = tuple(r._replace(report_only=True) for r in self.rungs)

    def look(self, track: Track, seen: Observation) -> list[Action]:
        """Closer looks, which come beside any other intervention."""
        return [
            self._act(rung, track, seen, "verdict")
            for rung in self.rungs
            if rung.kind == "look" and track.may(rung, seen) and track.ledger.left(rung)
        ]

    def strongest(
        self, track: Track, seen: Observation, costs: Price | None
    ) -> list[Action]:
        """The strongest rung that is due; before it a wait that came instead of one."""
        if seen.damaged is not None:
            return [self._save_damaged(track, seen)]
        if seen.leapt is not None and seen.can_roll_back:
            why = f"{seen.leapt} has entries that no update has made"
            for rung in self.rungs:
                if rung.kind == "rollback":
                    return [self._roll_back(rung, track, seen, {}, why)]
        waits: list[Action] = []
        for rung in reversed(self.rungs):
            if rung.kind == "look" or not track.may(rung, seen):
                continue
            if rung.kind == "rollback":
                if not seen.can_roll_back:
                    continue
                numbers, wait = self._weigh(rung, track, seen, costs)
                if not wait:
                    return [*waits, self._roll_back(rung, track, seen, numbers)]
                waits += [_wait(rung, track, numbers)] if numbers else []
            elif track.ledger.left(rung) and not (
                rung.kind == "cut" and self.rate.is_lowest
            ):
                return [*waits, self._act(rung, track, seen, track.why(rung))]
        return waits

    def slow_down(self, again: bool, drifted: bool) -> None:
        """Cuts the rate after a rollback to a state that would go wrong again."""
        for rung in self.rungs:
            wanted = drifted if rung.drifted_steps else again
            if rung.kind == "cut" and not rung.report_only and wanted:
                self.rate.cut(rung.amount, rung.lasting_steps)
                return

    def _weigh(
        self, rung: Rung, track: Track, seen: Observation, costs: Price | None
    ) -> tuple[dict[str, Any], bool]:
        """The numbers of a choice, where there is one, and whether to wait."""
        if costs is None or track.streaks.is_due(rung, seen):
            return {}, False
        start, high = track.start(seen), track.episode.high_steps
        goal = track.relapses.numbers(start, track.whole(seen), high)
        question = {name: goal[name] for name in ("event_step", "before")}
        return self.choice.weigh(costs, question, high, track.ledger.seen)

    def _save_damaged(self, track: Track, seen: Observation) -> Action:
        why = f"{seen.damaged} is not finite, so that skipping steps is of no use"
        rungs = [r for r in self.rungs if r.kind == "rollback"]
        if rungs and seen.can_roll_back:
            return self._roll_back(rungs[0], track, seen, {}, why)
        why += "" if rungs else "; the ladder has no rollback"
        why += "" if seen.can_roll_back else "; there is no checkpoint to go back to"
        return self._stop(track, seen, why, self.report_only)

    def _roll_back(
        self,
        rung: Rung,
        track: Track,
        seen: Observation,
        weighed: dict[str, Any],
        why: str = "",
    ) -> Action:
        start = track.start(seen)
        why = why or track.why(rung)
        relapses = len(track.relapses.at(start, track.whole(seen)))
        left = track.ledger.left(rung)
        track.ledger.use(rung)
        if relapses >= self._max_relapses:
            why = f"{relapses} rollbacks near step {start} did not help: {why}"
            return self._stop(track, seen, why, rung.report_only)
        if not left:
            why = f"the budget of {rung.budget} rollbacks is spent: {why}"
            return self._stop(track, seen, why, rung.report_only)
        high = track.episode.high_steps
        numbers = weighed | track.relapses.numbers(start, track.whole(seen), high)
        return Action("rollback", f"{why}{where(seen)}", numbers, rung.report_only)

    def _act(self, rung: Rung, track: Track, seen: Observation, why: str) -> Action:
        track.ledger.use(rung)
        if rung.kind == "stop":
            return self._stop(track, seen, why, rung.report_only)
        numbers: dict[str, Any] = {}
        if rung.kind == "look":
            numbers["steps"] = rung.lasting_steps
            if not rung.report_only:
                self.look_until = track.ledger.seen + rung.lasting_steps
        if rung.kind == "cut":
            numbers["from_scale"] = self.rate.scale
            if not rung.report_only:
                self.rate.cut(rung.amount, rung.lasting_steps)
            numbers["learning_rate_scale"] = self.rate.scale
        return Action(rung.kind, f"{why}{where(seen)}", numbers, rung.report_only)

    def _stop(
        self, track: Track, seen: Observation, why: str, report_only: bool
    ) -> Action:
        why += f" in {track.group}" if track.group else ""
        start, whole = track.start(seen), track.whole(seen)
        return track.relapses.stop(start, whole, why, report_only, track.group)


def _wait(rung: Rung, track: Track, numbers: dict[str, Any]) -> Action:
    p, steps = numbers["recovery_probability"], numbers["wait_steps"]
    why = (
        f"{track.why(rung)}; a rollback costs {numbers['rollback_seconds']:.0f} "
        f"seconds, and with probability {p:.2f} the loss is back within {steps} steps"
    )
    return Action("wait", why, numbers, rung.report_only)
