"""Where numbers and alerts go: small protocols, each served by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from stabil.telemetry._background import Background


@runtime_checkable
class Sink(Protocol):
    """Takes numbers, step by step; CLU's `MetricWriter` is one as it is.

    `flush()` and `close()` are called at the end where they exist.
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers of one step, keyed by slash path."""


@runtime_checkable
class Alert(Protocol):
    """Delivers messages to people."""

    def send(self, title: str, text: str, severity: str) -> None:
        """Sends one message; severity is `info`, `warning` or `critical`."""


class SinkChannel:
    """Feeds one sink from a thread; a sink that raises or hangs costs only its rows.

    Attributes:
      lost: rows dropped or failed so far.

    Raises:
      TypeError: the sink has no `write_scalars`.
    """

    def __init__(self, sink: Sink):
        if not callable(getattr(sink, "write_scalars", None)):
            raise TypeError(
                f"needed a sink with write_scalars(step, scalars), got {sink!r}; "
                "wrap your tracker in a class with that one method"
            )
        self._sink = sink
        name = f"stabil-sink-{type(sink).__name__}"
        # One item a call: one row that the sink refuses must not cost its neighbours.
        self._background = Background(
            self._write, name=name, batch=1, every_seconds=0.5, capacity=10_000
        )

    @property
    def lost(self) -> int:
        return self._background.dropped + self._background.failed

    @property
    def last_error(self) -> Exception | None:
        return self._background.last_error

    def put(self, step: int, scalars: Callable[[], Mapping[str, float]]) -> None:
        """Queues one step; `scalars` is called on the thread."""
        self._background.put((step, scalars))

    def close(self, timeout_seconds: float = 5.0) -> None:
        self._background.put(None)
        self._background.close(timeout_seconds)

    def _write(self, items: list[Any]) -> None:
        for item in items:
            if item is not None:
                step, scalars = item
                self._sink.write_scalars(step, scalars())
                continue
            for end in ("flush", "close"):
                if callable(getattr(self._sink, end, None)):
                    getattr(self._sink, end)()
