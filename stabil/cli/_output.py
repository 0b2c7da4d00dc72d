"""What commands print: one JSON object, plain tables, a line of progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO


def print_json(value: Any) -> None:
    """Prints one JSON object on one line; a number that is not finite becomes null."""
    print(json.dumps(plain(value), allow_nan=False))


def plain(value: Any) -> Any:
    """`value` with NaN and infinities as None, as JSON has neither.

    Examples:
      >>> plain({"loss": float("nan"), "steps": (1, 2)})
      {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns under a head, text to the left and numbers to the right.

    Examples:
      >>> print(table(["run", "loss"], [["clean", "2.25"], ["bad", "nan"]]))
      run    loss
      clean  2.25
      bad     nan
    """
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [_is_number_column(column[1:]) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        parts = zip(row, widths, right, strict=True)
        aligned = [c.rjust(w) if r else c.ljust(w) for c, w, r in parts]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _is_number_column(cells: Sequence[str]) -> bool:
    numbers = [cell.strip("+-%").replace(".", "", 1).isdigit() for cell in cells]
    words = [cell in ("nan", "-", "") for cell in cells]
    return any(numbers) and all(n or w for n, w in zip(numbers, words, strict=True))


class Progress:
    """A line that moves on a terminal, and now and then a line elsewhere.

    Args:
      every_seconds: least time between two lines where there is no terminal.
      stream: where it writes; the standard error if None.
    """

    def __init__(self, every_seconds: float = 5.0, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._moves = self._stream.isatty()
        self._pause = 0.1 if self._moves else every_seconds
        self._next = 0.0
        self._wide = 0

    def show(self, text: str, *, last: bool = False) -> None:
        """Shows `text` if it is time to, or in any case if it is the last of a part."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + self._pause
        if self._moves:
            end = "\n" if last else ""
            self._stream.write("\r" + text.ljust(self._wide) + end)
            self._wide = 0 if last else len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
