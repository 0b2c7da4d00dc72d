"""The error that ends a run when nothing helps any more."""

from __future__ import annotations

from collections.abc import Iterable


class TrainingStopped(RuntimeError):
    """The ladder has given up; every event is on the disk when this is raised.

    Attributes:
      reason: one sentence.
      advice: what to change, most specific first.
      causes: names of the causes of the last step.
    """

    def __init__(
        self, reason: str, advice: Iterable[str] = (), causes: Iterable[str] = ()
    ):
        self.reason, self.advice = reason, tuple(advice)
        self.causes = tuple(causes)
        lines = "".join(f"\n- {line}" for line in self.advice)
        super().__init__(f"training stopped: {reason}{lines}")
