"""What is typical for every signal of a healthy baseline run, in one readable file."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stabil.curves._columns import choose, number
from stabil.curves._event import Event
from stabil.curves._judge import WARN
from stabil.curves._read import Log

_KEPT = 2048  # values kept of each signal, evenly spaced over the run
_FEWEST = 20
_LIMIT = 100.0


class Typical(NamedTuple):
    """The range of one signal over the second half of a baseline run.

    Attributes:
      typical: median of the size |x|.
      noise: robust standard deviation of x.
      low: 1st percentile of x.
      high: 99th percentile of x.
      largest: largest |x| of the whole run.
      limit: size beyond which the signal is out of its range: 100 times `typical`, and
        never below twice `largest`.
    """

    typical: float
    noise: float
    low: float
    high: float
    largest: float
    limit: float


class _Thinned:
    """Evenly spaced values of a stream, at most `_KEPT` of them."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.every, self.seen, self.largest = 1, 0, 0.0

    def add(self, x: float) -> None:
        self.largest = max(self.largest, abs(x))
        if self.seen % self.every == 0:
            self.values.append(x)
            if len(self.values) == _KEPT:
                self.values = self.values[::2]
                self.every *= 2
        self.seen += 1

    def typical(self) -> Typical:
        late = sorted(self.values[len(self.values) // 2 :])
        median = statistics.median(late)
        size = statistics.median(map(abs, late))
        away = statistics.median(abs(x - median) for x in late)
        return Typical(
            typical=size,
            noise=1.482602218505602 * away,
            low=late[len(late) // 100],
            high=late[-1 - len(late) // 100],
            largest=self.largest,
            limit=max(_LIMIT * size, 2 * self.largest),
        )


def calibrate(path: str | pathlib.Path, **names: Any) -> dict[str, Typical]:
    """Typical ranges of every number in the log of a short, healthy run.

    Values that are not finite are left out. A signal with fewer than 20 values is too.

    Args:
      path: the log, in any format that `Log` reads, or the folder of a run that holds
        one.
      **names: format and pattern, as in `Log`.

    Returns:
      One `Typical` for each name, in the order of the log; the step is left out.
    """
    log = Log(_log_of(pathlib.Path(path)), **names)
    return calibrate_records(record for _, record in log.records())


def calibrate_records(records: Iterable[Mapping[str, Any]]) -> dict[str, Typical]:
    """Typical ranges of every number in records of a run, for example a live one.

    Args:
      records: one mapping from names to numbers for each step, such as what
        `Vitals.scalars` and `Readings.scalars` return, joined.

    Returns:
      One `Typical` for each name with 20 values or more; the step is left out.
    """
    signals: dict[str, _Thinned] = {}
    for record in records:
        for name, value in record.items():
            x = _finite(value)
            if x is not None:
                signals.setdefault(name, _Thinned()).add(x)
    step = choose(signals, "step")
    return {
        name: signal.typical()
        for name, signal in signals.items()
        if name != step and signal.seen >= _FEWEST
    }


def _log_of(path: pathlib.Path) -> pathlib.Path:
    """The log of numbers in a run's folder: the largest that holds no events."""
    if not path.is_dir():
        return path
    logs = [
        p
        for p in path.iterdir()
        if p.suffix in (".jsonl", ".csv", ".tsv") and not p.name.startswith("events")
    ]
    if not logs:
        raise FileNotFoundError(
            f"{path}: needed a log of numbers in the run's folder, got none; write "
            "stabil.Session(..., sinks=[stabil.telemetry.ScalarLog(run_dir / "
            "'scalars.jsonl')])"
        )
    return max(logs, key=lambda p: p.stat().st_size)


def _finite(value: Any) -> float | None:
    try:
        x = number(value)
    except ValueError:
        return None
    return x if x is not None and math.isfinite(x) else None


def save_calibration(
    ranges: dict[str, Typical], path: str | pathlib.Path, source: str = ""
) -> None:
    """Writes ranges as indented JSON, one line of six numbers to a signal."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps(one._asdict())}"
        for name, one in ranges.items()
    ]
    head = {"made_by": "stabil calibrate", "schema": 1, "source": source}
    text = json.dumps(head, indent=2)[:-2]
    body = ",\n".join(lines)
    pathlib.Path(path).write_text(f'{text},\n  "signals": {{\n{body}\n  }}\n}}\n')


def load_calibration(path: str | pathlib.Path) -> dict[str, Typical]:
    """Reads what `save_calibration` wrote.

    Raises:
      ValueError: the file is no calibration.
    """
    try:
        signals = json.loads(pathlib.Path(path).read_text())["signals"]
        return {name: Typical(**one) for name, one in signals.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: needed a calibration, got another file ({error}); write stabil "
            "calibrate LOG --out FILE"
        ) from error


def past_limits(
    path: str | pathlib.Path, ranges: dict[str, Typical], **names: Any
) -> list[tuple[str, Event]]:
    """Signals of a log that leave their calibrated range: name, and one event each.

    The event spans the first to the last row beyond the limit; its height is the
    largest size over the typical one.
    """
    log = Log(path, **names)
    found: dict[str, list[float]] = {}
    step_name, rows = None, 0
    for _, record in log.records():
        step_name = step_name or choose(record, "step")
        step = _finite(record.get(step_name)) if step_name else rows
        rows += 1
        if step is None:
            continue
        for name, one in ranges.items():
            x = _finite(record.get(name))
            if x is None or abs(x) <= one.limit:
                continue
            start, peak, _, largest = found.get(name, [step, step, step, 0.0])
            if abs(x) > largest:
                peak, largest = step, abs(x)
            found[name] = [start, peak, step, largest]
    return [
        (name, _event(spot, ranges[name].typical))
        for name, spot in sorted(found.items(), key=lambda item: item[1][0])
    ]


def _event(spot: list[float], typical: float) -> Event:
    start, peak, end, largest = spot
    height = largest / typical if typical else math.nan
    return Event("limit", WARN, start, peak, end, typical, height, end - peak)
