"""Which steps stay: a pure function of the steps and what is known of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class KeepAlso:
    """Steps to keep on disk beside the newest ones.

    `best`, `every_steps` and `every_minutes` choose among healthy steps: a step that is
    not judged yet stays in any case, and a suspect one is not worth its space.

    Args:
      best: steps with the best metric, see `Keeper.save`; a metric that is NaN or
        infinite, or missing, is never among them. Of equals the newer one. >= 0.
      lowest_is_best: True for a loss, False for an accuracy.
      every_steps: the first healthy step at or after each multiple; >= 1, or None.
      every_minutes: steps that were saved at least so far apart, or None.
      milestones: steps that are saved whether due or not, and kept for ever whatever
        their tag; a rollback alone sets them aside.
    Raises:
      ValueError: an argument is out of range.
    Examples:
      >>> KeepAlso(best=2, milestones=[1000]).milestones
      frozenset({1000})
    """

    best: int = 0
    lowest_is_best: bool = True
    every_steps: int | None = None
    every_minutes: float | None = None
    milestones: Iterable[int] = ()

    def __post_init__(self) -> None:
        for name, least, optional in (("best", 0, False), ("every_steps", 1, True)):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"needed {name} as a whole number >= {least}, got {value!r}"
                )
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(
                f"needed every_minutes > 0, or None, got {self.every_minutes!r}"
            )
        object.__setattr__(self, "milestones", frozenset(self.milestones))


class Known(NamedTuple):
    """What retention knows of a step.

    Attributes:
      tag: its tag.
      metric: its metric; NaN if it has none.
      saved: when, seconds of the wall clock.
    """

    tag: str
    metric: float = math.nan
    saved: float = 0.0


def kept(
    steps: Mapping[int, Known],
    *,
    keep_last: int,
    keep_also: KeepAlso | None = None,
    keep_newest: int = 2,
    keep_pending: int = 10,
) -> set[int]:
    """Steps that must stay on disk.

    The newest healthy step always stays, and so does every step that may still become
    one: a verdict comes some steps after the save, so a rule that counts steps alone
    deletes a step before it is judged. A run that nobody judges would keep everything;
    beyond `keep_pending` the oldest, which is judged first, and the newest ones stay.

    Args:
      steps: every step on disk.
      keep_last: healthy steps to keep, the newest first; >= 1.
      keep_also: what else stays.
      keep_newest: steps to keep whatever their tag, the newest first; >= 1.
      keep_pending: pending steps to keep, of those newer than the newest healthy one;
        >= 2.
    Examples:
      >>> tags = {10: "healthy", 20: "healthy", 30: "pending", 40: "suspect"}
      >>> steps = {step: Known(tag) for step, tag in tags.items()}
      >>> sorted(kept(steps, keep_last=1, keep_newest=1))
      [20, 30, 40]
    """
    order = sorted(steps)
    healthy = [s for s in order if steps[s].tag == "healthy"]
    newest = healthy[-1] if healthy else -1
    pending = [s for s in order if steps[s].tag == "pending" and s > newest]
    if len(pending) > keep_pending:
        pending = [pending[0], *pending[1 - keep_pending :]]
    stay = {*healthy[-keep_last:], *order[-keep_newest:], *pending}
    if keep_also is not None:
        stay |= _best(healthy, steps, keep_also) | _apart(healthy, steps, keep_also)
        stay |= steps.keys() & set(keep_also.milestones)
    return stay


def _best(healthy: list[int], steps: Mapping[int, Known], rule: KeepAlso) -> set[int]:
    ranked = [s for s in healthy if math.isfinite(steps[s].metric)]
    sign = 1 if rule.lowest_is_best else -1
    ranked.sort(key=lambda s: (sign * steps[s].metric, -s))
    return set(ranked[: rule.best])


def _apart(healthy: list[int], steps: Mapping[int, Known], rule: KeepAlso) -> set[int]:
    stay: set[int] = set()
    if rule.every_steps is not None:
        firsts: dict[int, int] = {}
        for step in healthy:
            firsts.setdefault(step // rule.every_steps, step)
        stay |= set(firsts.values())
    if rule.every_minutes is not None:
        last = -math.inf
        for step in healthy:
            saved = steps[step].saved
            if saved - last >= 60 * rule.every_minutes:
                stay.add(step)
                last = saved
            # A clock that was put back counts on from where it is.
            last = min(last, saved)
    return stay
