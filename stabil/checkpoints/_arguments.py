"""Checks of what a Keeper is given."""

from __future__ import annotations

import json
import operator
from typing import Any


def require_at_least(least: int, **numbers: Any) -> None:
    """Refuses what is no whole number, or too small.

    Raises:
      ValueError: names the argument.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"needed {name} as a whole number >= {least}, got {value!r}"
            )


def require_minutes(name: str, minutes: float | None, instead: str) -> None:
    """Refuses a time that is not positive.

    Raises:
      ValueError: names the argument.
    """
    if minutes is not None and not minutes > 0:
        raise ValueError(f"needed {name} > 0, or {instead}, got {minutes!r}")


def whole_number(step: Any) -> int:
    """A step as an int.

    Raises:
      ValueError: it is no whole number >= 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or number < 0:
        raise ValueError(f"needed step as a whole number >= 0, got {step!r}")
    return number


def as_metric(value: Any) -> float | None:
    """A metric as a float.

    Raises:
      TypeError: it is no number.
    """
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"needed metric as a number, got {value!r}") from error


def as_json(value: dict[str, Any] | None, name: str = "extra") -> dict[str, Any]:
    """A copy of a JSON-able dict; empty for None.

    Raises:
      TypeError: it is not.
    """
    try:
        copied = json.loads(json.dumps(value or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"needed {name} as a JSON-able dict, got: {error}") from error
    if not isinstance(copied, dict):
        raise TypeError(f"needed {name} as a JSON-able dict, got {value!r}")
    return copied
