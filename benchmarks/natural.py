"""Training that becomes unstable by itself: what every method makes of it.

    python benchmarks/natural.py [--json] [--seeds 5] [--steps 400] [--picture FILE]
        [--settings NAMES] [--methods NAMES] [--rates-seeds 2] [--first-seed 0]

A decoder of six post-LN blocks of width 32 learns a small language with AdamW and
b2 = 0.999, in settings that are known to break training (`natural_runs.SETTINGS`), with
five seeds each, which give model and data. Nothing is planted in the gradients. Every
method has its defaults, those of its own paper where they are published; the session
guards AdamW behind the usual clip at 1.0 (see `natural_session.py`), as does the row
`guard, clip 1.0` without a ladder. The runs are chaotic: near the edge of stability,
rounding decides which seed is lost, so that five seeds tell large differences only.

`final`: held-out loss after the last step, mean over seeds. A perfect model has 1.25; a
model that knows nothing 3.47. `lost`: runs that end above 3.0 or not finite.
`score`: OLMo 2's spike score of the training loss, with a window of 64.
`sensitivity`: learning-rate sensitivity of arXiv:2309.14322, the mean over rates of
min(final, initial loss) minus the final loss at the method's best rate; over the rates
of `natural_runs.RATES` on plain data. A method's loss is within noise of the best when
the mean difference over seeds is at most twice its standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import natural_runs as runs
import natural_session
import numpy as np

from stabil.curves import spike_score

SESSION, CLIP = "session", "clip 1.0"
# Of 3.47 for a model that knows nothing.
LOST = 3.0
INITIAL = 3.47


def measure(
    method: str, data: str, pairs: list[tuple[float, int]], steps: int
) -> dict[str, Any]:
    """Final losses, losses over the steps and spike scores of several runs."""
    if method == SESSION:
        played = [natural_session.play(data, rate, seed, steps) for rate, seed in pairs]
        final, losses = [p.final for p in played], [p.losses for p in played]
        more = {
            "actions": [p.actions for p in played],
            "stopped": [p.stopped for p in played],
        }
    else:
        result = runs.play(method, data, pairs, steps)
        final, losses, more = result.final, result.losses, {}
    final = [float(x) if np.isfinite(x) else float("inf") for x in final]
    return {
        "final": final,
        "losses": [[float(x) for x in row] for row in losses],
        "scores": [float(spike_score(row, window=64)) for row in losses],
        **more,
    }


def table(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of one setting, by method: means, losses and whether within noise of the best."""
    capped = {m: np.minimum(row["final"], INITIAL) for m, row in found.items()}
    best = min(capped, key=lambda m: capped[m].mean())
    rows = {}
    for method, row in found.items():
        away = capped[method] - capped[best]
        error = away.std(ddof=1) / len(away) ** 0.5 if len(away) > 1 else 0.0
        rows[method] = {
            "final": float(capped[method].mean()),
            "final_by_seed": row["final"],
            "spike_score": float(np.mean(row["scores"])),
            "lost": int(np.sum(~(np.asarray(row["final"]) < LOST))),
            "best": method == best,
            "within_noise_of_best": bool(away.mean() <= 2 * error),
        }
        rows[method] |= {k: row[k] for k in ("actions", "stopped") if k in row}
    return rows


def sensitivity(final: list[float], rates: int) -> float:
    """Mean over rates of min(final, initial) minus that of the best rate.

    Args:
      final: losses, by rate and then by seed.
      rates: how many rates there are.
    """
    by_rate = np.minimum(np.reshape(final, (rates, -1)), INITIAL).mean(axis=1)
    return float(np.mean(by_rate - by_rate.min()))


