"""Small files that survive a kill: written aside, flushed, renamed, and checked."""

from __future__ import annotations

import calendar
import json
import os
import pathlib
import time
import uuid
import zlib
from typing import Any

from stabil.checkpoints import _points
from stabil.checkpoints._errors import DamagedError

# What was being written when a process was killed carries this prefix.
TEMPORARY = ".stabil-tmp-"


def fsync_path(path: pathlib.Path) -> None:
    """Flushes a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_to_write(folder: pathlib.Path) -> None:
    """Makes and removes a folder.

    Raises:
      OSError: nothing can be written there.
    """
    aside = folder / (TEMPORARY + uuid.uuid4().hex[:8])
    aside.mkdir()
    aside.rmdir()


def _checksum(payload: dict[str, Any]) -> str:
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def sealed(payload: dict[str, Any]) -> str:
    """A JSON object as a text that holds its checksum."""
    # Through text and back, so that the checksum is of what a reader will see.
    payload = json.loads(json.dumps(payload))
    return json.dumps({"crc32": _checksum(payload), **payload}, indent=1) + "\n"


def unsealed(raw: bytes, name: Any) -> dict[str, Any]:
    """The object of a `sealed` text.

    Raises:
      DamagedError: the text is not what was written.
    """
    try:
        payload = json.loads(raw)
        checksum = payload.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{name} is not readable: {error}") from error
    if checksum != _checksum(payload):
        raise DamagedError(f"{name} is not what was written: its checksum differs")
    return payload


def write_sealed(path: pathlib.Path, payload: dict[str, Any]) -> None:
    """Writes a JSON object with its checksum; after a kill the old file or the new.

    Args:
      path: file to make or replace; its folder must exist.
      payload: JSON-able, without a key `crc32`.
    """
    text = sealed(payload)
    aside = path.with_name(TEMPORARY + path.name + "-" + uuid.uuid4().hex[:8])
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    _points.reached("written_aside")
    os.replace(aside, path)
    fsync_path(path.parent)


def read_sealed(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `write_sealed` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      DamagedError: the text is not what was written.
    """
    return unsealed(path.read_bytes(), path)


def append_line(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Appends one JSON object and its UTC time to a file of lines."""
    line = json.dumps({"time": utc_now(), **record}) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of lines; a line that a kill cut short is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def utc_now() -> str:
    """The wall clock in UTC, for people; of it is decided only what may be deleted."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def seconds(text: str) -> float:
    """The moment that `utc_now` wrote, in seconds since 1970; 0 if unreadable."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return 0.0
