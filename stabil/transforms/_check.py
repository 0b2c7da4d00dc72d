"""Checks of hyperparameters when a transformation is built; one wording for all."""

from __future__ import annotations

import math
import numbers
from typing import Any


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{where}: needed a Python number for {name}, got {value!r} of type "
            f"{type(value).__name__}; hyperparameters are fixed when the "
            f"transformation is built: write {where}({name}=1.0)"
        )
    return float(value)


def positive(where: str, **values: Any) -> None:
    """Each value must be a number above 0.

    Examples:
      >>> positive("clip", max_norm=-1.0)
      Traceback (most recent call last):
      ...
      ValueError: clip: needed max_norm > 0, got -1.0
    """
    for name, value in values.items():
        if not _number(where, name, value) > 0:
            raise ValueError(f"{where}: needed {name} > 0, got {value!r}")


def fraction(where: str, **values: Any) -> None:
    """Each value must be a number in [0, 1).

    Examples:
      >>> fraction("clip", decay=1.0)
      Traceback (most recent call last):
      ...
      ValueError: clip: needed 0 <= decay < 1, got 1.0
    """
    for name, value in values.items():
        if not 0 <= _number(where, name, value) < 1:
            raise ValueError(f"{where}: needed 0 <= {name} < 1, got {value!r}")


def at_least(where: str, least: int, **values: Any) -> None:
    """Each value must be a whole number of at least `least`.

    Examples:
      >>> at_least("clip", 1, warmup_steps=0)
      Traceback (most recent call last):
      ...
      ValueError: clip: needed a whole number warmup_steps >= 1, got 0
    """
    for name, value in values.items():
        number = _number(where, name, value)
        if not (math.isfinite(number) and number == int(number) and number >= least):
            raise ValueError(
                f"{where}: needed a whole number {name} >= {least}, got {value!r}"
            )


def thresholds(where: str, values: Any) -> tuple[float, ...]:
    """One positive number or more, as a tuple of floats.

    Examples:
      >>> thresholds("guard", ())
      Traceback (most recent call last):
      ...
      ValueError: guard: needed one threshold > 0 or more for shadow, got ()
    """
    try:
        numbers = tuple(_number(where, "shadow", value) for value in values)
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise ValueError(
            f"{where}: needed one threshold > 0 or more for shadow, got {values!r}"
        )
    return numbers
