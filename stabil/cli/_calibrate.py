"""`stabil calibrate`: typical ranges of every signal of a healthy run."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "calibrate",
        help="typical ranges of every signal of a healthy run",
        description=(
            "Reads the log of a short, healthy run and writes the typical size, the "
            "noise and the limit of every number in it to one readable file, for "
            "stabil.guard(..., calibration=FILE) and stabil lint --calibration FILE. "
            "LOG may be the folder of a run that holds one. Exit code 0: written; 2: "
            "the log could not be read."
        ),
    )
    parser.add_argument("log", type=pathlib.Path, metavar="LOG")
    parser.add_argument("--out", type=pathlib.Path, default="calibration.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--format", help="do not guess: csv, tsv, json, jsonl, text ..."
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from stabil import curves
    from stabil.cli._output import print_json, table

    ranges = curves.calibrate(args.log, format=args.format)
    if not ranges:
        raise ValueError(
            f"{args.log}: needed numbers with 20 values or more, got none; write a log "
            "with one JSON object a line"
        )
    curves.save_calibration(ranges, args.out, source=str(args.log))
    if args.json:
        signals = {name: one._asdict() for name, one in ranges.items()}
        print_json({"out": str(args.out), "signals": signals})
        return 0
    rows = [[n, *(f"{v:.4g}" for v in one)] for n, one in ranges.items()]
    print(table(["signal", *next(iter(ranges.values()))._fields], rows))
    print(f"written to {args.out}")
    return 0
