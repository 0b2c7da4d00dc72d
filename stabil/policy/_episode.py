"""Where an event began, how long it has lasted, and what it was about."""

from __future__ import annotations

from stabil.policy._level import EXTREME, FAR, HIGH
from stabil.policy._rungs import Rung
from stabil.policy._words import BLOCK, WARN, Observation


class Episode:
    """One event: from the first warning until `quiet_steps` steps without trouble.

    A loss that stays far above its level for `quiet_steps` steps is one without any
    warning.

    Attributes:
      step: step at which the open event began, or None. When the loss had been high
        without a break before the first warning, the event began with it.
      first: first offending signal of the event, or None.
      causes: names of all causes of the event.
      high_steps: steps in a row whose loss was high, or 0 without an open event.
      extreme_steps: the same for extreme ones.
    """

    def __init__(self, quiet_steps: int):
        self._quiet_steps = quiet_steps
        self.close()

    def close(self) -> None:
        self.step: int | None = None
        self.first: str | None = None
        self.causes: set[str] = set()
        self._high_since: int | None = None
        self._high = self._far = self._extreme = self._quiet = 0

    @property
    def is_open(self) -> bool:
        return self.step is not None

    @property
    def is_quiet(self) -> bool:
        """Whether the newest step gave no trouble."""
        return self.step is None or self._quiet > 0

    @property
    def high_steps(self) -> int:
        return self._high if self.is_open else 0

    @property
    def extreme_steps(self) -> int:
        return self._extreme if self.is_open else 0

    def observe(self, seen: Observation, height: int) -> None:
        # A blocked step leaves the weights alone: it neither proves nor disproves that
        # the loss has come down.
        if seen.severity < BLOCK:
            self._count(seen.step, height)
        bad = seen.severity >= WARN
        # A run that diverges slowly moves what is usual along, and nothing warns.
        lasts = self._far >= self._quiet_steps
        if (bad or lasts) and self.step is None:
            self.step = seen.step if self._high_since is None else self._high_since
        if bad:
            self.first = self.first or seen.first
            self.causes |= set(seen.causes)
        self._quiet = 0 if bad or height >= HIGH else self._quiet + 1
        if self._quiet >= self._quiet_steps:
            self.close()

    def _count(self, step: int, height: int) -> None:
        if height < HIGH:
            self._high_since = None
        elif self._high_since is None:
            self._high_since = step
        self._high = self._high + 1 if height >= HIGH else 0
        self._far = self._far + 1 if height >= FAR else 0
        self._extreme = self._extreme + 1 if height >= EXTREME else 0


# Further blocked steps that a state which no step has changed is given.
_PATIENCE = 20


class Streaks:
    """Blocked steps in a row, counted for each rung's own causes.

    A state that was just restored, or that a run just began with, has not been changed
    as long as every step was blocked. What blocks is then the data and not the state:
    going back gains nothing, so a rollback waits `_PATIENCE` steps longer. It comes in
    the end, since the checkpoint may be bad after all. A parameter that has leapt is a
    fault of the state: going back is tried at once, but not a second time in a row.
    """

    def __init__(self, rungs: tuple[Rung, ...]):
        self._sets = {r.causes: frozenset(r.causes) for r in rungs}
        self.restart()
        self._is_restored = False

    def restart(self) -> None:
        """Begins with a restored state, which no step has changed yet."""
        self.clear()
        self._is_unchanged = self._is_restored = True

    def clear(self) -> None:
        self._lengths = dict.fromkeys(self._sets, 0)
        self.blocked_since: int | None = None

    def observe(self, seen: Observation) -> None:
        blocked = seen.severity >= BLOCK
        if not blocked:
            self.clear()
            self._is_unchanged = False
            return
        if self.blocked_since is None:
            self.blocked_since = seen.step
        for causes, members in self._sets.items():
            counts = not members or not members.isdisjoint(seen.causes)
            self._lengths[causes] = self._lengths[causes] + 1 if counts else 0

    def length(self, rung: Rung) -> int:
        return self._lengths[rung.causes]

    def is_due(self, rung: Rung, seen: Observation) -> bool:
        waits = self._is_unchanged and rung.kind == "rollback"
        waits &= self._is_restored or "parameter_leap" not in seen.causes
        if 0 < rung.blocked_steps <= self.length(rung) - waits * _PATIENCE:
            return True
        counts = not rung.causes or not set(rung.causes).isdisjoint(seen.causes)
        return 0 < rung.severity <= seen.severity and counts
