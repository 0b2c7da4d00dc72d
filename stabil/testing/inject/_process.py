"""A process that dies or hangs."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Sequence

from stabil.testing.inject._fault import Fault, due


def process(
    schedule: Sequence[Fault], step: int, once: str | os.PathLike[str] | None = None
) -> None:
    """Kills or hangs this process with the faults that strike `process` at `step`.

    `die` is a SIGKILL, which nothing can catch. `hang` sleeps for `size` seconds, or
    for good if None; signals that have a Python handler do not end it.

    Args:
      schedule: the planted faults; those of other places are ignored.
      step: a Python integer.
      once: a file that is made before a fault strikes; a process that finds it there
        is spared. Needed where the process is started again and comes to the same
        step.

    Examples:
      >>> nap = Fault(kind="hang", place="process", step=2, size=0.01)
      >>> process((nap,), 1), process((nap,), 2)
      (None, None)
    """
    for fault in due(schedule, step, "process"):
        if once is not None:
            if pathlib.Path(once).exists():
                return
            pathlib.Path(once).write_text(f"{fault}\n")
        if fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        until = None if fault.size is None else time.monotonic() + fault.size
        while until is None or time.monotonic() < until:
            left = 3600.0 if until is None else until - time.monotonic()
            time.sleep(max(0.0, min(left, 3600.0)))
