"""The numbers of `stabil demo`: what was planted, what was named, what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from stabil.cli._demo_faults import Planted, same_place
from stabil.cli._demo_train import Run
from stabil.cli._output import table
from stabil.vocabulary import Cause, Severity

TOLERANCE = 0.01  # how far above the clean run the protected one may end


class Seen(NamedTuple):
    """What the protected run saw in one step, as host numbers.

    Attributes:
      step: the step's number; it comes again after a rollback.
      position: the position of its batch in the data; it never comes again.
      severity: a `Severity`.
      flags: a union of `Cause` bits.
      first: the first offending signal, or None.
      clipped: whether the gradient was scaled down in a step that was not blocked.
      resets: leaves whose moments were restarted.
    """

    step: int
    position: int
    severity: int
    flags: int
    first: str | None
    clipped: bool
    resets: int


class Rollback(NamedTuple):
    """One rollback of the protected run.

    Attributes:
      left: the step that would have come next.
      to: the step that came instead.
      position: position of the last batch before the rollback.
    """

    left: int
    to: int
    position: int


def interventions(
    seen: Sequence[Seen], rollbacks: Sequence[Rollback]
) -> list[tuple[int, str]]:
    """Batch position and kind of each clip, skip, reset and rollback."""
    clips = [(s.position, "clip") for s in seen if s.clipped]
    skips = [(s.position, "skip") for s in seen if s.severity == Severity.BLOCK]
    resets = [(s.position, "reset") for s in seen if s.resets]
    return [*clips, *skips, *resets, *((r.position, "rollback") for r in rollbacks)]


def steps_lost(seen: Sequence[Seen], rollbacks: Sequence[Rollback]) -> int:
    """Steps that were skipped or done twice; one that was both counts once."""

    def is_redone(s: Seen) -> bool:
        return any(r.to <= s.step and s.position <= r.position for r in rollbacks)

    skips = sum(s.severity == Severity.BLOCK and not is_redone(s) for s in seen)
    return skips + sum(r.left - r.to for r in rollbacks)


def fault_rows(
    plan: Sequence[Planted], seen: Sequence[Seen], rollbacks: Sequence[Rollback]
) -> list[dict[str, Any]]:
    """One row a fault: what was planted, what the run named, and what it cost.

    A fault is named by the first alarm from its first batch on, before the next fault.
    It is named rightly when that alarm came while it struck, at its own layer.
    """
    ends = [p.fault.step for p in plan[1:]] + [math.inf]
    rows = []
    for planted, end in zip(plan, ends, strict=True):
        fault = planted.fault
        span = [s for s in seen if fault.step <= s.position < end]
        alarms = [s for s in span if s.severity > Severity.OK]
        alarm = alarms[0] if alarms else None
        met = span[0].step if span else None
        back = [r for r in rollbacks if fault.step <= r.position < end]
        skips = sum(s.severity == Severity.BLOCK for s in span)
        rows.append(
            {
                "title": planted.title,
                "planted": str(fault),
                "batch": fault.step,
                "batches": fault.duration,
                "step": met,
                "layer": planted.layer or None,
                "named_step": alarm.step if alarm else None,
                "named": alarm.first if alarm else None,
                "causes": list(Cause.names(alarm.flags)) if alarm else [],
                "named_rightly": alarm is not None
                and alarm.position < fault.step + fault.duration
                and same_place(planted.layer, alarm.first),
                "skips": skips,
                "clips": sum(s.clipped for s in span if s in alarms),
                "resets": sum(s.resets for s in span),
                "rollbacks": len(back),
                "steps_lost": steps_lost(span, back),
            }
        )
    return rows


def run_row(run: Run) -> dict[str, Any]:
    """The numbers of one run without interventions."""
    return {
        "final_loss": run.final_loss,
        "nonfinite_parameter_steps": run.unsound_steps,
        "stopped": run.stopped,
        "seconds": round(run.seconds, 1),
        "skips": 0,
        "clips": 0,
        "resets": 0,
        "rollbacks": 0,
        "steps_lost": 0,
    }


def guarded_row(
    run: Run, seen: Sequence[Seen], rollbacks: Sequence[Rollback]
) -> dict[str, Any]:
    """The numbers of the protected run."""
    skips = sum(s.severity == Severity.BLOCK for s in seen)
    return run_row(run) | {
        "skips": skips,
        "clips": sum(s.clipped for s in seen),
        "resets": sum(s.resets for s in seen),
        "rollbacks": len(rollbacks),
        "steps_lost": steps_lost(seen, rollbacks),
    }


def verdict(runs: dict[str, dict[str, Any]], faults: Sequence[dict]) -> dict[str, Any]:
    """Whether the protected run held, and by how much it ended off the clean one."""
    clean, protected = runs["clean"]["final_loss"], runs["protected"]["final_loss"]
    off = protected / clean - 1
    return {
        "within_1_percent": math.isfinite(off) and off <= TOLERANCE,
        "ran_to_the_end": runs["protected"]["stopped"] is None,
        "off_clean": off,
        "parameters_always_finite": runs["protected"]["nonfinite_parameter_steps"] == 0,
        "faults_named_rightly": sum(row["named_rightly"] for row in faults),
        "faults_planted": len(faults),
    }


def as_text(report: dict[str, Any]) -> str:
    """The report as two tables and a few lines, for people."""
    columns = ("steps_lost", "skips", "clips", "resets", "rollbacks")
    clean = report["runs"]["clean"]["final_loss"]
    runs = [
        [
            name,
            f"{row['final_loss']:.4f}",
            _percent(row["final_loss"] / clean - 1),
            row["nonfinite_parameter_steps"],
            *(row[c] for c in columns),
            f"{row['seconds']:.0f}",
        ]
        for name, row in report["runs"].items()
    ]
    head = ["run", "final loss", "off clean", "bad steps", "lost", *columns[1:]]
    faults = [
        [
            row["title"],
            "-" if row["step"] is None else row["step"],
            row["layer"] or "-",
            "-" if row["named_step"] is None else row["named_step"],
            row["named"] or "nothing",
            ", ".join(row["causes"]) or "-",
            "yes" if row["named_rightly"] else "NO",
            row["steps_lost"],
        ]
        for row in report["faults"]
    ]
    fault_head = "planted|at step|in|named at|as|cause|right|lost".split("|")
    lines = [
        "",
        table([*head, "seconds"], runs),
        "",
        table(fault_head, faults),
        "",
        "final loss: mean over 32 fixed held-out batches at the end, nats a byte",
        "bad steps: steps after which a parameter was not finite",
        "steps lost: steps that were skipped, and steps that a rollback redid",
        "",
        _sentence(report),
        f"folder: {report['folder']}",
    ]
    if report["runs"]["protected"]["stopped"]:
        lines.append(f"stopped early: {report['runs']['protected']['stopped']}")
    if report["picture"]:
        lines.append(f"picture: {report['picture']}")
    return "\n".join(lines)


def _sentence(report: dict[str, Any]) -> str:
    checks = report["checks"]
    held = "passed" if report["passed"] else "FAILED"
    return (
        f"{held}: the protected run ended {_percent(checks['off_clean'])} off the "
        f"clean one (allowed +1%), its parameters were "
        f"{'' if checks['parameters_always_finite'] else 'NOT '}finite at every step, "
        f"{checks['faults_named_rightly']} of {checks['faults_planted']} faults were "
        "named rightly"
    )


def _percent(share: float) -> str:
    return f"{100 * share:+.2f}%" if math.isfinite(share) else "-"
