"""The `stabil` command.

Exit codes: 0 all is well, 1 something was found or failed, 2 the command could not be
understood or its input could not be read. Every subcommand takes `--json` and then
prints exactly one JSON object on the standard output; progress goes to the standard
error.
"""

from stabil.cli._main import main as main

__all__ = ["main"]
