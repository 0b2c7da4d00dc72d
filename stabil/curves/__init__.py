"""Read training curves from anybody's log: what happened, when, and how bad it was."""

from stabil.curves._calibrate import Typical as Typical
from stabil.curves._calibrate import calibrate as calibrate
from stabil.curves._calibrate import calibrate_records as calibrate_records
from stabil.curves._calibrate import load_calibration as load_calibration
from stabil.curves._calibrate import past_limits as past_limits
from stabil.curves._calibrate import save_calibration as save_calibration
from stabil.curves._collapse import Collapse as Collapse
from stabil.curves._collapse import collapse as collapse
from stabil.curves._collapse import timescale as timescale
from stabil.curves._draw import draw as draw
from stabil.curves._event import KINDS as KINDS
from stabil.curves._event import Event as Event
from stabil.curves._events import Tracker as Tracker
from stabil.curves._hindsight import find_events as find_events
from stabil.curves._judge import Judge as Judge
from stabil.curves._messages import Message as Message
from stabil.curves._messages import Messages as Messages
from stabil.curves._messages import only_in_one as only_in_one
from stabil.curves._ranks import Departure as Departure
from stabil.curves._ranks import departures as departures
from stabil.curves._read import FORMATS as FORMATS
from stabil.curves._read import Log as Log
from stabil.curves._read import Problem as Problem
from stabil.curves._report import Report as Report
from stabil.curves._report import lint as lint
from stabil.curves._signal import Signal as Signal
from stabil.curves._sketch import Sketch as Sketch
from stabil.curves._spike_score import SpikeScore as SpikeScore
from stabil.curves._spike_score import StabilityMonitor as StabilityMonitor
from stabil.curves._spike_score import spike_score as spike_score
from stabil.curves._together import LogDeparture as LogDeparture
from stabil.curves._together import compare_logs as compare_logs

__all__ = [
    "FORMATS",
    "KINDS",
    "Collapse",
    "Departure",
    "Event",
    "Judge",
    "Log",
    "LogDeparture",
    "Message",
    "Messages",
    "Problem",
    "Report",
    "Signal",
    "Sketch",
    "SpikeScore",
    "StabilityMonitor",
    "Tracker",
    "Typical",
    "calibrate",
    "calibrate_records",
    "collapse",
    "compare_logs",
    "departures",
    "draw",
    "find_events",
    "lint",
    "load_calibration",
    "only_in_one",
    "past_limits",
    "save_calibration",
    "spike_score",
    "timescale",
]
