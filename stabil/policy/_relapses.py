"""Remembers rollbacks by their place, so that going back comes to an end."""

from __future__ import annotations

from typing import Any

from stabil.policy._advice import advise
from stabil.policy._words import Action, Observation

# Batches left out beyond the rolled-back ones at a first relapse, half as many; PaLM
# left out 200 to 500 (Chowdhery et al., 2022, section 5.1).
_SKIP_MORE = 50


class Relapses:
    """The rollbacks of a run.

    Two are at the same place when their events began within `reach` steps of each other
    and share a cause or the first offending signal.

    Attributes:
      rows: one record a rollback: `step` of the event, `target`, `window` of the data,
        `first` signal, `causes`.
    """

    def __init__(self, reach: int):
        self._reach = reach
        self.rows: list[dict[str, Any]] = []

    def near(self, start: int, seen: Observation) -> list[dict[str, Any]]:
        """The rollbacks at the place of an event that began at step `start`."""
        causes = set(seen.causes)
        return [
            row
            for row in self.rows
            if abs(row["step"] - start) <= self._reach
            and (row["first"] == seen.first or causes & set(row["causes"]))
        ]

    def note(
        self, start: int, seen: Observation, target: int, window: tuple[int, ...]
    ) -> None:
        """Adds a rollback that was carried out."""
        self.rows.append(
            dict(
                step=start,
                target=target,
                window=list(window),
                first=seen.first,
                causes=list(seen.causes),
            )
        )
        del self.rows[:-100]

    def numbers(self, start: int, seen: Observation, high_steps: int) -> dict[str, Any]:
        """How far to go back for an event, and how much data to leave out beyond it.

        The first time to before the event, and after a high loss as many batches more
        as were high; each further time to an older state, and twice as many more.
        """
        near = self.near(start, seen)
        return {
            "event_step": start,
            "before": near[-1]["target"] if near else start + 1,
            "relapses": len(near),
            "skip_more": _SKIP_MORE * 2 ** len(near) if near else high_steps,
        }

    def stop(
        self, start: int, seen: Observation, why: str, report_only: bool
    ) -> Action:
        """The end of the ladder, with advice and the rollbacks it rests on."""
        now = {"causes": list(seen.causes), "first": seen.first, "step": seen.step}
        evidence = [*self.near(start, seen), now]
        numbers = {"advice": list(advise(evidence)), "evidence": evidence}
        return Action("stop", why, numbers, report_only)
