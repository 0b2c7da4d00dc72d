"""Tells people, seldom enough to be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from stabil.telemetry._background import Background
from stabil.telemetry._channels import Alert
from stabil.telemetry._event import Event

LEVELS = ("info", "warning", "critical")
# Actions that a person should hear of; all others stay in the log.
SEVERITY = {
    "skip": "warning",
    "reset": "warning",
    "cut": "warning",
    "rollback": "critical",
    "stop": "critical",
    "save_failed": "critical",
    "failed": "critical",
    "hung": "critical",
}


class AlertDesk:
    """Sends one message per cause and hour, and says how many it held back.

    A message says cause, layer, step, batch and action. The next of the same cause and
    severity, or a milder one, is held back for `cool_down_minutes` and counted in the
    message after that; `summarize` sends what is still held back. A worse one is sent
    at once, and a stop always. Each channel has a thread of its own: a dead one is
    counted and hurts neither the run nor the others.

    Args:
      alerts: channels with `send(title, text, severity)`.
      run: name of the run, for the title.
      cool_down_minutes: see above; 0 sends every message.
      clock: seconds, for tests.

    Raises:
      TypeError: a channel has no `send`.
    """

    def __init__(
        self,
        alerts: Iterable[Alert],
        *,
        run: str = "",
        cool_down_minutes: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        alerts = tuple(alerts)
        for alert in alerts:
            if not callable(getattr(alert, "send", None)):
                raise TypeError(
                    "needed an alert with send(title, text, severity), got "
                    f"{alert!r}; wrap your channel in a class with that one method"
                )
        self._run, self._clock = run, clock
        self._cool_down = 60.0 * cool_down_minutes
        self._sent: dict[str, tuple[float, int]] = {}
        self._held: dict[str, list[Event]] = {}
        self.held_back = 0
        self._channels = [
            Background(
                lambda items, alert=alert: [alert.send(*item) for item in items],
                name=f"stabil-alert-{type(alert).__name__}",
                batch=1,
                every_seconds=0.1,
                capacity=1000,
            )
            for alert in alerts
        ]

    @property
    def lost(self) -> int:
        """Messages that no channel took, summed over channels."""
        return sum(c.dropped + c.failed for c in self._channels)

    def notify(self, event: Event) -> bool:
        """Sends a message about the event if one is due; True if so."""
        severity = SEVERITY.get(event.action)
        if severity is None or not self._channels:
            return False
        key, level, now = event.cause, LEVELS.index(severity), self._clock()
        at, sent_level = self._sent.get(key, (-float("inf"), -1))
        cooling = now - at < self._cool_down and level <= sent_level
        if cooling and event.action != "stop":
            # A bounded sample; the count is in the number.
            self._held.setdefault(key, []).append(event)
            del self._held[key][:-1000]
            self.held_back += 1
            return False
        self._sent[key] = (now, level)
        self._send(event, self._held.pop(key, []), severity)
        return True

    def summarize(self) -> None:
        """Sends what is still held back, one message per cause."""
        for events in self._held.values():
            self._send(events[-1], events[:-1], "info")
        self._held.clear()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Sends what is left; a channel that hangs is left behind."""
        for channel in self._channels:
            channel.close(timeout_seconds)

    def _send(self, event: Event, held: list[Event], severity: str) -> None:
        text = sentence(event)
        if held:
            first, last = held[0].step, held[-1].step
            text += (
                f" {len(held)} more since the last message, steps {first} to {last}."
            )
        message: Any = (f"stabil {self._run}: {event.action}", text, severity)
        for channel in self._channels:
            channel.put(message)


def sentence(event: Event) -> str:
    """Cause, layer, step, batch and action of an event in one sentence.

    Examples:
      >>> sentence(Event(action="skip", step=9, cause="loss_spike", layer="loss",
      ...     data_index=12))
      'loss spike in loss at step 9, batch 12: skip.'
    """
    cause = event.cause.replace("_", " ").replace(",", " and ") or "no cause named"
    layer = f" in {event.layer}" if event.layer else ""
    batch = event.batch_id or event.data_index
    batch = "" if batch is None else f", batch {batch}"
    text = f" ({event.text})" if event.text else ""
    return f"{cause}{layer} at step {event.step}{batch}: {event.action}{text}."
