"""See: statistics of activations and cotangents from inside a compiled step."""

from stabil.probes._collect import collect as collect
from stabil.probes._linen import LinenProbe as LinenProbe
from stabil.probes._probe import probe as probe
from stabil.probes._tap import tap as tap

__all__ = ["LinenProbe", "collect", "probe", "tap"]
