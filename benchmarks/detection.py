"""Finds the faults of real training curves, and says nothing on the healthy ones.

    python benchmarks/detection.py [--curves DIR] [--json] [--leave-one-out]

DIR (`../shared/curves` beside the repository, or the folder named by STABIL_CURVES)
holds `<curve>.csv.gz` with the columns step, loss, grad_norm, and `labels.csv` with
curve, start_step, end_step and kind; `curves.csv` with curve and repo is needed for
`--leave-one-out` only, which chooses the settings for the curves of each repository on
those of all others. Every detector sees the same rows once, in order, with one
setting for all curves.

How it is scored, the same for all: an alarm event is a run of rows with an alarm (WARN
or more of ours), gaps of up to ten rows closed. A labelled span of kind spike, diverge,
nonfinite or level_shift is found if it holds a row with an alarm; its delay is the
first such row minus the first row of the span. An event that touches no such span,
give or take the two rows to which the labels are exact, is false; one event per
labelled restart is neither. Precision is found spans over found spans plus false
events. A curve without a fault or a restart is healthy. What raises no alarm on a
signal that a curve lacks is still charged for its faults.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

import detection_rules as rules
import numpy as np
from detection_scoring import WARN, WATCH, Curve, load, score, total

from stabil.curves import Judge

OURS = "stabil.curves"
Detector = Callable[[Curve], tuple[np.ndarray, np.ndarray]]
GRID = {"threshold": (5.0, 6.0, 7.0), "drift": (1.5, 2.0, 2.5), "floor": (0.005, 0.01)}


def ours(curve: Curve, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    """Severity of every row, and where the gradient norm alone spoke."""
    judge = Judge(**settings)
    rows = zip(curve.steps, curve.losses, curve.norms, strict=True)
    found = []
    for row in rows:
        severity = judge.row(*row)
        found.append((severity, severity == WATCH and judge.norm_score > 6))
    table = np.array(found)
    return table[:, 0].astype(int), table[:, 1].astype(bool)


def guard(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """What `stabil.guard` says in the compiled step, with a loss at logged steps only.

    As in a run that hands the loss over every so many steps; the steps between, of
    which the log says nothing, are not played.
    """
    import detection_guard

    return detection_guard.play(curve.losses, curve.norms, curve.steps)


def guard_by_rows(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """What `stabil.guard` says if each row is taken for the next step."""
    import detection_guard

    return detection_guard.play(curve.losses, curve.norms)


def by_rule(make: Callable[[int], rules.Rule]) -> Detector:
    """A detector of a rule; all its alarms count as WARN."""

    def detect(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
        rule = make(len(curve.steps))
        pairs = zip(curve.losses, curve.norms, strict=True)
        alarms = np.array([rule(loss, norm) for loss, norm in pairs])
        return np.where(alarms, WARN, 0), np.zeros(len(alarms), bool)

    return detect


def trainpulse(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The package's monitor with its defaults; its plateau notices are left out."""
    package = importlib.import_module("trainpulse")
    monitor = package.Monitor()
    alarms = []
    for step, loss, norm in zip(curve.steps, curve.losses, curve.norms, strict=True):
        alerts = monitor.log("loss", int(step), loss)
        if norm is not None:
            alerts += monitor.log("grad_norm", int(step), norm)
        alarms.append(any("plateau" not in a.detector.lower() for a in alerts))
    return np.where(alarms, WARN, 0), np.zeros(len(alarms), bool)


