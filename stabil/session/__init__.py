"""Joins the host half to anybody's train step."""

from stabil.session._exit import ExitCode as ExitCode
from stabil.session._exit import Preempted as Preempted
from stabil.session._exit import run_main as run_main
from stabil.session._nnx import NnxState as NnxState
from stabil.session._nnx import update_nnx as update_nnx
from stabil.session._session import Session as Session
from stabil.session._stop import TrainingStopped as TrainingStopped
from stabil.session._supervisor import Supervisor as Supervisor
from stabil.session._train_state import apply_gradients as apply_gradients

__all__ = [
    "ExitCode",
    "NnxState",
    "Preempted",
    "Session",
    "Supervisor",
    "TrainingStopped",
    "apply_gradients",
    "run_main",
    "update_nnx",
]
