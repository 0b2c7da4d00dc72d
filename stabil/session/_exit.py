"""Exit codes that tell a supervisor what to do next."""

from __future__ import annotations

import enum
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax

from stabil.session._stop import TrainingStopped


class ExitCode(enum.IntEnum):
    """How a training process ends; everything else counts as a crash.

    Examples:
      >>> int(ExitCode.RESTART)
      75
    """

    DONE = 0
    RESTART = 75  # asked to leave: a checkpoint was saved, start me again
    RESTART_ELSEWHERE = 76  # the machine is suspect, start me on another
    PERSON = 77  # nothing helps any more, a person must look


class Preempted(SystemExit):
    """Ends the process with `ExitCode.RESTART` after an emergency checkpoint."""

    def __init__(self, step: int):
        super().__init__(int(ExitCode.RESTART))
        self.step = step


def exit_code(error: TrainingStopped) -> ExitCode:
    """The code that a stop calls for."""
    if "replica_disagreement" in error.causes:
        return ExitCode.RESTART_ELSEWHERE
    return ExitCode.PERSON


# How XLA's runtime begins the text of an error that is not the program's own.
_STATUS = ("UNKNOWN:", "UNAVAILABLE:", "ABORTED:", "DEADLINE_EXCEEDED:", "CANCELLED:")


def crash_code(error: BaseException) -> int:
    """75 when another process was lost, which no fault of this one can mend; else 1."""
    if jax.process_count() == 1:
        return 1
    lost = isinstance(error, jax.errors.JaxRuntimeError) or str(error).startswith(
        _STATUS
    )
    return int(ExitCode.RESTART) if lost else 1


def run_main(main: Callable[[], Any]) -> None:
    """Runs `main` and leaves the process with the code that fits its end.

    Write `stabil.session.run_main(main)` at the end of a training script that a
    supervisor starts. A stop prints its reason and advice; other exceptions pass. With
    several processes an exception ends this one at once, with code 75 when a collective
    failed because another process is gone: an orderly end would wait for that process.

    Raises:
      SystemExit: the ladder gave up.
    """
    try:
        main()
    except TrainingStopped as error:
        print(error, file=sys.stderr)
        raise SystemExit(int(exit_code(error))) from error
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(crash_code(error))
