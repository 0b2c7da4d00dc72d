"""Mean and standard deviation of the newest values, in constant time a value."""

from __future__ import annotations

import collections
import math
import statistics

LARGEST = 1e150  # values beyond count as infinite, so that no square overflows


class Window:
    """Holds the newest `size` values; statistics are NaN while one is not finite.

    Sums run about an origin inside the data and are taken afresh whenever a value
    leaves that outweighs the others, so that no giant takes digits with it.

    Examples:
      >>> window = Window(3)
      >>> for x in (9.0, 1.0, 2.0, 3.0):
      ...     window.append(x)
      >>> window.mean(), window.deviation(1)
      (2.0, 1.0)
    """

    def __init__(self, size: int):
        self.size, self.values = size, collections.deque(maxlen=size)
        self.bad = 0
        self.origin = self.sum = self.squares = 0.0

    def append(self, x: float) -> None:
        """Takes a value in, and the oldest out when the window is full."""
        values, origin = self.values, self.origin
        full = len(values) == self.size
        gone = values[0] - origin if full else 0.0
        values.append(x)
        away = x - origin
        self.sum += away - gone
        squares = self.squares = self.squares + (away * away - gone * gone)
        if self.bad or not -LARGEST < x < LARGEST:
            self._sum_up()
        # One at the origin takes no digits along, however constant the others are.
        elif gone and gone * gone >= 100 * squares:
            self._sum_up()
        elif not full and len(values) & (len(values) - 1) == 0:
            self._sum_up()

    def _sum_up(self) -> None:
        """Takes origin and sums afresh."""
        finite = [v for v in self.values if -LARGEST < v < LARGEST]
        self.bad = len(self.values) - len(finite)
        self.origin = statistics.median_low(finite) if finite else 0.0
        self.sum = math.fsum(v - self.origin for v in finite)
        self.squares = math.fsum((v - self.origin) ** 2 for v in finite)

    def mean(self) -> float:
        if self.bad:
            return math.nan
        return self.origin + self.sum / len(self.values)

    def deviation(self, lost: int = 0) -> float:
        """Standard deviation with `lost` degrees of freedom gone."""
        if self.bad:
            return math.nan
        n = len(self.values)
        return math.sqrt(max(self.squares - self.sum**2 / n, 0.0) / (n - lost))
