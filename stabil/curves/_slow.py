"""What shows over hundreds of rows only: repeating data, plateaus, drifts.

All of it is a notice (WATCH), and known with the end of the log. Rows are taken in by
windows of 1024, from which only medians of 8 rows are kept, and of long logs only
every second of these, fourth, and so on: memory does not grow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from stabil.curves._event import Event
from stabil.curves._judge import WATCH

WINDOW, _BLOCK, _KEPT = 1024, 8, 2048
_LEAST_WINDOW, _LONGEST_LAG = 256, 256
_AGAIN, _AGAINST = 0.5, -0.2  # correlation at the period, and before it
_FLAT = 0.015  # change of the loss that is none, for half the run so far
_LEAST_DRIFT, _LEAST_PLATEAU = 12, 12  # blocks
_SMOOTH = 4  # blocks on either side
_GROWTH = math.log(1.3)


Row = tuple[float, float, "float | None"]  # step, loss, gradient norm


def windows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows in lists of 1024; the last may be shorter."""
    rest = iter(rows)
    while window := list(itertools.islice(rest, WINDOW)):
        yield window


class Slow:
    """Takes rows in, and has its events ready at the end.

    Examples:
      >>> slow = Slow()
      >>> slow.take([(i, 2.0 + 0.2 * (i // 20 % 2), None) for i in range(WINDOW)])
      >>> print(*slow.finish())
      watch data_pattern at 0, period 40
    """

    def __init__(self) -> None:
        self._blocks: list[list[float]] = []  # first step, loss, gradient norm
        self._each = 1  # windows' blocks that were joined into one
        self._patterns: list[Event] = []
        self._last = math.nan
        self._repeats = False

    def finish(self) -> list[Event]:
        """The events of the log."""
        return self._patterns + self._plateaus() + self._drifts()

    def take(self, rows: list[Row]) -> None:
        """Takes the next of the `windows` in."""
        table = np.array(rows, np.float64)
        with np.errstate(all="ignore"):
            table[:, 1:] = np.where(table[:, 1:] > 0, np.log(table[:, 1:]), np.nan)
        self._look_for_pattern(table[:, 0], table[:, 1])
        size = _BLOCK * self._each
        whole = len(table) // size
        parts = table[: whole * size].reshape(whole, size, 3)
        middles = _middle(parts[:, :, 1:])
        self._blocks += np.column_stack([parts[:, 0, 0], middles]).tolist()
        if len(self._blocks) > _KEPT and size < WINDOW:
            self._blocks = self._blocks[::2]
            self._each *= 2
        self._last = float(table[-1, 0])

    def _look_for_pattern(self, steps: np.ndarray, x: np.ndarray) -> None:
        lag = _period(x)
        if not lag:
            self._repeats = False
            return
        if self._repeats:
            before = self._patterns.pop()
            start, period = before.start, before.height
        else:
            start, period = float(steps[0]), lag * (steps[-1] - steps[0]) / len(steps)
            period = float(f"{period:.3g}")
        nan, end = math.nan, float(steps[-1])
        self._patterns.append(
            Event("data_pattern", WATCH, start, start, end, nan, period, nan)
        )
        self._repeats = True

    def _plateaus(self) -> list[Event]:
        """Stretches of half the run so far in which the loss stands still."""
        level = np.array([b[1] for b in self._blocks])
        flat = np.zeros(len(level), bool)
        for end in range(_LEAST_PLATEAU, len(level) + 1):
            size = max(_LEAST_PLATEAU, end // 2)
            part = level[end - size : end]
            if np.isfinite(part).all():
                half = size // 2
                change = part[:half].mean() - part[half:].mean()
                noise = np.diff(part).std() * math.sqrt(2 / size)
                flat[end - size : end] |= abs(change) + 2 * noise < _FLAT
        return [self._event("plateau", *span) for span in _stretches(flat)]

    def _drifts(self) -> list[Event]:
        """The largest slow rise of the loss, and of the gradient norm."""
        found = []
        for column in (1, 2):
            x = np.array([b[column] for b in self._blocks])
            span = _slow_rise(x)
            if span:
                first, last = span
                level = math.exp(x[first])
                height = math.exp(x[last] - x[first])
                found.append(
                    self._event("drift", *span)._replace(level=level, height=height)
                )
        return found

    def _event(self, kind: str, first: int, last: int) -> Event:
        start = self._blocks[first][0]
        end = self._blocks[last + 1][0] if last + 1 < len(self._blocks) else self._last
        nan = math.nan
        return Event(kind, WATCH, start, start, end, nan, nan, nan)


def _middle(x: np.ndarray) -> np.ndarray:
    """Median over the second axis of what is finite; NaN where nothing is."""
    finite = np.isfinite(x)
    ordered = np.sort(np.where(finite, x, np.nan), axis=1)  # with NaN at the end
    last = np.maximum(finite.sum(axis=1, keepdims=True) - 1, 0)
    low, high = (np.take_along_axis(ordered, i, 1) for i in (last // 2, -(-last // 2)))
    return (low + high)[:, 0] / 2


@functools.lru_cache(maxsize=8)
def _trends(rows: int) -> np.ndarray:
    """Orthonormal columns that span the parabolas over so many rows."""
    return np.linalg.qr(np.vander(np.linspace(-1, 1, rows), 3))[0]


def _period(x: np.ndarray) -> int:
    """Rows after which values repeat, from their autocorrelation; 0 for none."""
    if len(x) < _LEAST_WINDOW or not np.isfinite(x).all():
        return 0
    trend = _trends(len(x))
    x = x - trend @ (trend.T @ x)
    width = 6 * np.median(np.abs(x))
    if width == 0:
        return 0
    x = np.clip(x, -width, width)
    x -= x.mean()
    power = np.abs(np.fft.rfft(x, 2 * len(x))) ** 2
    again = np.fft.irfft(power)[: min(_LONGEST_LAG, len(x) // 4)]
    again = again / again[0] * len(x) / (len(x) - np.arange(len(again)))
    against = int(np.argmax(again < _AGAINST))
    if not against:
        return 0
    rest = again[against:]
    if rest.max() <= _AGAIN:
        return 0
    # Multiples of the period repeat as well: the first peak is the period.
    lag = int(np.argmax(rest > 0.9 * rest.max()))
    while lag + 1 < len(rest) and rest[lag + 1] > rest[lag]:
        lag += 1
    return against + lag


def _slow_rise(x: np.ndarray) -> tuple[int, int] | None:
    """First and last block of the largest rise that no jump explains.

    The first tenth of the run, with its warm-up, is left out.
    """
    usable = np.flatnonzero(np.isfinite(x))
    usable = usable[usable >= len(x) // 10]
    if len(usable) < 2 * _LEAST_DRIFT:
        return None
    x = x[usable]
    near = [x[max(0, i - _SMOOTH) : i + _SMOOTH + 1] for i in range(len(x))]
    smooth = np.array([np.median(part) for part in near])
    lowest = np.minimum.accumulate(smooth)
    last = int(np.argmax(smooth - lowest))
    first = int(np.argmin(smooth[: last + 1]))
    rise = smooth[last] - smooth[first]
    low = smooth[first : last + 1] <= smooth[first] + 0.1 * rise
    first += int(np.flatnonzero(low)[-1])
    if last - first < _LEAST_DRIFT:
        return None
    noise = 1.4826 * float(np.median(np.abs(np.diff(x))))
    jump = float(np.max(np.abs(np.diff(smooth[first : last + 1]))))
    if rise < max(_GROWTH, 4 * noise) or jump > 0.5 * rise:
        return None
    return int(usable[first]), int(usable[last])


def _stretches(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - 1
