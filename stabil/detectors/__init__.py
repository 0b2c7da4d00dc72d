"""Judge: what is normal for a signal, and how far a value departs from it."""

from stabil.detectors._baseline import BaselineState as BaselineState
from stabil.detectors._baseline import Deviation as Deviation
from stabil.detectors._baseline import deviate as deviate
from stabil.detectors._baseline import observe as observe
from stabil.detectors._findings import Evidence as Evidence
from stabil.detectors._judge import Judgement as Judgement
from stabil.detectors._judge import JudgeState as JudgeState
from stabil.detectors._judge import judge as judge
from stabil.detectors._judge import read_rows as read_rows

__all__ = [
    "BaselineState",
    "Deviation",
    "Evidence",
    "JudgeState",
    "Judgement",
    "deviate",
    "judge",
    "observe",
    "read_rows",
]
