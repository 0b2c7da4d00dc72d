"""All events of a whole log, with what is only known at its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from stabil.curves._event import Event
from stabil.curves._events import Tracker
from stabil.curves._judge import WARN, Judge
from stabil.curves._slow import Row, Slow, windows

_STILL_HIGH = 1.05
_SLOW_RISE = math.log(1.15)


def find_events(rows: Iterable[Row], judge: Judge | None = None) -> list[Event]:
    """All events of a log, in the order of their start.

    Severities are causal. Hindsight only renames: a level shift from which the loss
    came back is a `spike`; shifts in a row from which it never came back are one
    `diverge`; a gradient event inside or just before a loss event is a part of it. It
    adds one thing: a loss that ends 15 % above its lowest level, and by more than its
    noise, without an event that says so, is a `diverge` from the lowest level on.
    Notices of what shows over hundreds of rows only (`data_pattern`, `plateau`,
    `drift`) come with it.

    Args:
      rows: (step, loss, gradient norm or None) in the order of the log.
      judge: the judge to use; a new one if None.
    """
    tracker, slow = Tracker(judge), Slow()
    events = list(_all(tracker, slow, rows))
    events = [_undone(e, tracker.returned) for e in events]
    events = _join_divergence(events, tracker)
    events += _slow_divergence(events, tracker)
    faults = [e for e in events if e.kind != "gradient_blip"]
    kept = [e for e in events if e.kind != "gradient_blip" or not _inside(e, faults)]
    kept += [e for e in slow.finish() if e.kind != "drift" or not _inside(e, faults)]
    return sorted(kept, key=lambda e: (e.start, e.end))


def _all(tracker: Tracker, slow: Slow, rows: Iterable[Row]) -> Iterator[Event]:
    for window in windows(rows):
        slow.take(window)
        for step, loss, norm in window:
            ended = tracker.row(step, loss, norm)
            if ended:
                yield from ended
    yield from tracker.finish()


def _undone(event: Event, returned: dict[float, float]) -> Event:
    """A level shift from which the loss came back later is a spike."""
    if event.kind != "level_shift" or event.start not in returned:
        return event
    end = returned[event.start]
    kind = "spike" if event.severity >= WARN else "hard_batch"
    return event._replace(kind=kind, end=end, recovery=end - event.peak)


def _inside(event: Event, faults: list[Event]) -> bool:
    return any(
        f.start - f.lead <= event.end and event.start <= f.end
        for f in faults
        if f.kind in ("spike", "diverge", "level_shift", "restart", "hard_batch")
    )


def _join_divergence(events: list[Event], tracker: Tracker) -> list[Event]:
    """The last shifts as one divergence, if there are two and the loss stays high."""
    loss = [e for e in events if e.kind in ("spike", "level_shift", "diverge")]
    shifts = 0
    while shifts < len(loss) and loss[-1 - shifts].kind != "spike":
        shifts += 1
    chain = loss[len(loss) - shifts :]
    if len(chain) < 2 or tracker.judge.linear:
        return events
    first = chain[0]
    if math.exp(tracker.judge.loss.level) < _STILL_HIGH * first.level:
        return events
    top = max(chain, key=lambda e: e.height * e.level)
    joined = first._replace(
        kind="diverge",
        severity=max(e.severity for e in chain),
        peak=top.peak,
        end=tracker.step,
        height=top.height * top.level / first.level,
        recovery=math.nan,
    )
    return [e for e in events if e not in chain] + [joined]


def _slow_divergence(events: list[Event], tracker: Tracker) -> list[Event]:
    """A rise so slow that no row of it stood out, if the log ends high."""
    signal = tracker.judge.loss
    rise = signal.level - tracker.lowest
    noise = max(signal.spread, signal.rise)
    if tracker.judge.linear or rise < max(_SLOW_RISE, 4 * noise):
        return []
    said = ("diverge", "level_shift", "restart")
    if any(e.kind in said and e.end >= tracker.lowest_step for e in events):
        return []
    level = math.exp(tracker.lowest)
    start, end = tracker.lowest_step, tracker.step
    height = math.exp(rise)
    return [Event("diverge", WARN, start, end, end, level, height, math.nan)]
