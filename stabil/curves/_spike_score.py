"""Two published shares of steps that spike: OLMo 2's score and OLMo-core's monitor.

They differ in window, threshold, side and denominator: never compare one with the
other. Both count a long excursion as many steps and go blind after a spike;
`find_events` does neither.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from stabil.curves._window import LARGEST, Window

_DIGITS = 1e-12  # a variance that is less of the sum of squares is rounding


class SpikeScore:
    """OLMo 2's spike score: values at least 7 sd from the mean of the 1,000 before.

    The report leaves five choices open; here they are: both sides count; population
    standard deviation; the value itself is not in its window; values without a full
    window before them are not judged and not in the denominator; a value that is not
    finite, or beyond 1e150, is a spike and enters no window.

    Args:
      window: values before the one that is judged; >= 2.
      threshold: standard deviations; > 0.
      two_sided: whether values far below count too.
      unbiased: whether the variance loses a degree of freedom.

    Examples:
      >>> score = SpikeScore(window=4, threshold=3)
      >>> for x in (1.0, 1.1, 0.9, 1.0, 1.1, 9.0):
      ...     score.add(x)
      >>> score.spikes, score.judged, score.share
      (1, 2, 0.5)

    Source: Team OLMo, 2 OLMo 2 Furious, arXiv:2501.00656, section 3.2.
    """

    def __init__(
        self,
        *,
        window: int = 1000,
        threshold: float = 7.0,
        two_sided: bool = True,
        unbiased: bool = False,
    ):
        self._size, self._square = window, threshold**2
        self._two_sided, self._lost = two_sided, int(unbiased)
        # A window is the end of one block of so many values and the start of the next,
        # so that its sums are sums of what it holds: no giant takes digits with it.
        self._before, self._block = np.zeros(0), []
        self._spikes = self._judged = self._done = 0

    def add(self, value: float) -> None:
        """Judges one value and takes it in."""
        if -LARGEST < value < LARGEST:
            self._block.append(value)
            if len(self._block) == self._size:
                self._judge()
                self._before, self._block = np.array(self._block), []
                self._done = 0
        else:
            self._spikes += 1
            self._judged += 1

    def _judge(self) -> None:
        """Judges what is new in the block."""
        block, done = np.array(self._block), self._done
        self._done = len(block)
        if not len(self._before):
            return
        origin = np.median(self._before)
        old, new = self._before - origin, block - origin
        mean = _sums(old, new) / self._size
        squares = _sums(old**2, new**2)
        spread = squares - self._size * mean**2
        away = (new - mean)[done:]
        # A constant window has no spread to measure a distance in.
        spread = np.where(spread > _DIGITS * squares, spread, np.inf)[done:]
        far = away**2 >= self._square * spread / (self._size - self._lost)
        self._spikes += int(np.sum(far & (self._two_sided | (away > 0))))
        self._judged += len(away)

    @property
    def spikes(self) -> int:
        """Spikes so far."""
        self._judge()
        return self._spikes

    @property
    def judged(self) -> int:
        """Values so far that had a full window, or were not finite."""
        self._judge()
        return self._judged

    @property
    def share(self) -> float:
        """Spikes over judged values, in [0, 1]; NaN while none was judged."""
        return self.spikes / self.judged if self.judged else math.nan


def _sums(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Sum of the `len(old)` values before each of the new ones."""
    ends = np.cumsum(old[::-1])[::-1]
    starts = np.cumsum(np.concatenate([[0.0], new[:-1]]))
    return ends[: len(new)] + starts[: len(new)]


def spike_score(values: Iterable[float], **settings: Any) -> float:
    """The `SpikeScore` share of a whole series, in [0, 1]; settings as there.

    Examples:
      >>> spike_score([1.0, 1.1, 0.9, 1.0, 1.1, 9.0], window=4, threshold=3)
      0.5
    """
    score = SpikeScore(**settings)
    for value in values:
        score.add(value)
    return score.share


class StabilityMonitor:
    """OLMo-core's monitor: a loss or gradient norm above the mean by more than 6 sd.

    One-sided, population standard deviation of the values before, judged only with a
    full window and a deviation of 1e-10 or more. As in the original, a value that is
    not finite enters the window and blinds the monitor until it has left.

    Args:
      window: steps before the one that is judged; >= 2.
      threshold: standard deviations; > 0.
      rolling: steps over which `running` is taken.

    Attributes:
      spikes: spikes so far.
      steps: steps so far, judged or not.

    Examples:
      >>> monitor = StabilityMonitor(window=4)
      >>> [monitor.row(x) for x in (1.0, 1.1, 0.9, 1.0, 1.1, 9.0)]
      [False, False, False, False, False, True]

    Source: `StabilityMonitorCallback` of ai2-olmo-core 3.0.0.
    """

    def __init__(
        self, *, window: int = 128, threshold: float = 6.0, rolling: int = 10_000
    ):
        self.spikes = self.steps = 0
        self._loss, self._norm = Window(window), Window(window)
        self._threshold = threshold
        self._recent: collections.deque[bool] = collections.deque(maxlen=rolling)
        self._recent_spikes = 0

    def row(self, loss: float, grad_norm: float | None = None) -> bool:
        """Judges one step; True for a spike."""
        spike = self._high(self._loss, loss)
        if grad_norm is not None:
            spike |= self._high(self._norm, grad_norm)
        self.steps += 1
        self.spikes += spike
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._recent_spikes -= recent[0]
        recent.append(spike)
        self._recent_spikes += spike
        return spike

    def _high(self, window: Window, x: float) -> bool:
        high = False
        if len(window.values) == window.size:
            spread = window.deviation()
            high = spread >= 1e-10 and x > window.mean() + self._threshold * spread
        window.append(x)
        return high

    @property
    def running(self) -> float:
        """Share of the newest `rolling` steps; NaN until there are so many."""
        full = len(self._recent) == self._recent.maxlen
        return self._recent_spikes / len(self._recent) if full else math.nan

    @property
    def total(self) -> float:
        """Share of all steps, the first window included; NaN until it is full."""
        return self.spikes / self.steps if self.steps >= self._loss.size else math.nan
