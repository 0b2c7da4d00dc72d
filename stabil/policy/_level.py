"""The level of the loss, as a robust judge on the host sees it."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterable

from stabil.policy._drift import Drift

NORMAL, HIGH, FAR, EXTREME = 0, 1, 2, 3
# Median of |x - y| for independent normal x and y of unit variance.
_DIFFERENCE = 0.9539
_RECENT = 32
_JUMP = 4  # high losses in a row; fewer are noise


class LossLevel:
    """Tells a loss that lies far above the recent ones.

    high_t     <=>  loss_t > m + max( 6 s, 0.02 |m|)
    far_t      <=>  loss_t > m + max( 6 s, 0.25 |m|)
    extreme_t  <=>  loss_t > m + max(min(20 s, max(10 s, 0.5 |m|)), 0.25 |m|)

    with `m` the median of the newest 32 accepted losses, and `s` their noise: the
    median absolute difference of successive ones among the newest `window`, divided by
    0.954. Differences, because a falling loss is no spread. Losses that are high or not
    finite are not accepted, up to `relearn_steps` in a row: then the window starts
    afresh at the new level. On noisy data no loss may ever lie 20 s above the level, a
    loss of random guesses included, so half the level does where it is 10 s. Until
    `armed_after` losses are in, nothing is high. The limits are renewed after every
    eighth accepted loss, which keeps a step cheap.

    Attributes:
      drift: whether the accepted losses rise.

    Examples:
      >>> level = LossLevel(armed_after=8)
      >>> [level.observe(2.0 + 0.01 * (i % 3)) for i in range(20)][-1] == NORMAL
      True
      >>> level.observe(2.2) == HIGH, level.observe(9.0) == EXTREME
      (True, True)
    """

    def __init__(
        self,
        *,
        window: int = 128,
        armed_after: int = _RECENT,
        relearn_steps: int = 400,
    ):
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._armed_after, self._relearn_steps = armed_after, relearn_steps
        self.drift = Drift()
        self.forget()

    def observe(self, loss: float) -> int:
        """`NORMAL`, `HIGH`, `FAR` or `EXTREME`; takes a normal loss into the level.

        A loss that is not finite says nothing about the level: it is never high.
        """
        if not math.isfinite(loss):
            return NORMAL
        if loss > self._high:
            self._refused_in_a_row += 1
            if self._refused_in_a_row >= _JUMP:
                self._accepted_since_jump = 0
            if self._refused_in_a_row < self._relearn_steps:
                if loss > self._extreme:
                    return EXTREME
                return FAR if loss > self._far else HIGH
            self.forget()
        self._refused_in_a_row = 0
        self._losses.append(loss)
        self._accepted += 1
        self._accepted_since_jump += 1
        if self._accepted % 8 == 0 or self._high == math.inf:
            self._renew()
        return NORMAL

    def forget(self) -> None:
        """Starts afresh, as after an announced change of the data."""
        self._losses.clear()
        self._refused_in_a_row = self._accepted = self._accepted_since_jump = 0
        self._high = self._far = self._extreme = math.inf
        self._middle, self._unit = 0.0, math.inf
        self.drift.forget()

    def take_back(self, steps: int) -> None:
        """Forgets the losses of the newest steps, which a rollback has undone."""
        kept = max(self._armed_after, len(self._losses) - steps)
        while len(self._losses) > kept:
            self._losses.pop()
        self._refused_in_a_row, self._accepted_since_jump = 0, len(self._losses)
        self._renew()

    def go_back(self, losses: Iterable[float]) -> None:
        """Takes the losses that were known where a rollback leads; maybe too few."""
        drift, self.drift = self.drift, Drift()
        self.set_state(losses)
        self.drift = drift

    def height(self, loss: float) -> float:
        """Log of a loss over its level; 0 at the level, below it, and without one.

        The loss counts by its distance from the level, so that losses around or below
        zero have a height too.
        """
        rise = (loss - self._middle) / self._unit
        return math.log1p(rise) if 0 < rise < math.inf else 0.0

    def _renew(self) -> None:
        if len(self._losses) < self._armed_after:
            return
        losses = list(self._losses)
        middle = statistics.median(losses[-_RECENT:])
        steps = (abs(b - a) for a, b in itertools.pairwise(losses))
        noise = statistics.median(steps) / _DIFFERENCE
        self._middle, self._unit = middle, max(abs(middle), 6 * noise, 1e-30)
        self._high = middle + max(6 * noise, 0.02 * abs(middle))
        size = abs(middle)
        self._far = middle + max(6 * noise, 0.25 * size)
        beyond = min(20 * noise, max(10 * noise, 0.5 * size))
        self._extreme = middle + max(beyond, 0.25 * size)
        if self._accepted_since_jump >= _RECENT:
            # Wildly low losses must not look like a rise when they are over.
            low = 2 * middle - self._far
            self.drift.observe([x for x in losses if x >= low])
        else:
            # A loss that comes down from a jump has not risen slowly.
            self.drift.pause()

    def get_state(self) -> list[float]:
        return list(self._losses)

    def set_state(self, losses: Iterable[float]) -> None:
        self.forget()
        self._losses.extend(losses)
        self._accepted = self._accepted_since_jump = len(self._losses)
        self._renew()
