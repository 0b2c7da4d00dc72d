"""Tags of steps, wherever they are: on disk, in memory, or on the way."""

from __future__ import annotations

import math

from stabil.checkpoints import _offline, _processes
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._memory import Ring
from stabil.checkpoints._mirror import Mirror
from stabil.checkpoints._saver import Saver
from stabil.checkpoints._verdict import Verdict


class Judge:
    """Gives and tells tags; see the methods of `Keeper` with the same names.

    With several processes each method is a collective: the first one decides.
    """

    def __init__(self, folder: Folder, ring: Ring, saver: Saver, mirror: Mirror):
        self._folder, self._ring = folder, ring
        self._saver, self._mirror = saver, mirror

    def mark(self, step: int, verdict: Verdict) -> str:
        """See `Keeper.mark`."""
        _offline.require_tag(verdict.tag)
        with self._saver.lock:
            snapshot = self._ring.find(step)
            if snapshot is not None:
                finite = math.isfinite(verdict.metric or 0)
                ill = verdict.tag == "healthy" and (
                    not finite or bool(snapshot.nonfinite())
                )
                snapshot.tag = "suspect" if _processes.anywhere(ill) else verdict.tag
            return _processes.decide(lambda: self._mark(step, verdict))

    def _mark(self, step: int, verdict: Verdict) -> str:
        if step in self._folder.steps():
            try:
                tag = self._folder.tag(step, *verdict)
            except OSError as error:
                raise self._saver.not_written(f"tag of step {step}", error) from error
            self._mirror.push()
            return tag
        if self._saver.in_flight(step):
            self._saver.judge_on_landing(verdict)
            return "pending"
        return self._elsewhere(step)

    def tag(self, step: int) -> str:
        """See `Keeper.tag`."""
        return _processes.decide(lambda: self._tag(step))

    def _tag(self, step: int) -> str:
        if step in self._folder.steps():
            return self._folder.health(step)["tag"]
        if self._saver.in_flight(step):
            return "pending"
        if self._ring.find(step) is None and any(
            step == s for _, s in self._folder.quarantined()
        ):
            return "quarantined"
        return self._elsewhere(step)

    def _elsewhere(self, step: int) -> str:
        snapshot = self._ring.find(step)
        if snapshot is None:
            raise ValueError(_offline.no_such_step(self._folder, step))
        return snapshot.tag

    def steps(self) -> dict[int, str]:
        """See `Keeper.steps`."""
        pairs = _processes.decide(lambda: [*self._folder.tags().items()])
        return {int(step): tag for step, tag in pairs}

    def newest_healthy(self, before: int | None = None) -> int | None:
        """See `Keeper.newest_healthy`."""
        steps = [s for s, tag in self.steps().items() if tag == "healthy"]
        steps += self._ring.healthy()
        return max((s for s in steps if before is None or s < before), default=None)
