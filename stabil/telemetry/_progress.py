"""One line of plain text that says how the run is doing."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class ProgressLine:
    """Writes step, loss, gradient norm, blocked and clipped steps and the rate.

    On a terminal the line is rewritten in place at most five times a second. Elsewhere
    it is off, unless `always`: then one line every ten seconds.

    Args:
      total_steps: steps of the whole run, or None.
      on: False writes nothing.
      always: True writes to a stream that is no terminal too.
      stream: where to; standard error by default.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        on: bool = True,
        always: bool = False,
        stream: TextIO | None = None,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._in_place = bool(getattr(self._stream, "isatty", lambda: False)())
        self._on = on and (self._in_place or always)
        self._every = 0.2 if self._in_place else 10.0
        self._shown_at: float | None = None
        self._shown_step = 0
        self._width = 0

    def update(self, step: int, figures: dict[str, Any], force: bool = False) -> None:
        """Shows the figures of a step, unless the line was shown a moment ago."""
        if not self._on:
            return
        now = time.monotonic()
        if self._shown_at is not None and not force:
            if now - self._shown_at < self._every:
                return
        self._write(self._text(step, figures, now))
        self._shown_at, self._shown_step = now, step

    def close(self) -> None:
        """Ends the line, so that what follows starts on one of its own."""
        if self._on and self._in_place and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._on = False

    def _text(self, step: int, figures: dict[str, Any], now: float) -> str:
        text = f"step {step + 1}" + (f"/{self._total}" if self._total else "")
        for name, value in figures.items():
            text += f"  {name} {value:.4g}" if isinstance(value, float) else ""
            text += f"  {name} {value}" if not isinstance(value, float) else ""
        if self._shown_at is not None and now > self._shown_at:
            rate = (step - self._shown_step) / (now - self._shown_at)
            if rate > 0:
                text += f"  {rate:.3g} steps/s"
        return text

    def _write(self, text: str) -> None:
        line = f"\r{text.ljust(self._width)}" if self._in_place else f"{text}\n"
        self._width = len(text)
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that has gone must not end the run
            self._on = False
