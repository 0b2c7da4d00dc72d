"""`stabil run`: start a training script again when it dies or hangs."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    text = "start a training script again when it dies or hangs"
    parser = commands.add_parser(
        "run",
        help=text,
        description=(
            f"{text.capitalize()}, as long as it gets further. RUN is the run_dir of "
            "its stabil.Session. Exit code 0: the run has ended; 76: start it on "
            "another machine; 77: a person must look."
        ),
    )
    parser.add_argument("folder", type=pathlib.Path, metavar="RUN")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        help="starts in a row that may end without progress (default 3)",
    )
    parser.add_argument(
        "--hang-minutes",
        type=float,
        default=10.0,
        help="silence at which a running process counts as hung (default 10)",
    )
    parser.add_argument(
        "--start-minutes",
        type=float,
        default=60.0,
        help="the same until the first step is done (default 60)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=120.0,
        help="time from the request to end to the kill, for a save (default 120)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from stabil.cli._output import print_json
    from stabil.session import Supervisor

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    supervisor = Supervisor(
        words,
        args.folder,
        restarts=args.restarts,
        hang_seconds=60.0 * args.hang_minutes,
        start_seconds=60.0 * args.start_minutes,
        grace_seconds=args.grace_seconds,
    )
    code = supervisor.run()
    if args.json:
        print_json({"code": code, "starts": supervisor.starts})
    else:
        starts = f"{supervisor.starts} start{'s' * (supervisor.starts != 1)}"
        print(f"ended with code {code} after {starts}", file=sys.stderr)
    return code
