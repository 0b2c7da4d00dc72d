"""The event log: append-only JSON lines that survive a crash."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
import warnings
from typing import Any

from stabil.telemetry._background import Background
from stabil.telemetry._event import Event

ROWS_A_WRITE = 256


class EventLog:
    """Appends events to a file, one JSON object a line, from a background thread.

    `add` only queues: nothing is encoded or written on the caller's thread. Rows are
    written 256 at a time or after `every_seconds`, and at `flush`, `close` and the end
    of the interpreter. Beyond `capacity` waiting rows new ones are dropped and counted;
    the count is written to the log when it is closed. A write that fails is tried again
    twice, then its rows are counted as failed; no error reaches the training. A line
    that a crash has torn is ended before the next row is appended. A file that has
    grown beyond `max_bytes` is renamed to `events.0001.jsonl` and so on.

    Args:
      path: file; created with its folder when missing, never truncated.
      run: name of the run, for rows that have none.
      process: index of this process.
      code_version: version of the code, for rows that have none.
      every_seconds: longest time that a row waits in memory.
      capacity: rows that may wait in memory.
      max_bytes: size at which a new file is begun.

    Examples:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
      >>> with EventLog(path, run="doc") as log:
      ...     log.add(Event(action="skip", step=7, cause="nonfinite_loss"))
      True
      >>> [(e.step, e.cause) for e in read_events(path)]
      [(7, 'nonfinite_loss')]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str = "",
        process: int = 0,
        code_version: str = "",
        every_seconds: float = 2.0,
        capacity: int = 65536,
        max_bytes: int = 1 << 28,
    ):
        self._max_bytes = max_bytes
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._defaults: dict[str, Any] = dict(
            run=run, process=process, code_version=code_version
        )
        self._file = self._open()
        self._torn = _is_torn(self._file)
        self._closed = False
        self._background = Background(
            self._write,
            name="stabil-events",
            batch=ROWS_A_WRITE,
            every_seconds=every_seconds,
            capacity=capacity,
            retries=2,
        )

    @property
    def dropped_rows(self) -> int:
        """Rows refused because too many were waiting."""
        return self._background.dropped

    @property
    def failed_rows(self) -> int:
        """Rows given up because the file could not be written."""
        return self._background.failed

    @property
    def last_error(self) -> Exception | None:
        """The newest error of a write."""
        return self._background.last_error

    def add(self, event: Event) -> bool:
        """Queues one event; False when it was dropped."""
        return self._background.put((time.time(), event))

    def flush(self, timeout_seconds: float = 10.0) -> bool:
        """Waits until every queued row is in the file; False on a timeout."""
        done = self._background.flush(timeout_seconds)
        return done and not self._background.failed

    def close(self) -> None:
        """Writes what is left, notes dropped rows, and closes the file."""
        if self._closed:
            return
        self._closed = True
        ended = self._background.close()
        if self.dropped_rows or self.failed_rows:
            numbers = dict(dropped_rows=self.dropped_rows, failed_rows=self.failed_rows)
            lost = Event(action="dropped", text="rows were lost", numbers=numbers)
            try:
                self._write([(time.time(), lost)])
            except OSError as error:
                self._background.last_error = error
        if ended:  # else the thread is stuck in a write to this very file
            os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _write(self, rows: list[tuple[float, Event]]) -> None:
        lines = [self._complete(at, event).to_json() for at, event in rows]
        data = ("\n" * self._torn + "\n".join(lines) + "\n").encode()
        start = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(f"{self.path}: only a part was written")
        except OSError:
            self._undo(start)
            raise
        self._torn = False
        if start + len(data) > self._max_bytes:
            self._rotate()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _rotate(self) -> None:
        stem, number = self.path.stem, 1
        while (older := self.path.with_name(f"{stem}.{number:04d}.jsonl")).exists():
            number += 1
        try:
            os.rename(self.path, older)
            file = self._open()
        except OSError:  # the rows are safe; one long file is better than none
            return
        os.close(self._file)
        self._file = file

    def _undo(self, size: int) -> None:
        try:
            os.ftruncate(self._file, size)
        except OSError:
            self._torn = True

    def _complete(self, at: float, event: Event) -> Event:
        missing = {k: v for k, v in self._defaults.items() if not getattr(event, k)}
        return dataclasses.replace(event, time=event.time or at, **missing)


def _is_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a log file, or of all logs in a run folder, in order of writing.

    A line that cannot be read is left out: silently at the end of a file, where a crash
    tears lines, and with a warning anywhere else. Rows of several processes are merged
    by step and time.

    Raises:
      FileNotFoundError: no such file, or a folder without logs.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        files = sorted(path.glob("events*.jsonl"))
        if not files:
            raise FileNotFoundError(
                f"needed a run folder with events.jsonl, got {path} without one; "
                "stabil.Session(run_dir) writes it"
            )
        events = [read_events(file) for file in files]
        if len(events) == 1:
            return events[0]
        return sorted((e for es in events for e in es), key=lambda e: (e.time, e.step))
    events, unread = [], 0
    lines = path.read_bytes().split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            events.append(Event.from_json(line))
        except (ValueError, TypeError) as error:
            if "newer stabil" in str(error):
                raise
            unread += i < len(lines) - 1
    if unread:
        warnings.warn(f"{path}: {unread} lines could not be read", stacklevel=2)
    return events
