"""Which checkpoints have proved healthy: only later steps can tell."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class _Waiting:
    clean: int = 0  # steps in a row without trouble
    seen: int = 0
    bad: int = 0
    in_event: bool = False  # saved while one was open
    tag: str = "pending"


class HealthTags:
    """Promotes and demotes a keeper's steps by what is observed after them.

    A saved step is `pending`. After `after_steps` observed steps in a row without
    trouble it is `healthy`. Trouble before that makes it `suspect`, since what went
    wrong may be older than its symptom. A suspect that survives `after_steps` clean
    steps becomes healthy after all; so does one that has seen ten times as many with
    fewer than one bad in five, or noisy data would leave no step to go back to. A step
    saved amid an event does so only while the event lasts, which then is noise; when
    the loss has come down since, the step itself has not, and it stays suspect.

    Args:
      keeper: a `stabil.checkpoints.Keeper`.
      after_steps: see above; bounded by the keeper's own cadence, so that each step can
        be promoted before the next is saved.
    """

    def __init__(self, keeper: Any, after_steps: int):
        self._keeper = keeper
        cadence = getattr(keeper, "save_every", None) or after_steps
        self.after_steps = max(1, min(after_steps, int(cadence)))
        self._waiting: dict[int, _Waiting] = {}
        self._refused = False
        self._problem: Exception | None = None

    def saved(self, step: int, in_event: bool = False) -> None:
        """Begins to watch over a step that the keeper has taken."""
        self._waiting[step] = _Waiting(in_event=in_event)

    def observe(
        self, observed: int, trouble: bool, cause: str, in_event: bool = False
    ) -> None:
        """Counts step `observed` for every saved step that waits for its tag.

        Saved step `n` starts step `n`: an earlier one tells against it, not for it.
        """
        for step, entry in list(self._waiting.items()):
            if observed < step and not trouble:
                continue
            entry.seen += 1
            entry.bad += trouble
            entry.clean = 0 if trouble else entry.clean + 1
            if entry.in_event and not in_event:
                if self._mark(step, "suspect", "saved amid an event that is over"):
                    del self._waiting[step]
            elif trouble and entry.tag == "pending":
                if self._mark(step, "suspect", cause):
                    entry.tag = "suspect"
            elif (entry.clean >= self.after_steps and not entry.in_event) or (
                entry.seen >= 10 * self.after_steps and entry.bad * 5 < entry.seen
            ):
                if self._mark(step, "healthy", f"survived {entry.seen} later steps"):
                    del self._waiting[step]

    def rolled_back(self, target: int) -> None:
        """Forgets steps after `target`: the keeper has quarantined them."""
        self._waiting = {s: w for s, w in self._waiting.items() if s <= target}

    def finish(self) -> None:
        """Promotes what is still pending at the end of a run without an open event."""
        for step, entry in self._waiting.items():
            if entry.tag == "pending" and not entry.in_event:
                self._mark(step, "healthy", "the run ended without an open event")
        self._waiting.clear()

    def take_problem(self) -> Exception | None:
        """What a disk that began to refuse tags has said, once; None if none did."""
        problem, self._problem = self._problem, None
        return problem

    def _mark(self, step: int, tag: str, cause: str) -> bool:
        """Whether the verdict is given; one that a disk refused is given again."""
        try:
            self._keeper.mark(step, tag, cause)
        except ValueError:
            pass  # The keeper has removed the step since, or failed to write it.
        except (OSError, RuntimeError) as error:
            if not self._refused:
                self._problem = error
            self._refused = True
            return False
        self._refused = False
        return True
