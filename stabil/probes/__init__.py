"""See: statistics of activations and cotangents from inside a compiled step."""

from stabil.probes._attention import attention_fn as attention_fn
from stabil.probes._attention import tap_attention as tap_attention
from stabil.probes._collect import collect as collect
from stabil.probes._linen import LinenProbe as LinenProbe
from stabil.probes._probe import probe as probe
from stabil.probes._router import tap_router as tap_router
from stabil.probes._statistics import register as register
from stabil.probes._sums import Elements as Elements
from stabil.probes._tap import tap as tap
from stabil.probes._tree_statistics import tree_statistics as tree_statistics

__all__ = [
    "Elements",
    "LinenProbe",
    "attention_fn",
    "collect",
    "probe",
    "register",
    "tap",
    "tap_attention",
    "tap_router",
    "tree_statistics",
]
