"""Batches by absolute position, with windows left out."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any, cast


class Data:
    """Draws batches in order of their position and leaves skipped windows out.

    Sources, best first:

    - a function `data_index -> batch`: any position at once, forwards and backwards;
    - an iterator with `get_state` and `set_state`, or an iterable that makes one, as
      Grain's do: positions are reached by restoring a saved state and by drawing and
      discarding;
    - any other iterable: forwards only, by drawing and discarding. A restarted run
      begins it anew and discards up to its position; the iterable must then give the
      same batches in the same order.

    Args:
      source: one of the above.
      position: position of the first batch that the source will give.

    Attributes:
      position: of the next batch.
      windows: pairs of first and last position that are left out, oldest first.
      kind: `function`, `stateful` or `plain`.

    Raises:
      TypeError: the source is none of the above.

    Examples:
      >>> data = Data(lambda i: i * 10)
      >>> data.skip(1, 2)
      >>> [data.draw() for _ in range(3)]
      [(0, 0), (3, 30), (4, 40)]
    """

    def __init__(self, source: Callable[[int], Any] | Iterable[Any], position: int = 0):
        self.position = position
        self.windows: list[tuple[int, int]] = []
        self._connect(source)

    def _connect(self, source: Callable[[int], Any] | Iterable[Any]) -> None:
        self._source: Any = source
        self._held: tuple[int, Any] | None = None
        self._iterator: Any = None
        self.kind = "function"
        if callable(source) and not hasattr(source, "__next__"):
            return
        try:
            self._iterator = iter(cast(Iterable[Any], source))
        except TypeError:
            raise TypeError(
                "needed a function data_index -> batch or an iterable of batches, got "
                f"{type(source).__name__}; write session.steps(state, lambda i: ...)"
            ) from None
        saves = all(hasattr(self._iterator, n) for n in ("get_state", "set_state"))
        self.kind = "stateful" if saves else "plain"

    def use(self, source: Callable[[int], Any] | Iterable[Any]) -> None:
        """Goes on with another source, whose first batch has the next position."""
        if source is not self._source:
            self._connect(source)

    def skip(self, first: int, last: int) -> None:
        """Leaves the positions `first` to `last` out from now on."""
        if (first, last) not in self.windows:
            self.windows.append((first, last))

    def draw(self, again: bool = False) -> tuple[int, Any]:
        """Position and batch of the next step.

        Args:
          again: the call after this one is to give the same.

        Raises:
          StopIteration: the source has ended.
        """
        if self._held is not None:
            (index, batch), self._held = self._held, None
            # Made anew where it can be: a step may donate its batch.
            return index, self._source(index) if self.kind == "function" else batch
        self._pass_windows()
        index = self.position
        batch = self._source(index) if self.kind == "function" else self._next()
        self.position = index + 1
        self._held = (index, batch) if again else None
        return index, batch

    def get_state(self) -> dict[str, Any]:
        """Position, windows and the iterator's own state, ready for JSON."""
        state: dict[str, Any] = {
            "position": self.position,
            "windows": [list(w) for w in self.windows],
        }
        if self.kind == "stateful":
            inner = self._iterator.get_state()
            if isinstance(inner, bytes):
                inner = {"base64": base64.b64encode(inner).decode()}
            state["iterator"] = inner
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; windows that are known already stay known.

        Raises:
          ValueError: the source cannot go back that far.
        """
        for first, last in state["windows"]:
            self.skip(first, last)
        goal = int(state["position"])
        if self.kind == "stateful" and "iterator" in state:
            inner = state["iterator"]
            if isinstance(inner, dict) and set(inner) == {"base64"}:
                inner = base64.b64decode(inner["base64"])
            self._iterator.set_state(inner)
            self.position = goal
        self._go_to(goal)

    def _pass_windows(self) -> None:
        moved = True
        while moved:
            moved = False
            for first, last in self.windows:
                if first <= self.position <= last:
                    self._go_to(last + 1)
                    moved = True

    def _go_to(self, goal: int) -> None:
        if self.kind == "function":
            self.position = goal
            return
        if goal < self.position:
            raise ValueError(
                f"needed data from position {goal}, but the source is at "
                f"{self.position} and cannot go back; hand session.steps a function "
                "data_index -> batch or an iterator with get_state and set_state"
            )
        while self.position < goal:
            self._next()
            self.position += 1

    def _next(self) -> Any:
        return next(self._iterator)
