"""Reads the command line and hands over to a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stabil.cli import _calibrate, _checkpoints, _demo, _lint, _run
from stabil.cli._output import print_json


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one `stabil` command.

    Args:
      argv: the words after `stabil`; those of this process if None.

    Returns:
      The exit code: 0 all is well, 1 something was found or failed, 2 the command
      could not be understood or its input could not be read.

    Examples:
      >>> main(["checkpoints", "ls", "/no/such/run"])
      2
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return args.run(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"stabil {args.command}: {error}", file=sys.stderr)
        if args.json:
            print_json({"error": str(error)})
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stabil", description="Keeps large-model training in JAX stable."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (_demo, _checkpoints, _run, _lint, _calibrate):
        module.add_command(commands)
    return parser
