"""The rungs of the ladder as data, and the budgets that bound them."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

# Blocked for one of these several times in a row, the weights or the moments are
# presumably damaged: a bad batch would have passed.
DAMAGE = (
    "nonfinite_loss",
    "nonfinite_gradient",
    "nonfinite_activation",
    "nonfinite_parameter",
    "parameter_leap",
    "norm_overflow",
    "activation_limit",
    "activation_shift",
)
# A restart of the moments may cure these; it takes effect two steps later.
MOMENTS = ("update_spike", "moment_spike", "nonfinite_moment")
INTERVENTIONS = ("look", "reset", "cut", "rollback", "stop")


class Rung(NamedTuple):
    """One intervention: when it is due, how far it goes, how often it may.

    A rung is due when any of its triggers holds; a trigger of 0 is off. A use comes
    back after `budget_steps` steps of new ground, so that steps run twice earn nothing.

    Attributes:
      kind: what to do: `look`, `reset`, `cut`, `rollback` or `stop`.
      blocked_steps: due after so many blocked steps in a row for one of `causes`.
      high_loss_steps: due after so many steps in a row, within an open event, whose
        loss lies far above its own level (6 deviations).
      extreme_loss_steps: the same for a loss far beyond that (20 deviations,
        on noisy data 10 of them and half the level).
      drifted_steps: due after so many steps in a row that the level of the loss itself
        has risen slowly, by a tenth and by 1.7 deviations: a slow divergence.
      severity: due at a verdict at least this severe for one of `causes`.
      causes: names of causes that count; empty means all.
      amount: for `cut`, what the learning rate is multiplied by; in (0, 1).
      lasting_steps: for `look`, how long; for `cut`, how long until it is back.
      budget: uses within `budget_steps` steps of new ground.
      budget_steps: see `budget`; steps.
      cool_down_steps: observed steps between two uses.
      report_only: True writes the intervention down and does nothing.
    """

    kind: str
    blocked_steps: int = 0
    high_loss_steps: int = 0
    extreme_loss_steps: int = 0
    drifted_steps: int = 0
    severity: int = 0
    causes: tuple[str, ...] = ()
    amount: float = 0.5
    lasting_steps: int = 200
    budget: int = 3
    budget_steps: int = 1000
    cool_down_steps: int = 0
    report_only: bool = False

    @property
    def loss_steps(self) -> tuple[int, int]:
        """The two triggers that look at the loss."""
        return self.high_loss_steps, self.extreme_loss_steps


def check_rungs(rungs: tuple[Rung, ...]) -> None:
    """Refuses a table that could not do what it says."""
    for i, rung in enumerate(rungs):
        if not isinstance(rung, Rung):
            raise TypeError(
                f"Ladder: needed a Rung at position {i} of rungs, got {rung!r}; write "
                'stabil.policy.Rung("rollback", blocked_steps=3)'
            )
        if rung.kind not in INTERVENTIONS:
            raise ValueError(
                f"Ladder: needed one of {', '.join(INTERVENTIONS)} as kind of "
                f"rung {i}, got {rung.kind!r}; clips and skips are the guard's and "
                "need no rung"
            )
        triggers = rung.blocked_steps, rung.severity, rung.drifted_steps
        if not any((*triggers, *rung.loss_steps)):
            raise ValueError(
                f"Ladder: needed a trigger for rung {i} ({rung.kind}), got none; set "
                "blocked_steps, high_loss_steps, extreme_loss_steps, drifted_steps or "
                "severity"
            )
        if not 0 < rung.amount < 1:
            raise ValueError(
                f"Ladder: needed 0 < amount < 1 for rung {i} ({rung.kind}), got "
                f"{rung.amount}; 0.5 halves the learning rate"
            )
        if min(rung.budget, rung.budget_steps, rung.lasting_steps) < 1:
            raise ValueError(
                f"Ladder: needed budget, budget_steps and lasting_steps of at least 1 "
                f"for rung {i} ({rung.kind}), got {rung.budget}, {rung.budget_steps} "
                f"and {rung.lasting_steps}; leave the rung out to forbid it"
            )


class Ledger:
    """Who acted when, measured in new ground and in observed steps."""

    def __init__(self) -> None:
        self._uses: dict[str, collections.deque[int]] = {}
        self._last_seen: dict[str, int] = {}
        self.furthest = 0
        self.seen = 0

    def observe(self, step: int) -> None:
        self.seen += 1
        self.furthest = max(self.furthest, step)

    def left(self, rung: Rung) -> int:
        """Uses that the rung has left at this point of the run."""
        uses = self._uses.get(_key(rung), ())
        recent = sum(self.furthest - at < rung.budget_steps for at in uses)
        return max(0, rung.budget - recent)

    def is_cooling(self, rung: Rung) -> bool:
        last = self._last_seen.get(_key(rung))
        # A report changes nothing, so its trigger would hold at every following step.
        pause = rung.cool_down_steps or (50 if rung.report_only else 0)
        return last is not None and self.seen - last < pause

    def use(self, rung: Rung) -> None:
        uses = self._uses.setdefault(_key(rung), collections.deque(maxlen=1000))
        uses.append(self.furthest)
        self._last_seen[_key(rung)] = self.seen

    def get_state(self) -> dict[str, Any]:
        uses = {k: list(v) for k, v in self._uses.items()}
        return {"uses": uses, "furthest": self.furthest}

    def set_state(self, state: dict[str, Any]) -> None:
        self._uses = {
            k: collections.deque(v, maxlen=1000) for k, v in state["uses"].items()
        }
        self.furthest = int(state["furthest"])


def _key(rung: Rung) -> str:
    return f"{rung.kind}/report" if rung.report_only else rung.kind


FULL = (
    Rung("look", severity=2, lasting_steps=50, budget=20, cool_down_steps=50),
    Rung("reset", blocked_steps=2, causes=MOMENTS, cool_down_steps=20),
    Rung("reset", high_loss_steps=10, cool_down_steps=50),
    Rung("cut", high_loss_steps=20, lasting_steps=200, cool_down_steps=50),
    Rung("cut", drifted_steps=1, lasting_steps=2000, cool_down_steps=50),
    Rung("rollback", severity=2, causes=("nonfinite_parameter",), budget=5),
    Rung("rollback", blocked_steps=3, causes=DAMAGE, budget=5),
    Rung("rollback", blocked_steps=5, causes=MOMENTS, budget=5),
    Rung("rollback", high_loss_steps=60, budget=5),
    Rung("rollback", extreme_loss_steps=5, budget=5),
    Rung("stop", blocked_steps=100),
)
