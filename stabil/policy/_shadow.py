"""Policies that watch and tell, and never act."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stabil.policy._rungs import INTERVENTIONS
from stabil.policy._words import Action

_TOLD = {*INTERVENTIONS, "wait"}


def check_shadows(shadow: Mapping[str, Any] | None, kind: type) -> dict[str, Any]:
    """The shadows by name.

    Raises:
      TypeError: not a mapping from names to ladders.
    """
    shadow = {} if shadow is None else shadow
    if not isinstance(shadow, Mapping) or not all(
        isinstance(s, kind) for s in shadow.values()
    ):
        raise TypeError(
            f"Ladder: needed shadow as names with a Ladder each, got {shadow!r}; write "
            'shadow={"careful": stabil.policy.careful()}'
        )
    return dict(shadow)


def as_shadow(name: str, actions: Iterable[Action]) -> list[Action]:
    """What a shadow would have done; what it only noticed is the ladder's to tell."""
    return [
        Action(a.kind, f"{name}: {a.reason}", a.numbers | {"shadow": name}, True)
        for a in actions
        if a.kind in _TOLD and a.numbers.get("by") != "device"
    ]
