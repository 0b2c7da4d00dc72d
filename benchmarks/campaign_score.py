"""What `campaign.py` makes of its trials: a row each, a table, a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from campaign_faults import Trial
from campaign_session import INTERVENTIONS, Protected

WITHIN = 0.01  # of the clean run's loss
POISON = 0.10  # above the clean run's loss at the same step
PATIENCE = 10  # steps within which lasting damage has to be named


def score(
    trial: Trial,
    seen: Protected,
    clean: dict[str, Any],
    others: dict[str, dict[str, Any]],
    level_every: int,
) -> dict[str, Any]:
    """The row of one trial, ready for JSON.

    Args:
      trial: what was planted.
      seen: the protected run.
      clean: loss and levels of the clean run of the same seed.
      others: loss and soundness of the runs with a single measure.
      level_every: steps between the clean run's levels.
    """
    begin = trial.fault.step if trial.fault else math.inf
    alarms = [e for e in seen.events if e.severity != "ok" and e.data_index is not None]
    alarm = next((e for e in alarms if e.data_index >= begin), None)
    early = [e for e in alarms if e.data_index < begin]
    rows = {name: _ending(run, clean["loss"]) for name, run in others.items()}
    harmed = any(not rows[n]["within"] for n in ("unprotected",) if n in rows)
    lost = trial.fault.duration if trial.fault else 0
    poisoned = [
        step
        for step, loss in seen.healthy.items()
        if not loss <= (1 + POISON) * _level(clean, step - lost, level_every)
    ]
    has_culprit = trial.fault is not None and harmed
    return {
        "trial": trial.number,
        "seed": trial.seed,
        "place": trial.place,
        "kind": trial.kind,
        "planted": [str(f) for f in (trial.other, trial.fault) if f],
        "size": trial.fault.size if trial.fault else None,
        "entries": trial.fault.entries if trial.fault else None,
        "ended": seen.ended,
        "stopped": seen.stopped,
        **_ending({"loss": seen.loss, "sound": seen.sound}, clean["loss"]),
        "bad_steps": seen.bad_steps,
        "steps_lost": seen.summary["steps_lost"],
        "actions": seen.summary["actions"],
        "false_interventions": sum(e.action in INTERVENTIONS for e in early),
        "false_clips": sum(e.action == "clip" for e in early),
        "poisoned_healthy": poisoned,
        "has_culprit": has_culprit,
        "named": alarm.layer if alarm else None,
        "causes": alarm.cause if alarm else "",
        "steps_to_detect": alarm.data_index - begin if alarm else None,
        "named_rightly": alarm is not None and _is_right(trial, alarm),
        "others": rows,
    }


def _ending(run: dict[str, Any], clean: float) -> dict[str, Any]:
    off = run["loss"] / clean - 1
    sound = bool(run["sound"])
    return {
        "loss": run["loss"] if math.isfinite(run["loss"]) else None,
        "off": off if math.isfinite(off) else None,
        "sound": sound,
        "within": sound and math.isfinite(off) and off <= WITHIN,
    }


def _level(clean: dict[str, Any], step: int, every: int) -> float:
    """The clean run's held-out loss at or before a step; none before the first."""
    at = step // every - 1
    return float(clean["levels"][at]) if at >= 0 else math.inf


def _is_right(trial: Trial, alarm: Any) -> bool:
    """Whether the first alarm came while the fault struck, at its own module."""
    fault = trial.fault
    lasting = fault.place in ("parameters", "moments")
    end = fault.step + (PATIENCE if lasting else fault.duration)
    layer = f"/{trial.layer}/" if trial.layer else ""
    named = (alarm.layer or "").replace("activations/Gpt", "activations")
    return alarm.data_index < end and layer in f"/{named}/"


def share(values: Iterable[bool]) -> float | None:
    """The share of true values; None without values."""
    values = list(values)
    return round(sum(values) / len(values), 4) if values else None


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a campaign."""
    culprits = [r for r in rows if r["has_culprit"]]
    free = [r for r in rows if r["place"] == "none"]
    return {
        "trials": len(rows),
        "finished_share": share(r["ended"] for r in rows),
        "within_1_percent_share": share(r["within"] for r in rows),
        "nonfinite_params": sum(not r["sound"] for r in rows),
        "poisoned_healthy_checkpoints": sum(len(r["poisoned_healthy"]) for r in rows),
        "culprit_named_share": share(r["named_rightly"] for r in culprits),
        "culprits": len(culprits),
        "false_interventions": sum(r["false_interventions"] for r in rows),
        "false_clips": sum(r["false_clips"] for r in rows),
        "fault_free_trials": len(free),
        "median_steps_to_detect": _median(r["steps_to_detect"] for r in culprits),
        "within_1_percent_share_of": {
            name: share(
                r["others"][name]["within"] for r in rows if name in r["others"]
            )
            for name in _names(rows)
        },
        "nonfinite_params_of": {
            name: sum(
                not r["others"][name]["sound"] for r in rows if name in r["others"]
            )
            for name in _names(rows)
        },
    }


def by_kind(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each place and kind of fault."""
    table = []
    for key in sorted({(r["place"], r["kind"]) for r in rows}):
        some = [r for r in rows if (r["place"], r["kind"]) == key]
        culprits = [r for r in some if r["has_culprit"]]
        offs = [r["off"] for r in some if r["off"] is not None]
        table.append(
            {
                "place": key[0],
                "kind": key[1],
                "trials": len(some),
                "finished": share(r["ended"] for r in some),
                "within": share(r["within"] for r in some),
                "worst_off": round(max(offs), 4) if offs else None,
                "steps_lost": _median(r["steps_lost"] for r in some),
                "harmful": len(culprits),
                "named": share(r["named_rightly"] for r in culprits),
                "to_detect": _median(r["steps_to_detect"] for r in culprits),
                "false_interventions": sum(r["false_interventions"] for r in some),
                **{
                    name: share(r["others"][name]["within"] for r in some)
                    for name in _names(some)
                },
            }
        )
    return table


def as_text(report: dict[str, Any]) -> str:
    """Table and summary for people."""
    rows = report["kinds"]
    head = list(rows[0])
    lines = [[_cell(row.get(c)) for c in head] for row in rows]
    widths = [max(len(x) for x in c) for c in zip(head, *lines, strict=True)]
    text = ["  ".join(h.ljust(w) for h, w in zip(head, widths, strict=True))]
    text += [
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in lines
    ]
    text.append("")
    text += [f"{name:30} {value}" for name, value in report["summary"].items()]
    return "\n".join(text)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(n for r in rows for n in r["others"]))


def _median(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return float(np.median(found)) if found else None
