"""Joins the host half to anybody's train step."""

from stabil.session._session import Session as Session
from stabil.session._stop import TrainingStopped as TrainingStopped

__all__ = ["Session", "TrainingStopped"]
