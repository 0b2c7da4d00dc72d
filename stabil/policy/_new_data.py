"""Tells data that have changed for good from a state that went wrong."""

from __future__ import annotations

from stabil.policy._level import FAR
from stabil.policy._words import BLOCK, Observation

_WITNESSES = 3  # steps


class NewData:
    """What a restored state says about the data that come next.

    A healthy state that runs again has a normal loss at first, and goes wrong later if
    it does. When its very first losses are far above their level, the fault lies in the
    data. The first time at a place they are left out, since bad data may end; when the
    data beyond those are as strange, they have changed for good, and no rollback helps.
    """

    def __init__(self) -> None:
        self._asks, self._far_steps = False, 0

    def restored(self, relapses: int) -> None:
        """A state was restored, at a place that had as many rollbacks before."""
        self._asks, self._far_steps = relapses > 0, 0

    def observe(self, seen: Observation, height: int) -> bool:
        """Takes one step in; True on the one that makes it certain."""
        if not self._asks or seen.severity >= BLOCK:
            return False
        self._far_steps += height >= FAR
        self._asks = height >= FAR and self._far_steps < _WITNESSES
        return self._far_steps == _WITNESSES

    def get_state(self) -> list[int]:
        return [int(self._asks), self._far_steps]

    def set_state(self, state: list[int]) -> None:
        self._asks, self._far_steps = bool(state[0]), int(state[1])
