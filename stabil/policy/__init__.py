"""Decides what to do about a verdict: a ladder of interventions, in plain Python."""

from stabil.policy._advice import advise as advise
from stabil.policy._groups import Groups as Groups
from stabil.policy._ladder import Ladder as Ladder
from stabil.policy._presets import careful as careful
from stabil.policy._presets import observe as observe
from stabil.policy._presets import unattended as unattended
from stabil.policy._recovery import Case as Case
from stabil.policy._recovery import Recovery as Recovery
from stabil.policy._rungs import Rung as Rung
from stabil.policy._words import BLOCK as BLOCK
from stabil.policy._words import Action as Action
from stabil.policy._words import Observation as Observation

__all__ = [
    "BLOCK",
    "Action",
    "Case",
    "Groups",
    "Ladder",
    "Observation",
    "Recovery",
    "Rung",
    "advise",
    "careful",
    "observe",
    "unattended",
]