def measure_all(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Everything, and the curves for the picture."""
    methods = [*runs.methods(), SESSION]
    if arguments.methods:
        methods = [m for m in methods if m in arguments.methods.split(";")]
    settings = [
        s
        for s in runs.SETTINGS
        if not arguments.settings or s.name in arguments.settings.split(",")
    ]
    tables, curves, swept = {}, {}, {}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for setting in settings:
        pairs = [(setting.learning_rate, seed) for seed in seeds]
        found = {}
        for method in methods:
            print(f"{setting.name}: {method}", file=sys.stderr)
            found[method] = measure(method, setting.data, pairs, arguments.steps)
        tables[setting.name] = table(found)
        curves[setting.name] = {m: row["losses"] for m, row in found.items()}
    pairs = [(r, s) for r in runs.RATES for s in seeds[: arguments.rates_seeds]]
    for method in methods if pairs else []:
        print(f"rates: {method}", file=sys.stderr)
        final = measure(method, "plain", pairs, arguments.steps)["final"]
        swept[method] = {
            "final_by_rate": np.reshape(final, (len(runs.RATES), -1)).tolist(),
            "sensitivity": sensitivity(final, len(runs.RATES)),
        }
    result = {"summary": summary(tables, swept), "settings": tables, "rates": swept}
    return result, curves


def summary(tables: dict[str, Any], swept: dict[str, Any]) -> dict[str, Any]:
    """What the goals ask for."""
    found: dict[str, Any] = {
        "runs_lost": {
            method: sum(rows[method]["lost"] for rows in tables.values())
            for rows in list(tables.values())[:1]
            for method in rows
        },
        "session_within_noise_of_best": {
            name: rows[SESSION]["within_noise_of_best"]
            for name, rows in tables.items()
            if SESSION in rows
        },
        "learning_rate_sensitivity": {m: r["sensitivity"] for m, r in swept.items()},
    }
    if SESSION in swept and CLIP in swept:
        found["sensitivity_ratio_session_to_clip"] = (
            swept[SESSION]["sensitivity"] / swept[CLIP]["sensitivity"]
            if swept[CLIP]["sensitivity"] > 0
            else None
        )
    return found


def draw(path: str, result: dict[str, Any], curves: dict[str, Any]) -> None:
    """Training losses of the first seed, means of nine steps; final loss by rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * (len(curves) + 1), 4), layout="constrained")
    axes = figure.subplots(1, len(curves) + 1, squeeze=False)[0]
    for ax, (name, rows) in zip(axes, curves.items(), strict=False):
        for method, losses in rows.items():
            smooth = np.convolve(losses[0], np.full(9, 1 / 9), "valid")
            ax.plot(smooth, **_style(method))
        ax.set(title=name, xlabel="step run", ylabel="training loss, first seed")
    for method, row in result["rates"].items():
        means = np.minimum(row["final_by_rate"], INITIAL).mean(axis=1)
        axes[-1].plot(runs.RATES, means, ".-", **_style(method))
    axes[-1].set(xscale="log", title="rates", xlabel="learning rate", ylabel="final")
    axes[-1].set_xticks(runs.RATES, [f"{rate:g}" for rate in runs.RATES])
    axes[-1].minorticks_off()
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _style(method: str) -> dict[str, Any]:
    """The same in every panel, whichever methods it has."""
    if method == SESSION:
        return dict(label=method, color="black", linewidth=1.8)
    number = list(runs.methods()).index(method)
    return dict(label=method, color=f"C{number}", linewidth=0.8)


def show(result: dict[str, Any]) -> None:
    for setting in runs.SETTINGS:
        rows = result["settings"].get(setting.name)
        if rows is None:
            continue
        print(f"\n{setting.name}: {setting.why}, rate {setting.learning_rate}")
        print(f"  {'method':12} {'final':>6} {'score':>7} {'lost':>4}")
        for method, row in rows.items():
            mark = "best" if row["best"] else ""
            mark = mark or ("within noise" if row["within_noise_of_best"] else "")
            numbers = f"{row['final']:6.3f} {row['spike_score']:7.4f} {row['lost']:4}"
            print(f"  {method:12} {numbers} {mark}")
    print(f"\nfinal loss by learning rate {runs.RATES}, and sensitivity")
    for method, row in result["rates"].items():
        means = np.minimum(row["final_by_rate"], INITIAL).mean(axis=1)
        print(f"  {method:12} {np.round(means, 2)} {row['sensitivity']:.3f}")
    print(json.dumps(result["summary"], indent=2))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=runs.STEPS)
    parser.add_argument("--rates-seeds", type=int, default=2)
    parser.add_argument("--picture", default="", help="PNG; needs matplotlib")
    parser.add_argument("--settings", default="", help="names, with commas")
    parser.add_argument("--methods", default="", help="names, with semicolons")
    arguments = parser.parse_args(argv)
    result, curves = measure_all(arguments)
    if arguments.picture:
        draw(arguments.picture, result, curves)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
