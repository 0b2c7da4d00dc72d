"""Read training curves from anybody's log: what happened, when, and how bad it was."""

from stabil.curves._event import KINDS as KINDS
from stabil.curves._event import Event as Event
from stabil.curves._events import Tracker as Tracker
from stabil.curves._events import find_events as find_events
from stabil.curves._judge import Judge as Judge
from stabil.curves._signal import Signal as Signal

__all__ = ["KINDS", "Event", "Judge", "Signal", "Tracker", "find_events"]
