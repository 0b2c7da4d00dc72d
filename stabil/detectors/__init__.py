"""Judge: what is normal for a signal, and how far a value departs from it."""

from stabil.detectors._agreement import Agreement as Agreement
from stabil.detectors._agreement import agree as agree
from stabil.detectors._agreement import groups_of as groups_of
from stabil.detectors._baseline import BaselineState as BaselineState
from stabil.detectors._baseline import Deviation as Deviation
from stabil.detectors._baseline import deviate as deviate
from stabil.detectors._baseline import observe as observe
from stabil.detectors._findings import Evidence as Evidence
from stabil.detectors._forget import forget as forget
from stabil.detectors._idle import IdleState as IdleState
from stabil.detectors._idle import watch_idle as watch_idle
from stabil.detectors._judge import Judgement as Judgement
from stabil.detectors._judge import JudgeState as JudgeState
from stabil.detectors._judge import judge as judge
from stabil.detectors._judge import read_rows as read_rows
from stabil.detectors._level import Height as Height
from stabil.detectors._level import LevelState as LevelState
from stabil.detectors._level import follow as follow
from stabil.detectors._loss import LossFinding as LossFinding
from stabil.detectors._loss import LossState as LossState
from stabil.detectors._loss import judge_loss as judge_loss

__all__ = [
    "Agreement",
    "BaselineState",
    "Deviation",
    "Evidence",
    "Height",
    "IdleState",
    "JudgeState",
    "Judgement",
    "LevelState",
    "LossFinding",
    "LossState",
    "agree",
    "deviate",
    "follow",
    "forget",
    "groups_of",
    "judge",
    "judge_loss",
    "observe",
    "read_rows",
    "watch_idle",
]
