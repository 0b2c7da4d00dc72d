"""Judge: what is normal for a signal, and how far a value departs from it."""

from stabil.detectors._agreement import Agreement as Agreement
from stabil.detectors._agreement import agree as agree
from stabil.detectors._agreement import groups_of as groups_of
from stabil.detectors._baseline import BaselineState as BaselineState
from stabil.detectors._baseline import Deviation as Deviation
from stabil.detectors._baseline import deviate as deviate
from stabil.detectors._baseline import observe as observe
from stabil.detectors._calibrated import Limits as Limits
from stabil.detectors._calibrated import limits_for as limits_for
from stabil.detectors._calibrated import read_ranges as read_ranges
from stabil.detectors._drift import DriftState as DriftState
from stabil.detectors._drift import drift as drift
from stabil.detectors._findings import Evidence as Evidence
from stabil.detectors._forget import forget as forget
from stabil.detectors._idle import IdleState as IdleState
from stabil.detectors._idle import watch_idle as watch_idle
from stabil.detectors._judge import Judgement as Judgement
from stabil.detectors._judge import judge as judge
from stabil.detectors._judge_state import JudgeState as JudgeState
from stabil.detectors._level import Height as Height
from stabil.detectors._level import LevelState as LevelState
from stabil.detectors._level import follow as follow
from stabil.detectors._loss import LossFinding as LossFinding
from stabil.detectors._loss import LossState as LossState
from stabil.detectors._loss import judge_loss as judge_loss
from stabil.detectors._replicas import Outsider as Outsider
from stabil.detectors._replicas import ReplicaState as ReplicaState
from stabil.detectors._replicas import compare_replicas as compare_replicas
from stabil.detectors._rows import Rows as Rows
from stabil.detectors._rows import read_rows as read_rows
from stabil.detectors._siblings import Departed as Departed
from stabil.detectors._siblings import SiblingState as SiblingState
from stabil.detectors._siblings import compare as compare

__all__ = [
    "Agreement",
    "BaselineState",
    "Departed",
    "Deviation",
    "DriftState",
    "Evidence",
    "Height",
    "IdleState",
    "JudgeState",
    "Judgement",
    "LevelState",
    "Limits",
    "LossFinding",
    "LossState",
    "Outsider",
    "ReplicaState",
    "Rows",
    "SiblingState",
    "agree",
    "compare",
    "compare_replicas",
    "deviate",
    "drift",
    "follow",
    "forget",
    "groups_of",
    "judge",
    "judge_loss",
    "limits_for",
    "observe",
    "read_ranges",
    "read_rows",
    "watch_idle",
]
