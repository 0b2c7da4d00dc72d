"""Parts of a model that are judged each by itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from stabil.policy._words import Observation

WHOLE = ""  # the group of whatever no pattern names


class Groups:
    """Names of groups, each with patterns for names of signals.

    A pattern has shell wildcards, of which `*` crosses slashes, and must match the
    whole name; upper and lower case count the same. The first group that matches takes
    the signal.

    Args:
      patterns: group to one pattern or several.

    Raises:
      TypeError: not a mapping from names to patterns.

    Examples:
      >>> groups = Groups({"embeddings": ("*embed*", "*wte*"), "experts": "*expert*"})
      >>> groups.of(Observation(3, first="grads/block_1/expert_7/kernel"))
      'experts'
      >>> groups.of(Observation(3, first="loss"))
      ''
    """

    def __init__(self, patterns: Mapping[str, str | Iterable[str]] | None = None):
        self._patterns: dict[str, tuple[str, ...]] = {}
        if not isinstance(patterns or {}, Mapping):
            raise TypeError(
                f"Ladder: needed groups as a mapping, got {patterns!r}; write "
                'groups={"embeddings": ("*embed*", "*wte*")}'
            )
        for name, several in (patterns or {}).items():
            several = (several,) if isinstance(several, str) else tuple(several)
            if not name or not all(isinstance(p, str) for p in several):
                raise TypeError(
                    f"Ladder: needed a name and patterns of text for each group, got "
                    f"{name!r}: {several!r}; write "
                    'groups={"embeddings": ("*embed*", "*wte*")}'
                )
            self._patterns[name] = tuple(p.lower() for p in several)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._patterns, WHOLE)

    def named(self, signal: str | None) -> str:
        """The group of a signal, or `WHOLE`."""
        if signal is None:
            return WHOLE
        signal = signal.lower()
        for name, patterns in self._patterns.items():
            if any(fnmatch.fnmatchcase(signal, p) for p in patterns):
                return name
        return WHOLE

    def of(self, seen: Observation) -> str:
        """The group at fault in a step.

        The damaged leaf tells, then the first offending signal, then the other signals
        that were at fault.
        """
        for signal in (seen.damaged, seen.leapt, seen.first, *seen.also):
            name = self.named(signal)
            if name:
                return name
        return WHOLE
