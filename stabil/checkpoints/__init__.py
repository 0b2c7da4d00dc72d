"""Remember: checkpoints that know whether they are healthy."""

from stabil.checkpoints._difference import Difference as Difference
from stabil.checkpoints._difference import LeafDifference as LeafDifference
from stabil.checkpoints._difference import diff as diff
from stabil.checkpoints._errors import DamagedError as DamagedError
from stabil.checkpoints._errors import NoHealthyStepError as NoHealthyStepError
from stabil.checkpoints._errors import NotARunFolderError as NotARunFolderError
from stabil.checkpoints._errors import SaveFailedError as SaveFailedError
from stabil.checkpoints._errors import StructureError as StructureError
from stabil.checkpoints._errors import UnreadableError as UnreadableError
from stabil.checkpoints._keeper import Keeper as Keeper
from stabil.checkpoints._looking import StepInfo as StepInfo
from stabil.checkpoints._looking import Verified as Verified
from stabil.checkpoints._looking import list_steps as list_steps
from stabil.checkpoints._looking import verify as verify
from stabil.checkpoints._offline import mark as mark
from stabil.checkpoints._offline import rollback as rollback
from stabil.checkpoints._repair import Repaired as Repaired
from stabil.checkpoints._repair import merge_neighbours as merge_neighbours
from stabil.checkpoints._repair import repair_layer as repair_layer
from stabil.checkpoints._restoring import Restored as Restored
from stabil.checkpoints._retention import KeepAlso as KeepAlso

__all__ = [
    "DamagedError",
    "Difference",
    "KeepAlso",
    "Keeper",
    "LeafDifference",
    "NoHealthyStepError",
    "NotARunFolderError",
    "Repaired",
    "Restored",
    "SaveFailedError",
    "StepInfo",
    "StructureError",
    "UnreadableError",
    "Verified",
    "diff",
    "list_steps",
    "mark",
    "merge_neighbours",
    "repair_layer",
    "rollback",
    "verify",
]
