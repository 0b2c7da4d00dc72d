"""The level and the noise of one signal, row by row, in plain Python and float64.

A new value x scores z = (x - m) / s, in robust standard deviations s above the level m:

  s = max(d, u, floor) (1 + 4 / n)
  d   mean of sqrt(pi) / 2 |x_t - x_{t-1}|: the noise, blind to a trend; a value that
      repeats exactly says nothing and is left out
  u   mean of sqrt(2 pi) max(x - m, 0): the noise above the level, which slow patterns
      and skewed noise raise, and a falling trend does not
  z   shrunk by 6 / (1.8 N) where N, the depth of recent dips that came back up, exceeds
      6 / 1.8: noise that throws a signal far down may throw it as far up

The level forgets in 20 rows and the noise in 50; both take a value further than 3 s
away as if it were 3 s away. A value with z > 6 begins an excursion, which lasts while
z > 3: level and noise then stand still (apart from its first two rows), so that a long
spike is not taken for normal, and a candidate level follows the excursion. When the
candidate has been flat, or 200 rows have passed, it becomes the level: a shift is one
event. If the signal then falls back to the old level, that is restored at once.
"""

from __future__ import annotations

import math

THRESHOLD = 6.0  # robust standard deviations that begin an excursion
RETURN = 3.0  # and those below which it has ended
WARMUP_ROWS = 20
LEVEL_RATE = 0.05
NOISE_RATE = 0.02
ACCEPT_ROWS = 32  # a candidate is looked at after so many rows, then every 16
LONGEST_ROWS = 200  # and taken as it is after so many
_DIP_WEIGHT = 1.8
_DIFFERENCE_TO_SD = math.sqrt(math.pi) / 2
_RISE_TO_SD = math.sqrt(2 * math.pi)
_FIRST_NOISE = 0.05
_INFLUENCE = 3.0


