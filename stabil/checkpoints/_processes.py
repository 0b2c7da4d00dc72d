"""Decisions that all processes take alike: the first decides, the others are told.

With one process every function here is a plain call. With several, each is a
collective: all processes must call it, in the same order.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stabil.checkpoints import _errors


def alone() -> bool:
    """Whether there is one process."""
    return jax.process_count() == 1


def is_first() -> bool:
    """Whether this process is the one that decides and changes the folder."""
    return jax.process_index() == 0


def _share(text: str) -> str:
    from jax.experimental import multihost_utils

    raw = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(raw.size)))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, raw.size)] = raw[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def decide(action: Callable[[], Any]) -> Any:
    """Runs an action on the first process and gives every process its outcome.

    Args:
      action: gives something JSON-able; dicts come back with texts for keys.
    Raises:
      Exception: what the action raised, on every process.
    """
    if alone():
        return action()
    outcome: dict[str, Any] = {}
    raised: BaseException | None = None
    if is_first():
        try:
            outcome = {"result": action()}
        except Exception as error:
            outcome, raised = {"error": [type(error).__name__, str(error)]}, error
    outcome = json.loads(_share(json.dumps(outcome)))
    if raised is not None:
        raise raised
    if "error" in outcome:
        name, text = outcome["error"]
        kind = getattr(_errors, name, None) or getattr(builtins, name, RuntimeError)
        raise kind(text)
    return outcome["result"]


def anywhere(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    if alone():
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def gathered(values: list[int]) -> np.ndarray:
    """What each process hands in, int32 `[processes, values]`."""
    row = np.asarray(values, np.int32)
    if alone():
        return row[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(row))


def added_up(table: np.ndarray) -> np.ndarray:
    """The sum over processes, modulo 2**32, of a uint32 table."""
    if alone():
        return table
    from jax.experimental import multihost_utils

    tables = np.asarray(multihost_utils.process_allgather(table.astype(np.uint32)))
    return np.add.reduce(tables, axis=0, dtype=np.uint32)
