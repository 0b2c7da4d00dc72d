"""What the ladder reads and what it answers: plain records, no arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

# Mirrors of `stabil.vocabulary.Severity`, which lives beside arrays; a test holds the
# two together.
OK, WATCH, WARN, BLOCK = 0, 1, 2, 3


class Observation(NamedTuple):
    """One judged step in plain Python values; every process must read the same.

    Attributes:
      step: number of the step, counted from 0.
      severity: 0 ok, 1 watch, 2 warn, 3 block.
      causes: lower-case names of `stabil.Cause` members, in bit order.
      first: name of the first offending signal, or None.
      loss: loss of the step, in its own unit; NaN when not measured.
      grad_norm: L2 norm of the gradient before clipping; NaN when not measured.
      clip_factor: what the gradient was multiplied by; 1 when left alone.
      score: largest robust deviation of any signal, in robust standard deviations.
      resets: leaves whose moments the guard restarted in this step.
      data_index: position of the step's batch in the data; -1 when unknown.
      batch_id: what the user calls the batch, on all processes the same; or None.
      micro_batch: position in the accumulation window; -1 without one.
      sample_ids: what the user calls the samples of the batch.
      also: further signals that were at fault, in forward order.
      damaged: name of a leaf of the state that was found non-finite, or None.
      leapt: name of a parameter leaf with entries that no update has made, or None.
      can_roll_back: whether there are checkpoints to go back to.
    """

    step: int
    severity: int = OK
    causes: tuple[str, ...] = ()
    first: str | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    clip_factor: float = 1.0
    score: float = 0.0
    resets: int = 0
    data_index: int = -1
    batch_id: str | None = None
    micro_batch: int = -1
    sample_ids: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    damaged: str | None = None
    leapt: str | None = None
    can_roll_back: bool = True

    def warned(self, cause: str, signal: str) -> Observation:
        """At least a WARN, with one cause more and a first signal if it had none."""
        causes = self.causes if cause in self.causes else (*self.causes, cause)
        severity, first = max(self.severity, WARN), self.first or signal
        return self._replace(severity=severity, causes=causes, first=first)


class Action(NamedTuple):
    """One thing to do, or one thing that the device has already done.

    Attributes:
      kind: one of `KINDS`.
      reason: one plain sentence.
      numbers: the figures behind the reason, ready for JSON.
      report_only: True when the action is only to be written down.
    """

    kind: str
    reason: str
    numbers: dict[str, Any]
    report_only: bool = False


KINDS = {
    "log": "a verdict worth a line",
    "clip": "the gradient was scaled down on the device",
    "skip": "the step was blocked on the device",
    "look": "probes read every step for a while",
    "reset": "the optimizer's moments restart",
    "cut": "the learning rate is lowered",
    "return": "the learning rate is back at its schedule",
    "wait": "the loss is likely to come back sooner than a rollback",
    "recovered": "the loss is back by itself, which is a lesson",
    "rollback": "an older healthy state takes over and its data is skipped",
    "stop": "the run ends, with advice",
}