class Signal:
    """What is normal for one signal; feed it finite values with `step`.

    Attributes:
      level: the level m, in the unit of the values.
      seen: values so far.
      excursion: rows of the present excursion; 0 outside of one.
      accepted: whether the newest row made a candidate the level.
      armed: whether the warm-up has ended.

    Args:
      floor: smallest standard deviation to believe, in the unit of the values.
      threshold: robust standard deviations that begin an excursion.
      longest: rows after which an excursion becomes the level, flat or not.

    Examples:
      >>> signal = Signal(0.01)
      >>> for i in range(30):
      ...     z = signal.step(1.0 + 0.01 * (i % 3))
      >>> abs(z) < 3, signal.step(2.0) > 6, signal.excursion
      (True, True, 1)
    """

    __slots__ = (
        "floor threshold longest level seen excursion accepted armed spread rise last "
        "dips dip lows prior candidate wobble earlier"
    ).split()

    def __init__(
        self, floor: float, threshold: float = THRESHOLD, longest: int = LONGEST_ROWS
    ):
        self.floor, self.threshold, self.longest = floor, threshold, longest
        self.level = self.last = self.candidate = self.earlier = 0.0
        self.spread = _FIRST_NOISE
        self.rise = self.dips = self.dip = self.wobble = 0.0
        self.prior = math.inf
        self.seen = self.excursion = self.lows = 0
        self.accepted = self.armed = False

    def step(self, x: float) -> float:
        """Takes a finite value in; returns its score z, 0 during the warm-up."""
        seen = self.seen
        self.seen = seen + 1
        self.accepted = False
        if not seen:
            self.level = self.last = x
        gap = x - self.level
        if not self.armed:
            z, bound = 0.0, math.inf
            self.level += gap / (seen + 1)
            self.armed = seen + 1 >= WARMUP_ROWS
        else:
            noise, rise, floor = self.spread, self.rise, self.floor
            noise = noise if noise > rise else rise
            noise = (noise if noise > floor else floor) * (1 + 4 / seen)
            z, bound = gap / noise, _INFLUENCE * noise
            dips = self.dips
            if dips and _DIP_WEIGHT * dips > self.threshold:
                z *= self.threshold / (_DIP_WEIGHT * dips)
            if z > self.threshold or (self.excursion and z > RETURN):
                self._excursion(x, gap, noise)
                return z
            self.excursion = 0
            if dips:
                self.dips = dips * (1 - NOISE_RATE)
            if z < -RETURN:
                self._fall(x, gap, z, noise)
            else:
                if self.dip:
                    self._end_dip(z)
                self.level += LEVEL_RATE * (gap if gap < bound else bound)
        rate = 1 / (seen + 1)
        if rate < NOISE_RATE:
            rate = NOISE_RATE
        difference = abs(x - self.last) * _DIFFERENCE_TO_SD
        if difference:
            difference = difference if difference < bound else bound
            self.spread += rate * (difference - self.spread)
        above = 0.0
        if gap > 0:
            above = _RISE_TO_SD * (gap if gap < bound else bound)
        self.rise += rate * (above - self.rise)
        self.last = x
        return z

    def _end_dip(self, z: float) -> None:
        """A value that is no longer far below; the dip counts if it came back up."""
        if z > -1 and -self.dip > self.dips:
            self.dips = -self.dip
        self.dip, self.lows = 0.0, 0

    def _fall(self, x: float, gap: float, z: float, noise: float) -> None:
        """A value far below: back to an older level, a dip, or a lasting fall."""
        self.dip = min(self.dip, z)
        self.lows = self.lows + 1 if z < -self.threshold else 0
        near = min(self.threshold * noise, 0.5 * abs(gap))
        if abs(x - self.prior) <= near:
            self.level, self.prior = self.prior, math.inf
        elif self.lows >= 3:
            self.level += 0.3 * gap
        else:
            self.level += LEVEL_RATE * max(gap, -_INFLUENCE * noise)

    def _excursion(self, x: float, gap: float, noise: float) -> None:
        self.excursion += 1
        rows = self.excursion
        if rows == 1:
            self.candidate, self.wobble = x, 0.0
        else:
            rate = max(1 / rows, 0.1)
            away = x - self.candidate
            self.candidate += rate * away
            self.wobble += rate * (abs(away) - self.wobble)
        if rows <= 2:
            bound = _INFLUENCE * noise
            self.level += LEVEL_RATE * min(gap, bound)
            self.rise += NOISE_RATE * (_RISE_TO_SD * bound - self.rise)
            step = min(abs(x - self.last) * _DIFFERENCE_TO_SD, bound)
            self.spread += NOISE_RATE * (step - self.spread)
        self.last = x
        if rows == ACCEPT_ROWS // 2:
            self.earlier = self.candidate
        flat = False
        if rows >= ACCEPT_ROWS and rows % (ACCEPT_ROWS // 2) == 0:
            moved = abs(self.candidate - self.earlier)
            flat = moved <= max(2 * noise, self.wobble)
            self.earlier = self.candidate
        if flat or rows >= self.longest:
            self._accept(flat)

    def _accept(self, flat: bool) -> None:
        wobble = 1.2533141373155003 * self.wobble  # sqrt(pi / 2)
        self.prior, self.level = self.level, self.candidate
        self.spread = wobble if flat else max(self.spread, wobble)
        self.rise = wobble
        self.excursion, self.accepted = 0, True

    def make_linear(self) -> None:
        """Goes on with the values themselves where it has seen their logarithms."""
        factor = math.exp(self.level)
        self.level, self.last = factor, math.exp(self.last)
        self.candidate, self.earlier = math.exp(self.candidate), math.exp(self.earlier)
        self.prior = math.exp(self.prior) if self.prior < 700 else math.inf
        for name in ("spread", "rise", "wobble", "floor"):
            setattr(self, name, factor * getattr(self, name))
