"""Keeps large-model training in JAX stable.

Users name what they need from here: `stabil.guard`, `stabil.spike_aware`,
`stabil.vitals`, `stabil.probe`, `stabil.Session`, `stabil.checkpoints.Keeper`. The
packages behind these names load when they are first used, so that `import stabil` costs
little more than `import optax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabil import checkpoints as checkpoints
    from stabil import curves as curves
    from stabil import detectors as detectors
    from stabil import policy as policy
    from stabil import probes as probes
    from stabil import telemetry as telemetry
    from stabil import testing as testing
    from stabil import transforms as transforms
    from stabil.probes import collect as collect
    from stabil.probes import probe as probe
    from stabil.probes import tap as tap
    from stabil.session import Session as Session
    from stabil.transforms import guard as guard
    from stabil.transforms import select as select
    from stabil.transforms import spike_aware as spike_aware
    from stabil.transforms import vitals as vitals
    from stabil.vocabulary import Cause as Cause
    from stabil.vocabulary import Controls as Controls
    from stabil.vocabulary import Readings as Readings
    from stabil.vocabulary import Severity as Severity
    from stabil.vocabulary import Verdict as Verdict
    from stabil.vocabulary import Vitals as Vitals

__version__ = "0.1.0"

_PACKAGES = (
    "checkpoints",
    "curves",
    "detectors",
    "policy",
    "probes",
    "telemetry",
    "testing",
    "transforms",
)
_HOMES = {
    "Cause": "stabil.vocabulary",
    "Controls": "stabil.vocabulary",
    "Readings": "stabil.vocabulary",
    "Session": "stabil.session",
    "Severity": "stabil.vocabulary",
    "Verdict": "stabil.vocabulary",
    "Vitals": "stabil.vocabulary",
    "collect": "stabil.probes",
    "guard": "stabil.transforms",
    "probe": "stabil.probes",
    "select": "stabil.transforms",
    "spike_aware": "stabil.transforms",
    "tap": "stabil.probes",
    "vitals": "stabil.transforms",
}

__all__ = ["__version__", *_PACKAGES, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"stabil.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(
        f"module 'stabil' has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
