"""A judgement of a step, and what the bytes have to say to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stabil.checkpoints import _manifest
from stabil.checkpoints._errors import DamagedError


class Verdict(NamedTuple):
    """A judgement of a step, in the order in which `Folder.tag` takes it."""

    tag: str
    cause: str
    by: str
    metric: float | None = None


def weighed(verdict: Verdict, manifest: Callable[[], dict[str, Any]]) -> Verdict:
    """The verdict that holds: nothing that is not finite, or damaged, is healthy."""
    if verdict.tag != "healthy":
        return verdict
    try:
        bad = _manifest.nonfinite(manifest())
    except DamagedError as error:
        return Verdict("suspect", str(error), "stabil")
    if bad:
        return Verdict("suspect", f"not finite when saved: {', '.join(bad)}", "stabil")
    return verdict
