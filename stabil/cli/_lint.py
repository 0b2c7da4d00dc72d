"""`stabil lint`: what happened in a run, read from its log."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "lint",
        help="what happened in a run, read from its log",
        description=(
            "Reads logs of finished or running trainings (CSV, TSV, JSONL, Hugging "
            "Face trainer_state.json, W&B exports, TensorBoard event files, plain "
            "text) and names spikes, divergence, level shifts and non-finite values. "
            "Exit code 0: clean; 1: something was found, or lines could not be used; "
            "2: a log could not be read."
        ),
    )
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="LOG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--watch", action="store_true", help="show events that need no attention too"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="the logs are of like runs, or of the processes of one: say which departs",
    )
    parser.add_argument("--png", type=pathlib.Path, help="draw the first log to a file")
    parser.add_argument(
        "--format", help="do not guess: csv, tsv, json, jsonl, text ..."
    )
    parser.add_argument("--step", metavar="NAME", help="column of the step")
    parser.add_argument("--loss", metavar="NAME", help="column of the loss")
    parser.add_argument(
        "--grad-norm", metavar="NAME", help="column of the gradient norm"
    )
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help="for text: groups named loss and, where there are any, step and grad_norm",
    )
    parser.add_argument(
        "--calibration",
        type=pathlib.Path,
        metavar="FILE",
        help="ranges by stabil calibrate, to hold every signal of the log against",
    )
    parser.set_defaults(run=_lint)


def _lint(args: argparse.Namespace) -> int:
    from stabil import curves
    from stabil.cli._output import print_json

    names = {k: getattr(args, k) for k in ("format", "step", "loss", "grad_norm")}
    ranges = curves.load_calibration(args.calibration) if args.calibration else {}
    code, reports, read_well = 0, [], []
    for path in args.logs:
        try:
            report = curves.lint(path, pattern=args.pattern, **names)
            read = {"format": args.format, "pattern": args.pattern}
            beyond = curves.past_limits(path, ranges, **read) if ranges else []
        except (OSError, ValueError) as error:
            print(f"stabil lint: {error}", file=sys.stderr)
            reports.append({"path": str(path), "error": str(error)})
            code = 2
            continue
        read_well.append(report)
        limits = [{"signal": name, **event.as_dict()} for name, event in beyond]
        reports.append(report.as_dict() | {"past_limits": limits})
        if report.findings or report.problem_count or beyond:
            code = max(code, 1)
        _tell_problems(report)
        if not args.json:
            _tell(report, args.watch)
            for name, event in beyond:
                print(f"  {event}: {name}")
            if ranges:
                share = f"{len(beyond)} of {len(ranges)} signals"
                print(f"  calibration: {share} beyond their limit")
        if args.png and path == args.logs[0]:
            curves.draw(report, args.png)
    result: dict[str, Any] = {"logs": reports}
    if args.together:
        result["departures"] = _together(args, read_well)
        code = max(code, int(bool(result["departures"])))
    if args.json:
        print_json(result | {"exit_code": code})
    return code


def _together(args: argparse.Namespace, reports: list[Any]) -> list[dict[str, Any]]:
    """What departs from the other logs, as plain values; printed unless `--json`."""
    from stabil import curves

    paths = [report.path for report in reports]
    read = {"format": args.format, "pattern": args.pattern}
    found = [
        one._asdict() | {"log": paths[one.log]}
        for one in curves.compare_logs(paths, **read)
    ]
    found += [
        message._asdict() | {"log": paths[at]}
        for at, message in curves.only_in_one([r.messages for r in reports])
    ]
    for one in found if not args.json else ():
        if "signal" in one:
            steps = f"from step {one['step']:g} to {one['last']:g}"
            away = f"{one['score']:.3g} deviations"
            print(f"{one['log']} departs: {one['signal']} {steps}, {away}")
        else:
            lines = f"{one['lines']} lines from {one['first']} on"
            print(f"{one['log']} alone says: {one['template']} ({lines})")
    return found


def _tell_problems(report: Any) -> None:
    for problem in report.problems:
        print(f"{report.path}:{problem.line}: {problem.text}", file=sys.stderr)
    more = report.problem_count - len(report.problems)
    if more:
        print(f"{report.path}: {more} more such lines", file=sys.stderr)


def _tell(report: Any, everything: bool) -> None:
    names = report.columns
    norm = names["grad_norm"] or "no gradient norm"
    steps = f"{report.rows} rows, steps {report.first_step:g} to {report.last_step:g}"
    print(f"{report.path}: {steps} ({report.format}: {names['loss']}, {norm})")
    print(f"  {report.sketch.sparkline()}")
    shown = report.events if everything else report.findings
    for event in shown:
        print(f"  {event}")
    for message in report.repeated[:5]:
        print(f"  {message.lines} lines from {message.first} on: {message.template}")
    quiet = len(report.events) - len(report.findings)
    rest = "" if everything or not quiet else f", {quiet} that need no attention"
    print(f"  {len(report.findings)} findings{rest}")
    if report.loss_spike_score == report.loss_spike_score:
        print(f"  spike score of the loss {report.loss_spike_score:.4%}")
