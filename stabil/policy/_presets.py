"""Three ladders ready for use."""

from __future__ import annotations

from stabil.policy._ladder import Ladder
from stabil.policy._rungs import FULL


def observe() -> Ladder:
    """Writes down what the full ladder would do, and does nothing.

    Examples:
      >>> all(rung.report_only for rung in observe().rungs)
      True
    """
    return Ladder(FULL, report_only=True)


def careful() -> Ladder:
    """Acts only on damage that is certain; leaves judgement of the loss to a person.

    Restarts moments and rolls back for blocked steps in a row and for non-finite
    parameters, at most twice in 1,000 steps of new ground, and stops at the second
    relapse. What it would do about a loss that stays high or rises, it writes down.

    Examples:
      >>> [r.kind for r in careful().rungs if r.report_only]
      ['reset', 'cut', 'cut', 'rollback', 'rollback']
    """
    rungs = (
        r._replace(
            report_only=any((*r.loss_steps, r.drifted_steps)),
            budget=min(r.budget, 2) if r.kind == "rollback" else r.budget,
        )
        for r in FULL
    )
    return Ladder(rungs, max_relapses=2)


def unattended() -> Ladder:
    """Tries everything before it stops: for runs that nobody watches.

    Up to ten rollbacks in 1,000 steps of new ground, and four at one place, each with
    a wider window of skipped data and a lower learning rate.

    Examples:
      >>> {r.budget for r in unattended().rungs if r.kind == "rollback"}
      {10}
    """
    rungs = (r._replace(budget=10) if r.kind == "rollback" else r for r in FULL)
    return Ladder(rungs, max_relapses=4)
