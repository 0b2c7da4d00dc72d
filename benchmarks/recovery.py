"""How well the chance of recovery is told, and what choosing by it saves.

    python benchmarks/recovery.py [--curves DIR] [--json]

DIR (`../shared/curves` beside the repository, or the folder named by STABIL_CURVES)
holds `<curve>.csv.gz` with the columns step, loss, grad_norm; `labels.csv` with curve,
start_step, end_step and kind; and `curves.csv` with curve and repo.

A case is a labelled spike, divergence or level shift after 1, 2, 4, 8, ... rows. It is
back when the event ends before twice that; the others never are. `start` holds the
weights fitted to all cases, which is where `stabil.policy` begins.

`brier_held_out`: mean squared error of the probability on the curves of each repository
by weights fitted to those of all others. `brier_refit`: the same, fitted anew after
each event of the curve itself, as a run does. `brier_share`: of a constant, the share
of cases that came back, held out likewise. Less is better.

`lost_...`: steps lost an event, when a rollback costs 30, 300, 1,000 or
3,000 steps: by
rolling back after the first row; by waiting for ever; by choosing after every doubling
with refitted weights; and by knowing the end in advance. A wait costs the steps until
the loss is back, an event without an end 10,000 steps.
"""

from __future__ import annotations

import argparse
import collections
import csv
import gzip
import json
import math
import os
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

import numpy as np

from stabil.policy._recovery import PRECISION, Case, Recovery, _inputs, fit

KINDS = ("spike", "diverge", "level_shift")
NEVER = 10_000  # steps
COSTS = (30, 300, 1000, 3000)


class Spell(NamedTuple):
    """One labelled event: its cases, each with whether the loss was back by then."""

    repo: str
    curve: str
    steps: int
    ends: bool
    cases: list[tuple[Case, bool]]


def read(folder: pathlib.Path) -> list[Spell]:
    """The events of all curves, in the order of the labels."""
    labels: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
    with open(folder / "labels.csv") as file:
        for row in csv.DictReader(file):
            labels[row["curve"]].append(row)
    with open(folder / "curves.csv") as file:
        repos = {row["curve"]: row["repo"] for row in csv.DictReader(file)}
    return [
        spell
        for curve, rows in labels.items()
        if any(row["kind"] in KINDS for row in rows)
        for spell in _spells(folder, curve, repos[curve], rows)
    ]


def _spells(folder: pathlib.Path, curve: str, repo: str, labels: list[Any]) -> Any:
    with gzip.open(folder / f"{curve}.csv.gz", "rt") as file:
        table = list(csv.DictReader(file))
    steps = [float(r["step"]) for r in table]
    losses = [float(r["loss"]) for r in table]
    norms = [float(r["grad_norm"] or "nan") for r in table]
    spans = [(float(r["start_step"]), float(r["end_step"])) for r in labels]
    faulty = [
        any(
            a <= s <= b
            for (a, b), r in zip(spans, labels, strict=True)
            if r["kind"] in (*KINDS, "nonfinite")
        )
        for s in steps
    ]
    for (first, last), label in zip(spans, labels, strict=True):
        rows = [i for i, s in enumerate(steps) if first <= s <= last]
        calm = [i for i in range(rows[0]) if not faulty[i]][-32:]
        if label["kind"] not in KINDS or not calm:
            continue
        gap = steps[rows[0]] - steps[rows[0] - 1]
        level = statistics.median(losses[i] for i in calm)
        norm = statistics.median([norms[i] for i in calm if norms[i] > 0] or [math.nan])
        ends = label["kind"] == "spike"
        cases, seen = [], 1
        while seen <= len(rows):
            height = math.log(max(losses[rows[seen - 1]] / level, 1.0))
            recent = [norms[i] for i in rows[max(0, seen - 4) : seen]]
            case = Case(int(seen * gap), height, _gradient(recent, norm))
            cases.append((case, ends and len(rows) <= 2 * seen))
            seen *= 2
        yield Spell(repo, curve, int(len(rows) * gap), ends, cases)


