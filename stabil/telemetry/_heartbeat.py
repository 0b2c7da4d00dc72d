"""A small file that shows that a run is alive, and how far it is."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from typing import Any

from stabil.telemetry._background import Background
from stabil.telemetry._run_folder import write_json

STATES = (
    "starting",
    "running",
    "paused",
    "preempted",
    "hung",
    "stopped",
    "failed",
    "ended",
)


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a heartbeat file says.

    Attributes:
      step: step that runs next; -1 before the first.
      state: one of `STATES`.
      exit_code: code that the process is about to end with; 0 while it runs.
      pid: process id.
      time: when it was written; seconds since 1970, UTC.
      text: one sentence where there is something to say.
      schema: version of these fields.
    """

    step: int
    state: str
    exit_code: int = 0
    pid: int = 0
    time: float = 0.0
    text: str = ""
    schema: int = 1

    def age(self) -> float:
        """Seconds since it was written."""
        return max(0.0, time.time() - self.time)


class Heartbeat:
    """Writes a `Beat` at most every `every_seconds`, from a thread of its own.

    It beats when the training thread calls `beat` and at no other time, so a hung step
    lets the file grow old. A disk that fails costs beats and nothing else.

    Args:
      path: file to replace.
      every_seconds: shortest time between two writes; a change of state is written at
        once.

    Examples:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "heartbeat.json"
      >>> with Heartbeat(path) as heart:
      ...     heart.beat(7)
      >>> read_beat(path).step
      7
    """

    def __init__(self, path: pathlib.Path, *, every_seconds: float = 1.0):
        self._path, self._every = path, every_seconds
        self._at, self._state = -float("inf"), ""
        self._background = Background(
            self._write, name="stabil-heartbeat", every_seconds=0.0, capacity=1000
        )

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def beat(
        self, step: int, state: str = "running", *, exit_code: int = 0, text: str = ""
    ) -> None:
        """Says that the run is alive; costs a clock read when it said so just now."""
        now = time.monotonic()
        if state == self._state and now - self._at < self._every:
            return
        self._at, self._state = now, state
        beat = Beat(step, state, exit_code, os.getpid(), time.time(), text)
        self._background.put(beat)

    def close(self) -> None:
        self._background.close(timeout_seconds=5.0)

    def _write(self, beats: list[Beat]) -> None:
        write_json(self._path, dataclasses.asdict(beats[-1]))


def read_beat(path: str | os.PathLike[str]) -> Beat | None:
    """The newest beat, or None when there is no readable file."""
    try:
        fields = json.loads(pathlib.Path(path).read_text())
        known = {f.name for f in dataclasses.fields(Beat)}
        return Beat(**{k: v for k, v in fields.items() if k in known})
    except (OSError, ValueError, TypeError):
        return None
