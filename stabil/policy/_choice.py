"""Chooses between a rollback and waiting for the loss to come back by itself."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable
from typing import Any

from stabil.policy._level import NORMAL
from stabil.policy._recovery import Case, Recovery
from stabil.policy._words import BLOCK, Observation

# Adds `load_seconds`, `redone_steps` and `step_seconds` to the numbers of a question;
# with several processes all of them must get the same numbers back.
Price = Callable[[dict[str, Any]], dict[str, Any]]

_FIRST_LESSON = 4  # steps; a shorter rise is noise


class Choice:
    """Weighs what a rollback costs against what waiting is likely to lose.

    After d steps of high loss, waiting means another d. With probability p the loss is
    back by then, half-way on average, and the rollback is saved; else it comes d steps
    later. Waiting is worth

      saving = p c - (1 - p / 2) d s,   c = load time + redone steps x step time

    seconds, with `s` the time of a step. It is chosen when that is `least_saving` or
    more, up to `longest_wait` steps an event: below, a sure state is worth more than
    the seconds. `redone` are the steps between the checkpoint and the event; the d
    steps since are lost whichever way.

    It also learns: a loss that was high for 4, 8, 16, ... steps is a lesson each time,
    once it is back or has been high for twice as long. What a rollback cuts short is
    none.

    Args:
      least_saving: seconds; infinity never waits.
      longest_wait: steps of one event.
    """

    def __init__(self, least_saving: float, longest_wait: int):
        for name, value in dict(
            least_saving_seconds=least_saving, longest_wait_steps=longest_wait
        ).items():
            if not value >= 0:
                raise ValueError(
                    f"Ladder: needed {name} >= 0, got {value}; "
                    "least_saving_seconds=math.inf never waits"
                )
        self.recovery = Recovery()
        self._least, self._longest = least_saving, longest_wait
        self._norms: collections.deque[float] = collections.deque(maxlen=32)
        self._recent: collections.deque[float] = collections.deque(maxlen=4)
        self._lost: list[Case] = []  # lessons whose outcome is open
        self._untold: list[list[float]] = []
        self._height, self._until = 0.0, -1
        self._waited = 0

    def observe(self, seen: Observation, level: int, height: float, high: int) -> int:
        """Takes one step in.

        Args:
          seen: the step; one that was blocked changed nothing and says nothing.
          level: `NORMAL`, `HIGH`, `FAR` or `EXTREME`.
          height: log of the loss over its level.
          high: steps in a row that the loss has been high within an event.

        Returns:
          How long the loss was high, on the step on which it is back from a rise that
          taught something; else 0.
        """
        if seen.severity >= BLOCK:
            return 0
        (self._norms if level == NORMAL else self._recent).append(seen.grad_norm)
        if level == NORMAL:
            return self._back()
        self._height = height
        if high >= _FIRST_LESSON:
            self._settle([c for c in self._lost if high >= 2 * c.steps], False)
            if high & (high - 1) == 0:
                self._lost.append(self._case(high))
        return 0

    def weigh(
        self, ask: Price, question: dict[str, Any], high: int, seen: int
    ) -> tuple[dict[str, Any], bool]:
        """The numbers of the choice, empty without one, and whether to wait.

        Args:
          ask: see `Price`.
          question: `event_step` and `before` of the rollback.
          high: steps in a row that the loss has been high.
          seen: steps observed so far, the clock of the wait.
        """
        if seen < self._until:
            return {}, True
        steps = min(high, self._longest - self._waited)
        if steps <= 0 or not math.isfinite(self._least):
            return {}, False
        case = self._case(high)
        numbers = ask(question | self._told(case, steps))
        p, lost = numbers["recovery_probability"], steps * numbers["step_seconds"]
        redone = max(0, numbers["redone_steps"] - high)
        cost = numbers["load_seconds"] + redone * numbers["step_seconds"]
        saving = p * cost - (1 - p / 2) * lost
        numbers |= dict(rollback_seconds=cost, saving_seconds=saving)
        wait = saving >= self._least
        if wait:
            self._until, self._waited = seen + steps, self._waited + steps
        return numbers, wait

    def take_untold(self) -> list[list[float]]:
        """The lessons that no event has told yet, as rows of a `Recovery`'s state."""
        rows, self._untold = self._untold, []
        return rows

    def forget(self) -> None:
        """The state is another one: nothing open has an outcome."""
        self._lost.clear()
        self._recent.clear()
        self._until, self._waited = -1, 0

    def get_state(self) -> dict[str, Any]:
        return {"lessons": self.recovery.get_state(), "norms": list(self._norms)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.recovery.set_state(state["lessons"])
        self._norms.extend(state["norms"])

    def _back(self) -> int:
        if not self._recent:
            return 0
        longest = max((c.steps for c in self._lost), default=0)
        self._settle(list(self._lost), True)
        self.forget()
        return longest

    def _settle(self, cases: list[Case], back: bool) -> None:
        for case in cases:
            self._lost.remove(case)
            self.recovery.learn(case, back)
            self._untold.append([*case, float(back)])

    def _case(self, high: int) -> Case:
        level = _middle(self._norms)
        ratio = _middle(self._recent) / level if level > 0 else math.nan
        gradient = math.log(ratio) if 0 < ratio < math.inf else 0.0
        return Case(high, self._height, gradient)

    def _told(self, case: Case, steps: int) -> dict[str, Any]:
        return dict(
            recovery_probability=round(self.recovery.probability(case), 4),
            high_steps=case.steps,
            height=round(case.height, 4),
            gradient=round(case.gradient, 4),
            weights=[round(w, 4) for w in self.recovery.weights],
            known_lessons=len(self.recovery.lessons),
            lessons=self.take_untold(),
            wait_steps=steps,
        )


def _middle(norms: collections.deque[float]) -> float:
    finite = [n for n in norms if math.isfinite(n)]
    return statistics.median(finite) if finite else math.nan
