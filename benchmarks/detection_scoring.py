"""Holds alarms on real curves against their labels; `detection.py` says how."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

FAULTS = ("spike", "diverge", "nonfinite", "level_shift")
HARMLESS = ("hard_batch", "data_pattern", "gnorm_blip")
WATCH, WARN, BLOCK = 1, 2, 3
GAP, TOLERANCE = 10, 2


class Curve(NamedTuple):
    """Rows of one log and its labelled spans as (kind, first row, last row)."""

    name: str
    source: str
    steps: list[float]
    losses: list[float]
    norms: list[float | None]
    spans: list[tuple[str, int, int]]


class Score(NamedTuple):
    """What one detector did on one curve."""

    spans: int
    found: int
    delays: list[int]
    leads: list[int]
    false_events: int
    false_rows: dict[int, int]
    harmless_above_watch: int
    blocks: int


def _table(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def load(folder: pathlib.Path) -> Iterator[Curve]:
    """Every curve of the folder that `labels.csv` may speak of."""
    labels = _table(folder / "labels.csv")
    about = folder / "curves.csv"
    known = _table(about) if about.exists() else []
    source = {row["curve"]: row["repo"] for row in known}
    for path in sorted(folder.glob("*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        with gzip.open(path, "rt") as file:
            rows = [r for r in csv.DictReader(file) if r["loss"]]
        steps = [float(r["step"]) for r in rows]
        spans = []
        for label in labels:
            first, last = float(label["start_step"]), float(label["end_step"])
            at = [i for i, s in enumerate(steps) if first <= s <= last]
            if label["curve"] == name and at:
                spans.append((label["kind"], at[0], at[-1]))
        norms = [float(r["grad_norm"]) if r["grad_norm"] else None for r in rows]
        losses = [float(r["loss"]) for r in rows]
        yield Curve(name, source.get(name, name), steps, losses, norms, spans)


def events(alarms: np.ndarray) -> list[tuple[int, int]]:
    """First and last row of each event."""
    found: list[tuple[int, int]] = []
    for row in np.flatnonzero(alarms).tolist():
        if found and row - found[-1][1] <= GAP:
            found[-1] = (found[-1][0], row)
        else:
            found.append((row, row))
    return found


def score(curve: Curve, severity: np.ndarray, early: np.ndarray) -> Score:
    """Holds the severity of every row against the labels.

    Args:
      curve: the curve.
      severity: int `[rows]`.
      early: bool `[rows]`, rows where the gradient norm alone is out of line.
    """
    faults = [s for s in curve.spans if s[0] in FAULTS]
    near = np.zeros(len(severity), bool)
    restart = near.copy()
    for kind, first, last in curve.spans:
        here = slice(max(first - TOLERANCE, 0), last + TOLERANCE + 1)
        if kind in FAULTS:
            near[here] = True
        elif kind == "restart":
            restart[here] = True
    delays, leads = [], []
    for _, first, last in faults:
        at = np.flatnonzero(severity[first : last + 1] >= WARN)
        if at.size:
            delays.append(int(at[0]))
            ahead = np.flatnonzero(early[max(first - 20, 0) : first + at[0]])
            leads.append(int(min(first, 20) + at[0] - ahead[0]) if ahead.size else 0)
    alarms = [slice(a, b + 1) for a, b in events(severity >= WARN)]
    false = sum(not near[e].any() and not restart[e].any() for e in alarms)
    outside = severity[~near]
    harmless = [s for s in curve.spans if s[0] in HARMLESS]
    return Score(
        spans=len(faults),
        found=len(delays),
        delays=delays,
        leads=leads,
        false_events=false,
        false_rows={level: int((outside == level).sum()) for level in (1, 2, 3)},
        harmless_above_watch=sum(severity[a : b + 1].max() > 1 for _, a, b in harmless),
        blocks=int((severity >= BLOCK).sum()),
    )


def total(curves: list[Curve], scores: list[Score]) -> dict[str, float]:
    """Figures over all curves."""
    found, spans = sum(s.found for s in scores), sum(s.spans for s in scores)
    false = sum(s.false_events for s in scores)
    delays = list(itertools.chain.from_iterable(s.delays for s in scores))
    leads = list(itertools.chain.from_iterable(s.leads for s in scores))
    pairs = list(zip(curves, scores, strict=True))
    restarts = {c.name for c in curves if any(s[0] == "restart" for s in c.spans)}
    healthy = [(c, s) for c, s in pairs if not s.spans and c.name not in restarts]
    rows = max(sum(len(c.steps) for c, _ in healthy), 1)
    all_rows = sum(len(c.steps) for c in curves)
    precision = found / (found + false) if found else 0.0
    recall = found / spans if spans else 1.0
    per_10k = {n: sum(s.false_rows[n] for s in scores) / all_rows * 1e4 for n in (1, 2)}
    return {
        "fault_recall": recall,
        "found": found,
        "spans": spans,
        "false_events": false,
        "precision": precision,
        "f1": 2 * precision * recall / max(precision + recall, 1e-9),
        "healthy_warn_per_10k": sum(s.false_events for _, s in healthy) / rows * 1e4,
        "healthy_warn_rows_per_10k": sum(s.false_rows[2] for _, s in healthy)
        / rows
        * 1e4,
        "healthy_block": sum(s.blocks for _, s in healthy),
        "watch_rows_outside_per_10k": per_10k[1],
        "warn_rows_outside_per_10k": per_10k[2],
        "harmless_above_watch": sum(s.harmless_above_watch for s in scores),
        "median_delay_rows": statistics.median(delays) if delays else math.nan,
        "spans_with_lead": sum(lead > 0 for lead in leads),
    }
