"""What happened in a run, as records that a person or a program can read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

# Every kind that `find_events` tells apart, with what it means.
KINDS = {
    "nonfinite": "the loss or the gradient norm is NaN or infinite",
    "diverge": "the loss rises and the log ends before it is back",
    "spike": "the loss rises and comes back by itself",
    "level_shift": "the loss settles at a higher level",
    "restart": "the loss is back where the run began, or the step counter goes back",
    "hard_batch": "one high loss, gone with the next row",
    "gradient_blip": "the gradient norm rises, the loss does not",
    "data_pattern": "the loss repeats itself, as it does on data that is not shuffled",
    "plateau": "for half the run so far the loss stood still",
    "drift": "the loss or the gradient norm rises slowly, over hundreds of rows",
    "limit": "a signal passes the limit of its calibrated range",
}


class Event(NamedTuple):
    """One thing that happened.

    Attributes:
      kind: one of `KINDS`.
      severity: 1 watch, 2 warn, 3 block.
      start: first step.
      peak: step of the largest value.
      end: last step.
      level: value that was normal before, in the unit of the signal; NaN if unknown.
      height: largest value over the level: a ratio; a difference if the run has
        negative losses; the period of a data pattern, in steps; NaN if unknown.
      recovery: steps from the peak to the end; NaN if the log ends before.
      lead: steps by which the gradient norm was out of line before the loss; 0 if not.

    Examples:
      >>> print(Event("spike", 2, 100, 102, 120, 2.0, 3.5, 18, 4))
      warn spike at 100, peak 3.5x at 102, back after 18 steps, gradient 4 steps ahead
    """

    kind: str
    severity: int
    start: float
    peak: float
    end: float
    level: float
    height: float
    recovery: float
    lead: float = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not a finite number is None."""
        plain = self._asdict()
        return {k: None if _nan(v) else _whole(v) for k, v in plain.items()}

    def __str__(self) -> str:
        word = ("ok", "watch", "warn", "block")[self.severity]
        text = f"{word} {self.kind} at {_whole(self.start)}"
        if self.kind == "data_pattern":
            text += f", period {self.height:.3g}"
        elif self.kind in ("nonfinite", "plateau"):
            text += f" to {_whole(self.end)}"
        elif not math.isnan(self.height):
            text += f", peak {self.height:.3g}x at {_whole(self.peak)}"
        if self.kind == "spike":
            text += f", back after {_whole(self.recovery)} steps"
        if self.lead:
            text += f", gradient {_whole(self.lead)} steps ahead"
        return text


def _nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _whole(value: Any) -> Any:
    """`value` as an int where it is a whole float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
