"""Tells a loss that rises slowly, at each step within its own noise."""

from __future__ import annotations

import itertools
import math
import statistics

# Set on public curves and on runs that diverge by themselves: no healthy curve comes
# near, and a run that diverges can still be saved then by a lower rate.
_SHARE, _NOISES, _LAG = 0.1, 1.7, 1.5
_MEAN_DIFFERENCE = 1.1284  # mean of |x - y| for independent normal x and y
_WINDOW = 32  # losses
_FORGET = 0.005  # of the way to the present mean, each time


class Drift:
    """Compares the mean of accepted losses with the lowest that it has had.

    up  <=>  m16 >= m32  and  min(m16 - m_low, 1.5 (m32 - m_low)) > b
    b = max(0.1 |m_low|, 1.7 s)

    with `m16` and `m32` the means of the newest losses and `s` their noise, the mean
    absolute difference of successive ones divided by 1.128. Means, because the losses
    are bounded on both sides, and the median of losses from two heaps leaps between
    them. A run that diverges slowly takes its level and its noise along, so that no
    loss ever lies far above them. A change that comes at once is none. `m_low` creeps
    up to `m32`, half-way in about 140 updates, so that a rise which lasts becomes
    normal.

    Attributes:
      up: whether the loss has risen and still rises.
      leans: whether it has risen half as far, or had before losses became high.

    Examples:
      >>> drift = Drift()
      >>> losses = [1.5 + 0.02 * (i % 3) + 0.003 * max(0, i - 64) for i in range(200)]
      >>> for i in range(32, 200, 8):
      ...     drift.observe(losses[:i])
      >>> drift.up
      True
    """

    def __init__(self) -> None:
        self.forget()

    def observe(self, losses: list[float]) -> None:
        """Takes in accepted losses, oldest first, at least two."""
        level = statistics.fmean(losses[-_WINDOW:])
        newest = statistics.fmean(losses[-_WINDOW // 2 :])
        steps = sum(abs(b - a) for a, b in itertools.pairwise(losses))
        noise = steps / (len(losses) - 1) / _MEAN_DIFFERENCE
        self._lowest = min(self._lowest, level)
        rise = level - self._lowest
        seen = min(newest - self._lowest, _LAG * rise) if newest >= level else 0.0
        bound = max(_SHARE * abs(self._lowest), _NOISES * noise)
        self.up, self.leans = seen > bound, 2 * seen > bound
        self._lowest += _FORGET * rise

    def pause(self) -> None:
        """A loss is high, which is no slow rise; what came before may have been one."""
        self.up = False

    def forget(self) -> None:
        """Begins with a new level."""
        self._lowest, self.up, self.leans = math.inf, False, False

    def get_state(self) -> list[float]:
        return [] if self._lowest == math.inf else [self._lowest]

    def set_state(self, state: list[float]) -> None:
        self.forget()
        if state:
            self._lowest = float(state[0])
