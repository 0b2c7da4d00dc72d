"""Turns the severities of single rows into events, in one pass."""

from __future__ import annotations

import math

from stabil.curves._event import Event
from stabil.curves._judge import BLOCK, WARN, WATCH, Judge

GAP_ROWS = 10  # events closer than this are one
_LEAD_ROWS = 20  # a gradient event this close before a loss event leads it


class _Open:
    """An event that has not ended."""

    __slots__ = "start peak peak_value end end_row severity level lead".split()

    def __init__(self, step: float, row: int, level: float):
        self.start = self.peak = self.end = step
        self.end_row = row
        self.peak_value = -math.inf
        self.severity, self.level, self.lead = 0, level, 0.0

    def take(self, step: float, row: int, value: float, severity: int) -> None:
        self.end, self.end_row = step, row
        self.severity = max(self.severity, severity)
        if value > self.peak_value:
            self.peak, self.peak_value = step, value

    def close(
        self, kind: str, level: float, height: float, *, recovered: bool = True
    ) -> Event:
        recovery = self.end - self.peak if recovered else math.nan
        return Event(
            kind=kind,
            severity=self.severity,
            start=self.start,
            peak=self.peak,
            end=self.end,
            level=level,
            height=height,
            recovery=recovery,
            lead=self.lead,
        )


class Tracker:
    """Feeds rows to a `Judge` and hands out events as they end.

    Args:
      judge: the judge to use; a new one if None.

    Attributes:
      rows: rows so far.
      step: newest step.
      returned: start of each level shift that was undone later, with the step of that.
      lowest: lowest level of the loss so far, as the judge sees it.
      lowest_step: step of that.

    Examples:
      >>> tracker = Tracker()
      >>> rows = [(i, 2 + 0.01 * (i % 3) + 3 * (50 <= i < 55)) for i in range(90)]
      >>> for step, loss in rows:
      ...     for event in tracker.row(step, loss):
      ...         print(event)
      warn spike at 50, peak 2.5x at 50, back after 4 steps
    """

    def __init__(self, judge: Judge | None = None):
        self.judge = Judge() if judge is None else judge
        self.rows = 0
        self._loss: _Open | None = None
        self._norm: _Open | None = None
        self._bad: _Open | None = None
        self._shift: Event | None = None
        self.returned: dict[float, float] = {}
        self.lowest, self.lowest_step = math.inf, math.nan
        self._last_norm = (-math.inf, -(10**9))
        self._first = self.step = self._limit = math.nan

    def row(self, step: float, loss: float, grad_norm: float | None = None) -> list:
        """Judges one row; returns the events that ended with it, mostly none."""
        judge, row = self.judge, self.rows
        self.rows = row + 1
        ended = self._gone_back(step) if step < self.step else []
        self.step = step
        before = judge.loss.level
        severity = judge.row(step, loss, grad_norm)
        if row == 0:
            self._first = loss
        level = judge.loss.level
        if level < self.lowest and judge.loss.armed:
            self.lowest, self.lowest_step = level, step
        if self._shift and level < self._limit:
            self.returned[self._shift.start], self._shift = step, None
        if severity or self._loss or self._norm or self._bad:
            self._open(step, row, loss, grad_norm, severity, before)
            ended += self._ended(row)
        return ended

    def finish(self) -> list[Event]:
        """The events that were still open when the log ended."""
        ended = []
        for name in ("_bad", "_norm", "_loss"):
            event = getattr(self, name)
            if event is not None:
                setattr(self, name, None)
                ended.append(self._describe(name, event, at_end=True))
        return ended

    def _gone_back(self, step: float) -> list[Event]:
        event = _Open(step, self.rows, math.nan)
        event.take(step, self.rows, math.nan, WATCH)
        return [event.close("restart", math.nan, math.nan, recovered=False)]

    def _open(
        self,
        step: float,
        row: int,
        loss: float,
        norm: float | None,
        severity: int,
        level: float,
    ) -> None:
        judge = self.judge
        if judge.nonfinite:
            if self._bad is None:
                self._bad = _Open(step, row, math.nan)
            self._bad.take(step, row, -math.inf, BLOCK)
        high = norm is not None and judge.norm_score > 6
        if high:
            if self._norm is None:
                self._norm = _Open(step, row, math.exp(judge.norm.level))
            self._norm.take(step, row, norm, WATCH)
            self._last_norm = (self._norm.start, row)
        if judge.loss_severity:
            if self._loss is None:
                self._loss = _Open(step, row, level)
                start, last = self._last_norm
                if row - last <= _LEAD_ROWS:
                    self._loss.lead = step - start
            self._loss.take(step, row, loss, judge.loss_severity)

    def _ended(self, row: int) -> list[Event]:
        ended = []
        for name in ("_bad", "_norm", "_loss"):
            event = getattr(self, name)
            if event is None:
                continue
            shifted = name == "_loss" and self.judge.loss.accepted
            waiting = name == "_loss" and self.judge.loss.excursion
            if shifted or (row - event.end_row > GAP_ROWS and not waiting):
                setattr(self, name, None)
                ended.append(self._describe(name, event, shifted=shifted))
        return ended

    def _describe(
        self, name: str, event: _Open, *, at_end: bool = False, shifted: bool = False
    ) -> Event:
        if name == "_bad":
            never = at_end and event.end_row == self.rows - 1
            return event.close("nonfinite", math.nan, math.nan, recovered=not never)
        if name == "_norm":
            height = event.peak_value / event.level
            return event.close("gradient_blip", event.level, height)
        return self._describe_loss(event, at_end, shifted)

    def _describe_loss(self, event: _Open, at_end: bool, shifted: bool) -> Event:
        if self.judge.linear:
            level, again = event.level, False
            height = event.peak_value - level
        else:
            level = math.exp(event.level)
            height = event.peak_value / level
            again = 0.8 * self._first < event.peak_value < 1.25 * self._first
        kind = "spike" if event.severity >= WARN else "hard_batch"
        lasts = at_end and event.end_row == self.rows - 1 and event.severity >= WARN
        if shifted:
            kind = "restart" if again and height > 2 else "level_shift"
        elif lasts:
            kind = "diverge"
        if kind == "level_shift" and self._shift is None:
            self._limit = event.level + 0.25 * (self.judge.loss.level - event.level)
            shift = event.close(kind, level, height, recovered=False)
            self._shift = shift
            return shift
        recovered = not (shifted or lasts)
        return event.close(kind, level, height, recovered=recovered)
