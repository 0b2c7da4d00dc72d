"""Tells what happened: an event log, sinks for numbers, alerts for people."""

from stabil.telemetry._alerts import AlertDesk as AlertDesk
from stabil.telemetry._alerts import sentence as sentence
from stabil.telemetry._background import Background as Background
from stabil.telemetry._channels import Alert as Alert
from stabil.telemetry._channels import Sink as Sink
from stabil.telemetry._channels import SinkChannel as SinkChannel
from stabil.telemetry._event import Event as Event
from stabil.telemetry._heartbeat import Beat as Beat
from stabil.telemetry._heartbeat import Heartbeat as Heartbeat
from stabil.telemetry._heartbeat import read_beat as read_beat
from stabil.telemetry._log import EventLog as EventLog
from stabil.telemetry._log import read_events as read_events
from stabil.telemetry._parquet import to_parquet as to_parquet
from stabil.telemetry._progress import ProgressLine as ProgressLine
from stabil.telemetry._prometheus import Prometheus as Prometheus
from stabil.telemetry._prometheus import PrometheusPort as PrometheusPort
from stabil.telemetry._run_folder import RunFolder as RunFolder
from stabil.telemetry._sinks import Apprise as Apprise
from stabil.telemetry._sinks import MLflow as MLflow
from stabil.telemetry._sinks import ScalarLog as ScalarLog
from stabil.telemetry._sinks import TensorBoard as TensorBoard
from stabil.telemetry._sinks import WeightsAndBiases as WeightsAndBiases

__all__ = [
    "Alert",
    "AlertDesk",
    "Apprise",
    "Background",
    "Beat",
    "Event",
    "EventLog",
    "Heartbeat",
    "MLflow",
    "ProgressLine",
    "Prometheus",
    "PrometheusPort",
    "RunFolder",
    "ScalarLog",
    "Sink",
    "SinkChannel",
    "TensorBoard",
    "WeightsAndBiases",
    "read_beat",
    "read_events",
    "sentence",
    "to_parquet",
]
