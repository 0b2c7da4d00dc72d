"""Protect: published stabilisers and the guard, as Optax transformations."""

from stabil.transforms._guard import GuardState as GuardState
from stabil.transforms._guard import guard as guard
from stabil.transforms._spike_aware import SpikeAwareState as SpikeAwareState
from stabil.transforms._spike_aware import spike_aware as spike_aware
from stabil.transforms._vitals import select as select
from stabil.transforms._vitals import vitals as vitals

__all__ = [
    "GuardState",
    "SpikeAwareState",
    "guard",
    "select",
    "spike_aware",
    "vitals",
]
