"""The level of the loss, as a robust judge on the host sees it."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable


class LossLevel:
    """Tells a loss that lies far above the median of the accepted ones.

    high_t  <=>  loss_t > m + max(threshold * 1.4826 * MAD, floor * |m|)

    with `m` the median and MAD the median absolute deviation of the last `window`
    accepted losses. Losses that are high or not finite are not accepted, up to
    `relearn_steps` in a row: then the window starts afresh at the new level. Until
    `armed_after` losses are in, nothing is high. The limit is renewed after every
    eighth accepted loss, so that a step costs microseconds.

    Examples:
      >>> level = LossLevel(armed_after=8)
      >>> [level.observe(2.0 + 0.01 * (i % 3)) for i in range(20)][-1]
      False
      >>> level.observe(9.0)
      True
    """

    def __init__(
        self,
        *,
        window: int = 128,
        threshold: float = 6.0,
        floor: float = 0.02,
        armed_after: int = 32,
        relearn_steps: int = 400,
    ):
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._threshold, self._floor = threshold, floor
        self._armed_after, self._relearn_steps = armed_after, relearn_steps
        self._refused_in_a_row = 0
        self._accepted = 0
        self.limit = math.inf

    def observe(self, loss: float) -> bool:
        """Whether the loss is high; takes it into the level if it is not.

        A loss that is not finite says nothing about the level: it is never high.
        """
        if not math.isfinite(loss):
            return False
        if loss > self.limit:
            self._refused_in_a_row += 1
            if self._refused_in_a_row < self._relearn_steps:
                return True
            self.forget()
        self._refused_in_a_row = 0
        self._losses.append(loss)
        self._accepted += 1
        if len(self._losses) >= self._armed_after and (
            self._accepted % 8 == 0 or self.limit == math.inf
        ):
            self._renew()
        return False

    def forget(self) -> None:
        """Starts afresh, as after an announced change of the data."""
        self._losses.clear()
        self._refused_in_a_row = self._accepted = 0
        self.limit = math.inf

    def _renew(self) -> None:
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(x - middle) for x in self._losses)
        width = max(self._threshold * 1.4826 * spread, self._floor * abs(middle))
        self.limit = middle + width

    def get_state(self) -> list[float]:
        return list(self._losses)

    def set_state(self, losses: Iterable[float]) -> None:
        self.forget()
        self._losses.extend(losses)
        if len(self._losses) >= self._armed_after:
            self._renew()