def losslint(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The package's checks with its defaults, which see the whole curve at once.

    Its divergence finding names no step; it marks the last tenth of the rows.
    """
    checks = importlib.import_module("losslint.checks")
    parsing = importlib.import_module("losslint.parsing")
    checks.MAX_EXAMPLES = sys.maxsize
    series = {"loss": curve.losses}
    if any(n is not None for n in curve.norms):
        series["grad_norm"] = curve.norms
    rows = list(range(len(curve.steps)))
    log = parsing.RunLog(rows, series, pathlib.Path(curve.name))
    severity = np.zeros(len(rows), int)
    for check in (checks.check_nan_inf, checks.check_loss_spike):
        for finding in check(log):
            severity[finding.details["steps"]] = WARN
    if checks.check_divergence(log):
        severity[-max(1, len(rows) // 10) :] = WARN
    return severity, np.zeros(len(rows), bool)


def others() -> dict[str, Detector]:
    """The detectors that we compare with."""
    made = {
        "mean + 3 sd, loss": lambda n: rules.mean_and_deviations("loss", 3),
        "mean + 6 sd, loss": lambda n: rules.mean_and_deviations("loss", 6),
        "mean + 3 sd, grad norm": lambda n: rules.mean_and_deviations("norm", 3),
        "median + 6 MAD, loss": lambda n: rules.median_and_deviations(),
        "OLMo/MaxText/Levanter skip (128, 6 sd)": lambda n: rules.skip_step(),
        "OLMo-core monitor (128, 6 sd)": lambda n: rules.stability_monitor(),
        "ZClip (z > 2.5)": lambda n: rules.ZClip(),
        "Lightning SpikeDetection": lambda n: rules.lightning(),
        "Megatron (10 x first 100)": lambda n: rules.megatron(),
        "LLM Foundry KillLossSpike": rules.kill_loss_spike,
    }
    return {name: by_rule(make) for name, make in made.items()} | {
        "losslint 0.4 (sees the whole curve)": losslint,
        "trainpulse 0.4": trainpulse,
    }


def leave_one_out(curves: list[Curve]) -> dict[str, float]:
    """Figures when the settings for a source are chosen on all other sources."""
    import itertools

    choices = [
        dict(zip(GRID, v, strict=True)) for v in itertools.product(*GRID.values())
    ]
    table = [[score(c, *ours(c, **choice)) for c in curves] for choice in choices]
    held = [0] * len(curves)
    chosen = collections.Counter()
    for source in sorted({c.source for c in curves}):
        rest = [i for i, c in enumerate(curves) if c.source != source]
        f1 = [
            total([curves[i] for i in rest], [row[i] for i in rest])["f1"]
            for row in table
        ]
        best = int(np.argmax(f1))
        chosen[str(choices[best])] += 1
        for i, c in enumerate(curves):
            if c.source == source:
                held[i] = best
    figures = total(curves, [table[k][i] for i, k in enumerate(held)])
    return {"sources": sum(chosen.values()), **figures, "chosen": dict(chosen)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared" / "curves"
    folder = os.environ.get("STABIL_CURVES", beside)
    parser.add_argument("--curves", type=pathlib.Path, default=folder)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--no-guard", action="store_true", help="needs no JAX then")
    args = parser.parse_args()
    if not (args.curves / "labels.csv").exists():
        print(f"skipped: no labels.csv in {args.curves}; name the folder with --curves")
        return 0
    curves = list(load(args.curves))
    detectors: dict[str, Detector] = {OURS: ours}
    if not args.no_guard:
        detectors["stabil.guard (in the step)"] = guard
        detectors["stabil.guard (a row as a step)"] = guard_by_rows
    detectors |= others()
    report, missing, per_curve = {}, [], {}
    for name, detect in detectors.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            scores = [score(c, *detect(c)) for c in curves]
        except ModuleNotFoundError as error:
            missing.append(f"{name}: {error}")
            continue
        seconds = time.perf_counter() - began
        rows = sum(len(c.steps) for c in curves)
        report[name] = total(curves, scores)
        report[name]["microseconds_per_row"] = 1e6 * seconds / rows
        if name == OURS:
            names = [c.name for c in curves]
            per_curve = {n: s._asdict() for n, s in zip(names, scores, strict=True)}
    best = max(
        (n for n in report if not n.startswith("stabil")), key=lambda n: report[n]["f1"]
    )
    lead = report[OURS]["f1"] - report[best]["f1"]
    summary = {**report[OURS], "best_other": best, "f1_lead_over_best_other": lead}
    if args.leave_one_out:
        summary["leave_one_source_out"] = leave_one_out(curves)
    if args.json:
        whole = {"summary": summary, "detectors": report, "not_installed": missing}
        print(json.dumps(whole | {"curves": per_curve}, default=int))
    else:
        show(per_curve, report, summary, missing)
    return 0


def show(per_curve: dict, report: dict, summary: dict, missing: list[str]) -> None:
    """Prints the tables."""
    head = "curve", "found", "false", "WATCH rows", "WARN rows", "delays", "leads"
    print(("{:<24}" + "{:>11}" * 4 + "  {} {}").format(*head))
    for name, s in per_curve.items():
        found = f"{s['found']}/{s['spans']}"
        rows = s["false_rows"]
        cells = name, found, s["false_events"], rows[1], rows[WARN]
        late = [d for d in s["delays"] if d]
        leads = [lead for lead in s["leads"] if lead]
        print(("{:<24}" + "{:>11}" * 4 + "  {} {}").format(*cells, late, leads))
    print()
    columns = {
        "recall": "fault_recall",
        "precision": "precision",
        "F1": "f1",
        "false": "false_events",
        "healthy/10k": "healthy_warn_per_10k",
        "harmless": "harmless_above_watch",
        "delay": "median_delay_rows",
        "us/row": "microseconds_per_row",
    }
    print("{:<40}".format("detector") + "".join(f"{c:>12}" for c in columns))
    for name, r in report.items():
        cells = [f"{r[key]:>12.3f}" for key in columns.values()]
        print(f"{name:<40}" + "".join(cells))
    print("\n".join(f"not installed: {line}" for line in missing))
    print(json.dumps(summary, indent=1, default=int))


if __name__ == "__main__":
    sys.exit(main())
