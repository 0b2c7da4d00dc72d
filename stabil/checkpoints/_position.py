"""Where the data stand: the state of an iterator, kept with the step.

Any iterator with `get_state` and `set_state` will do, such as those of Grain. Each
process has its own data, so each has its own state.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import jax

_BYTES = "base64"


def taken(data: Any) -> Any:
    """The iterator's state, JSON-able; None for no iterator.

    Raises:
      TypeError: it has no `get_state`, or its state cannot be kept as JSON.
    """
    if data is None:
        return None
    if not all(hasattr(data, name) for name in ("get_state", "set_state")):
        raise TypeError(
            "needed data as an iterator with get_state and set_state, got "
            f"{type(data).__name__}: pass iter(dataset), or keep a position of your "
            "own in extra={...}"
        )
    state = data.get_state()
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"needed a state of the data that is JSON-able or bytes, got: {error}"
        ) from error


def as_saved(state: Any) -> dict[str, Any]:
    """This process's state as a manifest holds it."""
    return {} if state is None else {str(jax.process_index()): state}


def put_back(data: Any, saved: dict[str, Any], step: int) -> None:
    """Sets the iterator to where it stood.

    Args:
      data: the iterator, or None to leave it alone.
      saved: state by process, see `as_saved`.
      step: names the step in the error.
    Raises:
      ValueError: the step holds no position, or that of other processes.
    """
    if data is None:
        return
    taken(data)
    state = saved.get(str(jax.process_index()))
    if state is None or len(saved) != jax.process_count():
        what = f"those of {len(saved)} processes" if saved else "none"
        raise ValueError(
            f"needed a position of the data in step {step} for each of "
            f"{jax.process_count()} processes, got {what}: restore without data=, and "
            "set the iterator yourself"
        )
    if isinstance(state, dict) and set(state) == {_BYTES}:
        state = base64.b64decode(state[_BYTES])
    data.set_state(state)
