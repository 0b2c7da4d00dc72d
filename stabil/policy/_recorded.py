"""Says what a verdict was, and what the device did about it by itself."""

from __future__ import annotations

import math

from stabil.policy._words import BLOCK, OK, Action, Observation

# What clips a step that no detector finds fault with.
_NO_CAUSE = "no spike: a limit for all norms, or they are held down after an alarm"


def where(seen: Observation) -> str:
    """Causes and place in brackets, with a space before them; empty without causes."""
    causes = ", ".join(seen.causes)
    place = f" in {seen.first}" if seen.first else ""
    return f" ({causes}{place})" if causes else ""


def recorded(seen: Observation) -> list[Action]:
    """What the device has done or found, as actions that need no more than a line."""
    numbers = {"loss": seen.loss, "grad_norm": seen.grad_norm, "score": seen.score}
    actions = []
    if seen.severity >= BLOCK:
        text = f"the step was blocked{where(seen)}"
        actions.append(Action("skip", text, numbers))
    elif not math.isnan(seen.clip_factor) and seen.clip_factor < 1:
        numbers["clip_factor"] = seen.clip_factor
        why = where(seen) or f" ({_NO_CAUSE})"
        text = f"the gradient was scaled by {seen.clip_factor:.3g}{why}"
        actions.append(Action("clip", text, numbers))
    elif seen.severity > OK:
        actions.append(Action("log", f"a verdict above OK{where(seen)}", numbers))
    if seen.resets > 0:
        text = f"the guard restarted the moments of {seen.resets} leaves{where(seen)}"
        actions.append(Action("reset", text, {"leaves": seen.resets, "by": "device"}))
    return actions
