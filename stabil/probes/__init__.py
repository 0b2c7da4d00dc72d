"""See: statistics of activations from inside a compiled step."""

from stabil.probes._linen import COLLECTION as COLLECTION
from stabil.probes._linen import LinenProbe as LinenProbe
from stabil.probes._probe import probe as probe

__all__ = ["COLLECTION", "LinenProbe", "probe"]
