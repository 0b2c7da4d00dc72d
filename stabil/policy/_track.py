"""What one group of a model has gone through: its event, its budgets, its relapses."""

from __future__ import annotations

from typing import Any

from stabil.policy._episode import Episode, Streaks
from stabil.policy._level import HIGH, NORMAL
from stabil.policy._relapses import Relapses
from stabil.policy._rungs import Ledger, Rung
from stabil.policy._words import BLOCK, OK, WARN, Observation


class Track:
    """The history of one group, which knows nothing of the others' troubles.

    Attributes:
      group: name of the group; empty for the whole model.
      ledger: uses of the rungs.
      episode: the open event.
      streaks: blocked steps in a row.
      relapses: rollbacks that were carried out.
      drifted_steps: steps in a row whose level of the loss had drifted up, counted for
        the whole model only.
    """

    def __init__(
        self, group: str, rungs: tuple[Rung, ...], quiet_steps: int, reach: int
    ):
        self.group, self._quiet_steps = group, quiet_steps
        self.ledger = Ledger()
        self.episode = Episode(quiet_steps)
        self.streaks = Streaks(rungs)
        self.relapses = Relapses(reach, quiet_steps)
        self.drifted_steps = 0

    def observe(
        self, seen: Observation, height: int, concerned: bool, drifts: bool
    ) -> None:
        """Takes one step in; `concerned` says whether it is about this group."""
        self.ledger.observe(seen.step)
        self.drifted_steps = self.drifted_steps + 1 if drifts and not self.group else 0
        if not concerned:
            if seen.severity >= BLOCK:
                return  # it changed nothing: neither for nor against this group
            seen = seen._replace(severity=OK, causes=(), first=None)
            # The loss is one for all, and a rise is no event of its own.
            height = height if self.episode.is_open else NORMAL
        self.episode.observe(seen, height)
        self.relapses.observe(seen.step, seen.severity < WARN and height < HIGH)
        self.streaks.observe(seen)

    def is_calm(self, seen: Observation) -> bool:
        """Whether no rung can be due, which saves asking each of them."""
        return (
            seen.severity <= OK
            and seen.damaged is None
            and seen.leapt is None
            and not self.episode.is_open
            and not self.drifted_steps
            and self.streaks.blocked_since is None
        )

    def may(self, rung: Rung, seen: Observation) -> bool:
        """Whether the rung is due and not cooling down."""
        due = self.streaks.is_due(rung, seen) or self.loss_is_due(rung)
        due = due or self.drift_is_due(rung)
        return due and not self.ledger.is_cooling(rung)

    def loss_is_due(self, rung: Rung) -> bool:
        high, extreme = self.episode.high_steps, self.episode.extreme_steps
        return 0 < rung.high_loss_steps <= high or (
            0 < rung.extreme_loss_steps <= extreme
        )

    def drift_is_due(self, rung: Rung) -> bool:
        return 0 < rung.drifted_steps <= self.drifted_steps

    def why(self, rung: Rung) -> str:
        """The trigger in words."""
        if self.loss_is_due(rung):
            return f"the loss stayed high for {self.episode.high_steps} steps"
        if self.drift_is_due(rung):
            return "the loss has risen slowly"
        steps = self.streaks.length(rung)
        return f"{steps} blocked steps in a row" if steps > 1 else "the verdict"

    def whole(self, seen: Observation) -> Observation:
        """The observation with the causes and the first signal of the whole event."""
        first = self.episode.first or seen.first
        causes = self.episode.causes | set(seen.causes)
        return seen._replace(first=first, causes=tuple(sorted(causes)))

    def start(self, seen: Observation) -> int:
        """The step at which what is wrong began."""
        if self.streaks.blocked_since is not None and not self.episode.high_steps:
            return self.streaks.blocked_since
        if self.episode.step is None:
            return seen.step
        # On noisy data an event may have been open for long; its beginning is then not
        # where the loss went wrong.
        recent = seen.step - self.episode.high_steps - 2 * self._quiet_steps
        return max(self.episode.step, recent)

    def renew(self) -> None:
        """Begins with another state."""
        self.episode.close()
        self.streaks.restart()
        self.drifted_steps = 0

    def get_state(self) -> dict[str, Any]:
        return {
            "seen": self.ledger.seen,
            "ledger": self.ledger.get_state(),
            "relapses": self.relapses.rows,
            "batches": self.relapses.batches,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.ledger.set_state(state["ledger"])
        self.ledger.seen = int(state["seen"])
        self.relapses.rows = list(state["relapses"])
        self.relapses.batches = dict(state.get("batches", {}))
