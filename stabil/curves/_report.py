"""Everything that a log says about its run, as one record."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from stabil.curves._event import Event
from stabil.curves._hindsight import find_events
from stabil.curves._judge import WARN
from stabil.curves._messages import Message
from stabil.curves._read import Log, Problem
from stabil.curves._sketch import Sketch
from stabil.curves._slow import Row, windows
from stabil.curves._spike_score import SpikeScore


class Report(NamedTuple):
    """What `lint` found in one log.

    Attributes:
      path: the file.
      format: how it was read.
      columns: names of step, loss and gradient norm in the log, None where absent.
      rows: rows that hold a loss.
      first_step: step of the first row; NaN without rows.
      last_step: step of the last row; NaN without rows.
      events: `Event`s in the order of their start.
      loss_spike_score: `SpikeScore` of the loss, in [0, 1]; NaN for a short log.
      norm_spike_score: the same of the gradient norm; NaN without one.
      sketch: what of the loss was kept for pictures.
      problems: the first lines that could not be used.
      problem_count: how many there were.
      messages: `Message`s of a text log, with those of a single line.
    """

    path: str
    format: str
    columns: dict[str, str | None]
    rows: int
    first_step: float
    last_step: float
    events: list[Event]
    loss_spike_score: float
    norm_spike_score: float
    sketch: Sketch
    problems: list[Problem]
    problem_count: int
    messages: list[Message]

    @property
    def repeated(self) -> list[Message]:
        """Messages of trouble that the log repeats."""
        return [m for m in self.messages if m.ill and m.lines > 1]

    @property
    def findings(self) -> list[Event]:
        """Events that need attention: WARN and BLOCK."""
        return [e for e in self.events if e.severity >= WARN]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = self._asdict()
        del plain["sketch"]
        plain["events"] = [e.as_dict() for e in self.events]
        plain["problems"] = [p._asdict() for p in self.problems]
        plain["messages"] = [m._asdict() for m in self.messages if m.lines > 1][:20]
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in plain.items()
        }


def lint(path: str | pathlib.Path, **names: Any) -> Report:
    """Reads a log once and says what happened in the run.

    Args:
      path: the file.
      **names: format, step, loss, grad_norm and pattern, as in `Log`.

    Raises:
      ValueError: there is no loss to be found, as said by `Log`.
      OSError: the file cannot be read.
    """
    log = Log(path, **names)
    loss_score, norm_score, sketch = SpikeScore(), SpikeScore(), Sketch()
    rows, first_step, last_step = 0, math.nan, math.nan

    def read() -> Iterator[Row]:
        nonlocal rows, first_step, last_step
        for window in windows(log):
            if not rows:
                first_step = window[0][0]
            rows, last_step = rows + len(window), window[-1][0]
            for step, loss, norm in window:
                loss_score.add(loss)
                if norm is not None:
                    norm_score.add(norm)
                sketch.add(step, loss)
            yield from window

    events = find_events(read())
    return Report(
        path=str(path),
        format=log.format,
        columns=log.columns,
        rows=rows,
        first_step=first_step,
        last_step=last_step,
        events=events,
        loss_spike_score=loss_score.share,
        norm_spike_score=norm_score.share,
        sketch=sketch,
        problems=log.problems,
        problem_count=log.problem_count,
        messages=log.messages.repeated(1),
    )
