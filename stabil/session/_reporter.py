"""Everything that a session tells: events, numbers, alerts, the progress line."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax

import stabil
from stabil.policy import Action, Observation
from stabil.telemetry import (
    AlertDesk,
    Event,
    EventLog,
    Heartbeat,
    ProgressLine,
    RunFolder,
    SinkChannel,
)
from stabil.vocabulary import Severity, Vitals

_KEPT = 1000  # events that a summary can list


class Reporter:
    """Turns observations and actions into rows, numbers, alerts and counts.

    Attributes:
      counts: how often each action was taken; a report alone counts as `would_…`.
      events: the newest events that are more than a clip.
      newest: step that runs next, as far as was told.
    """

    def __init__(
        self,
        folder: RunFolder,
        sinks: Iterable[Any],
        alerts: Iterable[Any],
        progress: ProgressLine,
    ):
        # One file a process: two writers would interleave.
        process = jax.process_index()
        name = f"events-{process:05d}.jsonl" if process else "events.jsonl"
        self.desk = AlertDesk(alerts if process == 0 else (), run=folder.run)
        self.channels = [SinkChannel(s) for s in sinks] if process == 0 else []
        self.log = EventLog(
            folder.path / name,
            run=folder.run,
            process=process,
            code_version=code_version(),
        )
        name = f"heartbeat-{process:05d}.json" if process else "heartbeat.json"
        self.heart = Heartbeat(folder.path / name)
        self.heart.beat(-1, "starting")
        self.newest = -1
        self.progress = progress
        self.counts: collections.Counter[str] = collections.Counter()
        self.events: collections.deque[Event] = collections.deque(maxlen=_KEPT)

    def step(self, seen: Observation, vitals: Vitals) -> None:
        """Hands the numbers of a step on; they are unpacked on the sinks' threads."""
        for channel in self.channels:
            channel.put(seen.step, lambda: _scalars(vitals))
        figures = {
            "loss": seen.loss,
            "grad_norm": seen.grad_norm,
            "blocked": self.counts["skip"],
            "clipped": self.counts["clip"],
        }
        self.progress.update(seen.step, figures)

    def action(self, action: Action, seen: Observation) -> Event:
        """Records an action of the ladder."""
        named = {"sample_ids": list(seen.sample_ids)} if seen.sample_ids else {}
        kind = f"would_{action.kind}" if action.report_only else action.kind
        event = Event(
            action=kind,
            step=seen.step,
            cause=",".join(seen.causes),
            severity=Severity(seen.severity).name.lower(),
            layer=seen.first,
            data_index=seen.data_index,
            batch_id=seen.batch_id,
            micro_batch=seen.micro_batch if seen.micro_batch >= 0 else None,
            text=action.reason,
            numbers=action.numbers | named,
        )
        return self.record(event)

    def beat(self, step: int) -> None:
        """Says that `step` runs next."""
        self.newest = step
        self.heart.beat(step)

    def pause(self, step: int, text: str) -> float:
        """Says that no step runs for a while; when that began."""
        self.heart.beat(step, "paused", text=text)
        return time.perf_counter()

    def resume(self, step: int, text: str, begun: float) -> None:
        """Says that steps run again."""
        numbers = {"seconds": round(time.perf_counter() - begun, 3)}
        self.record(Event(action="pause", step=step, text=text, numbers=numbers))
        self.heart.beat(step)

    def record(self, event: Event) -> Event:
        """Writes an event to the log, counts it, and alerts people where it is due."""
        self.counts[event.action] += 1
        if event.action != "clip":
            self.events.append(event)
        self.log.add(event)
        self.desk.notify(event)
        return event

    def summary(self) -> dict[str, Any]:
        """Counts, the newest events, and what never arrived."""
        counts = self.counts
        return {
            "blocked": counts["skip"],
            "clipped": counts["clip"],
            "resets": counts["reset"],
            "cuts": counts["cut"],
            "rollbacks": counts["rollback"],
            "actions": dict(counts),
            "events": [dataclasses.asdict(e) for e in self.events],
            "lost_rows": self.log.dropped_rows + self.log.failed_rows,
            "lost_scalars": sum(c.lost for c in self.channels),
            "lost_alerts": self.desk.lost,
        }

    def close(self) -> None:
        """Ends every thread; what a dead channel still holds is left and counted."""
        self.progress.close()
        self.desk.summarize()
        self.desk.close()
        for channel in self.channels:
            channel.close()
        self.log.close()
        self.heart.close()


def _scalars(vitals: Vitals) -> dict[str, float]:
    scalars = vitals.scalars()
    if vitals.readings is not None and vitals.readings.values.ndim == 2:
        scalars |= vitals.readings.scalars()
    return scalars


def code_version() -> str:
    """stabil's version, and the commit of the running script where it lies in git."""
    version = f"stabil {stabil.__version__}"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for folder in pathlib.Path(script).absolute().parents if script else ():
        head = folder / ".git" / "HEAD"
        if head.is_file():
            commit = _commit(head)
            return f"{version}, {commit[:12]}" if commit else version
    return version


def _commit(head: pathlib.Path) -> str:
    text = head.read_text().strip()
    if not text.startswith("ref: "):
        return text
    ref = head.parent / text[5:]
    return ref.read_text().strip() if ref.is_file() else ""
