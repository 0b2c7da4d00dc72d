"""A curve of any length in a bounded number of buckets, for sparklines and pictures."""

from __future__ import annotations

import math

_BARS = "▁▂▃▄▅▆▇█"


class Sketch:
    """Keeps least and largest value of at most `size` buckets of equally many rows.

    Attributes:
      buckets: [first step, least, largest, whether a value was not finite].

    Examples:
      >>> sketch = Sketch(size=4)
      >>> for step in range(16):
      ...     sketch.add(step, 16.0 - step)
      >>> sketch.sparkline(), len(sketch.buckets)
      ('█▇▆▅', 4)
    """

    def __init__(self, size: int = 1024):
        self.size, self.each = size, 1
        self.buckets: list[list] = []
        self._filled = 0

    def add(self, step: float, value: float) -> None:
        """Takes one row in."""
        if self._filled == 0:
            if len(self.buckets) == self.size:
                self._halve()
            self.buckets.append([step, math.inf, -math.inf, False])
        bucket = self.buckets[-1]
        if not math.isfinite(value):
            bucket[3] = True
        else:
            if value < bucket[1]:
                bucket[1] = value
            if value > bucket[2]:
                bucket[2] = value
        self._filled += 1
        if self._filled == self.each:
            self._filled = 0

    def _halve(self) -> None:
        self.buckets = [_join(self.buckets[i : i + 2]) for i in range(0, self.size, 2)]
        self.each *= 2

    def sparkline(self, width: int = 60) -> str:
        """The largest values as bars, on a logarithm where all are positive.

        `!` marks values that are not finite.
        """
        count = len(self.buckets)
        edges = (
            [i * count // width for i in range(width + 1)] if count > width else None
        )
        groups = (
            [self.buckets[a:b] for a, b in zip(edges, edges[1:], strict=False)]
            if edges
            else [[b] for b in self.buckets]
        )
        joined = [_join(g) for g in groups]
        finite = [v for _, low, high, _ in joined for v in (low, high) if low <= high]
        if not finite:
            return "!" * len(joined)
        scale = math.log if min(finite) > 0 else float
        low, high = scale(min(finite)), scale(max(finite))
        step = (high - low) / (len(_BARS) - 1) or 1.0

        def bar(bucket: list) -> str:
            if bucket[3] or bucket[1] > bucket[2]:
                return "!"
            return _BARS[round((scale(bucket[2]) - low) / step)]

        return "".join(map(bar, joined))


def _join(parts: list[list]) -> list:
    return [
        parts[0][0],
        min(p[1] for p in parts),
        max(p[2] for p in parts),
        any(p[3] for p in parts),
    ]