def _gradient(recent: list[float], level: float) -> float:
    if math.isnan(level) or any(math.isnan(n) for n in recent):
        return 0.0
    largest = 1e30  # an infinite norm counts as this
    return statistics.median(math.log(min(n, largest) / level) for n in recent if n > 0)


def weights(spells: list[Spell]) -> np.ndarray:
    """Weights fitted to the events; a curve counts as twice the root of its cases."""
    count = collections.Counter(s.curve for s in spells for _ in s.cases)
    told = [(s.curve, case, back) for s in spells for case, back in s.cases]
    x = np.array([_inputs(case) for _, case, _ in told])
    y = np.array([float(back) for _, _, back in told])
    weight = np.array([2 / count[curve] ** 0.5 for curve, _, _ in told])
    # A prior around zero, and none for the constant: the cases alone speak.
    return fit(x, y, [0.0] * 4, (0.01, *PRECISION[1:]), weight)


class Told(Recovery):
    """A recovery that starts elsewhere."""

    def __init__(self, start: np.ndarray):
        super().__init__()
        self.start = start
        self.weights = tuple(start)

    def _fit(self) -> None:
        x = np.array([_inputs(c) for c, _ in self.lessons])
        y = np.array([float(b) for _, b in self.lessons])
        self.weights = tuple(fit(x, y, self.start, PRECISION))


def play(spells: list[Spell]) -> dict[str, Any]:
    """Tells every case from other repositories, with and without the run's own."""
    errors: dict[str, list[float]] = collections.defaultdict(list)
    lost: dict[str, list[float]] = collections.defaultdict(list)
    for repo in sorted({s.repo for s in spells}):
        others = [s for s in spells if s.repo != repo]
        start = weights(others)
        share = statistics.mean(b for s in others for _, b in s.cases)
        for curve in sorted({s.curve for s in spells if s.repo == repo}):
            fixed, own = Told(start), Told(start)
            for spell in (s for s in spells if s.curve == curve):
                for case, back in spell.cases:
                    errors["share"].append((share - back) ** 2)
                    errors["held_out"].append((fixed.probability(case) - back) ** 2)
                    errors["refit"].append((own.probability(case) - back) ** 2)
                for cost in COSTS:
                    for name, steps in _lose(spell, own, cost).items():
                        lost[f"lost_{name}_{cost}"].append(steps)
                for case, back in spell.cases:
                    own.learn(case, back)
    summary: dict[str, Any] = {
        f"brier_{name}": round(statistics.mean(e), 3) for name, e in errors.items()
    }
    return summary | {name: round(statistics.mean(s)) for name, s in lost.items()}


def _lose(spell: Spell, recovery: Recovery, cost: int) -> dict[str, float]:
    """Steps lost by each way to choose; the first row is lost in any case."""
    wait = spell.steps if spell.ends else NEVER
    # A log that breaks off is not the end of asking.
    chosen: float = wait if spell.ends else 2 * spell.cases[-1][0].steps + cost
    for case, back in spell.cases:
        p, d = recovery.probability(case), case.steps
        if p * cost <= d * (1 - p / 2):
            chosen = d + cost
            break
        if back:
            break
    at_once = spell.cases[0][0].steps + cost
    return {
        "at_once": at_once,
        "waiting": wait,
        "choosing": chosen,
        "knowing": min(wait, at_once),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parents[2] / "shared" / "curves"
    folder = pathlib.Path(os.environ.get("STABIL_CURVES", default))
    parser.add_argument("--curves", type=pathlib.Path, default=folder)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if not (args.curves / "labels.csv").is_file():
        print(f"skipped: no labelled curves in {args.curves}", file=sys.stderr)
        return 2
    spells = read(args.curves)
    summary = {
        "events": len(spells),
        "cases": sum(len(s.cases) for s in spells),
        "start": [round(float(w), 2) for w in weights(spells)],
        **play(spells),
    }
    if args.json:
        print(json.dumps({"summary": summary}))
    else:
        print("\n".join(f"{name:20} {value}" for name, value in summary.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
