"""What only one process can know, told to all of them."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from stabil.telemetry import RunFolder


def from_first(value: Any) -> Any:
    """The JSON-able value that process 0 hands in, on every process.

    With several processes a collective: all must call it at the same point.

    Examples:
      >>> from_first({"windows": [[3, 5]]})
      {'windows': [[3, 5]]}
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    data = json.dumps(value).encode() if jax.process_index() == 0 else b""
    # The size first: all processes must hand in arrays of one shape.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(size, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
    return json.loads(told.tobytes().decode())


def anywhere(flag: bool) -> bool:
    """Whether any process says so; with several a collective."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def claim(
    run_dir: str | os.PathLike[str], ignore: Iterable[pathlib.Path] = ()
) -> RunFolder:
    """Claims the run folder; every process gets the same run, or the same error.

    Process 0 decides whether the folder may be used. The others may share it or have
    folders of their own on local disks.

    Raises:
      ValueError: the folder holds something else.
    """
    told: dict[str, Any] = {"run": "", "error": "", "is_new": True}
    folder = None
    if jax.process_index() == 0:
        try:
            folder = RunFolder(run_dir, ignore=ignore)
            told |= {"run": folder.run, "is_new": folder.is_new}
        except ValueError as error:
            told["error"] = str(error)
    told = from_first(told)
    if told["error"]:
        raise ValueError(told["error"])
    folder = folder or RunFolder(run_dir, run=told["run"])
    folder.is_new = bool(told["is_new"])
    return folder
