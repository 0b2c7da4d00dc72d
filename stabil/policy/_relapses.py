"""Remembers rollbacks by their place and batch, so that going back comes to an end."""

from __future__ import annotations

from typing import Any

from stabil.policy._advice import advise
from stabil.policy._words import OK, Action, Observation

# Batches left out beyond the rolled-back ones at a first relapse, half as many; PaLM
# left out 200 to 500 (Chowdhery et al., 2022, section 5.1).
_SKIP_MORE = 50
_MOST_ROWS, _MOST_BATCHES = 100, 1000


class Relapses:
    """The rollbacks of a run, and the batches that were at fault.

    A rollback is near another when their events began within `reach` steps of each
    other and share a cause or the first offending signal; or when the same batch was at
    fault, however far apart. It is a relapse when, besides, the run has not got past
    that place: `good_steps` steps in a row beyond it that were good, which is what
    makes a checkpoint healthy. Bad batches that come often are then an event each.

    Attributes:
      rows: one record a rollback: `step` of the event, `target`, `window` of the data,
        `first` signal, `causes`, `batch` at fault, and `passed`, whether the run has
        got past the place since.
      batches: batch to the last step at which it was at fault; the newest 1,000.
    """

    def __init__(self, reach: int, good_steps: int):
        self._reach, self._good_steps = reach, good_steps
        self._good_in_a_row = 0
        self.rows: list[dict[str, Any]] = []
        self.batches: dict[str, int] = {}

    def observe(self, step: int, is_good: bool) -> None:
        """Takes one step in."""
        self._good_in_a_row = self._good_in_a_row + 1 if is_good else 0
        if self._good_in_a_row < self._good_steps:
            return
        for row in self.rows:
            if step >= row["step"] + self._good_steps:
                row["passed"] = True

    def near(self, start: int, seen: Observation) -> list[dict[str, Any]]:
        """The rollbacks at the place of an event that began at step `start`."""
        causes, batch = set(seen.causes), batch_name(seen)
        return [
            row
            for row in self.rows
            if (batch is not None and row.get("batch") == batch)
            or abs(row["step"] - start) <= self._reach
            and (row["first"] == seen.first or causes & set(row["causes"]))
        ]

    def at(self, start: int, seen: Observation) -> list[dict[str, Any]]:
        """Those of them that an event makes a relapse."""
        batch = batch_name(seen)
        return [
            row
            for row in self.near(start, seen)
            if not row.get("passed")
            or (batch is not None and row.get("batch") == batch)
        ]

    def again(self, seen: Observation) -> list[Action]:
        """A line when a batch at fault was so before; remembers it either way."""
        batch = batch_name(seen)
        if seen.severity <= OK or batch is None:
            return []
        earlier = self.batches.pop(batch, None)
        self.batches[batch] = seen.step
        if len(self.batches) > _MOST_BATCHES:
            del self.batches[next(iter(self.batches))]
        if earlier is None:
            return []
        text = f"batch {batch} was at fault before, at step {earlier}"
        return [Action("log", text, {"batch": batch, "earlier_step": earlier})]

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
                batch=batch_name(seen),
                passed=False,
            )
        )
        self._good_in_a_row = 0
        del self.rows[:-_MOST_ROWS]

    def numbers(self, start: int, seen: Observation, high_steps: int) -> dict[str, Any]:
        """How far to go back for an event, and how much data to leave out beyond it.

        The first time to before the event, and after a high loss as many batches more
        as were high; each further time to an older state, and twice as many more.
        """
        rows = self.at(start, seen)
        before = min(rows[-1]["target"], start + 1) if rows else start + 1
        return {
            "event_step": start,
            "before": before,
            "relapses": len(rows),
            "skip_more": _SKIP_MORE * 2 ** len(rows) if rows else high_steps,
        }

    def stop(
        self, start: int, seen: Observation, why: str, report_only: bool, group: str
    ) -> Action:
        """The end of the ladder, with advice and the rollbacks it rests on."""
        now = dict(
            causes=list(seen.causes),
            first=seen.first,
            step=seen.step,
            batch=batch_name(seen),
        )
        evidence = [*self.near(start, seen), now]
        numbers = {"advice": list(advise(evidence, group)), "evidence": evidence}
        return Action("stop", why, numbers, report_only)


def batch_name(seen: Observation) -> str | None:
    """What names the batch across restarts and epochs, or None."""
    if seen.batch_id is not None:
        return seen.batch_id
    return str(seen.data_index) if seen.data_index >= 0 else None
