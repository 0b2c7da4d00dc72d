"""Which of several like logs departs from the others: run or rank, signal, and step."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stabil.curves._columns import choose, number
from stabil.curves._ranks import departures
from stabil.curves._read import Log

_KEPT = 8192  # rows kept of each log, by steps that are multiples of a power of two


class LogDeparture(NamedTuple):
    """A log whose signal differs from that of the others for long.

    Attributes:
      log: its number, in the order given.
      signal: name in the log, for example `activations/block_3/mlp/absmax`.
      step: first step from which on it differs.
      last: last step of that stretch.
      score: largest distance in it, in robust standard deviations; infinite where the
        value is not finite in this log alone.
    """

    log: int
    signal: str
    step: float
    last: float
    score: float


def compare_logs(
    paths: Sequence[str | pathlib.Path], **names: Any
) -> list[LogDeparture]:
    """Compares every number that three logs or more have, step by step.

    The logs are of the processes of one run, written before numbers are averaged over
    processes, or of runs that should be alike. Only steps that all of them have are
    compared. See `departures` for the rule.

    Args:
      paths: the logs.
      **names: format and pattern, as in `Log`.

    Returns:
      Departures in the order of their step, and then of the columns, which is forward
      order for readings: the first names where it began.

    Raises:
      ValueError: fewer than three logs.
    """
    if len(paths) < 3:
        raise ValueError(
            f"compare_logs: needed three logs or more to tell which one departs, got "
            f"{len(paths)}; name the log of every process"
        )
    tables = [_table(pathlib.Path(path), names) for path in paths]
    common = sorted(set.intersection(*(set(rows) for rows, _ in tables)))
    first = tables[0][1]
    shared = [n for n in first if all(n in known for _, known in tables)]
    found = []
    for place, name in enumerate(shared):
        values = [[rows[s].get(name, np.nan) for s in common] for rows, _ in tables]
        for d in departures(np.array(values, float).T):
            last = common[d.first_row + d.rows - 1]
            step = common[d.first_row]
            found.append(
                (step, place, LogDeparture(d.process, name, step, last, d.score))
            )
    return [one for *_, one in sorted(found)]


def _table(path: pathlib.Path, names: dict[str, Any]) -> tuple[dict, dict]:
    """Numbers by name for each step, and the names in the order of the log."""
    log = Log(path, **names)
    rows: dict[float, dict[str, float]] = {}
    known: dict[str, None] = {}
    step_name, every = None, 1
    for at, (_, record) in enumerate(log.records()):
        step_name = step_name or choose(record, "step")
        step = _number(record.get(step_name)) if step_name else float(at)
        if not np.isfinite(step) or step % every:
            continue
        row = rows.setdefault(step, {})
        for name, value in record.items():
            if name != step_name and not isinstance(value, (list, bool)):
                x = _number(value)
                if np.isfinite(x):
                    known.setdefault(name)
                row[name] = x
        if len(rows) > _KEPT:
            every *= 2
            rows = {s: row for s, row in rows.items() if not s % every}
    return rows, known


def _number(value: Any) -> float:
    try:
        x = number(value)
    except ValueError:
        return np.nan
    return np.nan if x is None else x
