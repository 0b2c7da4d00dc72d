"""Messages of a text log that repeat, as templates with the changing words left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_WORD = "<*>"
_ALIKE = 0.5  # share of equal words that two lines of one template have
_GROUPS, _IN_A_GROUP, _WORDS = 2000, 100, 60
_ILL = re.compile(
    r"error|warn|fail|fatal|exception|traceback|timed?[ -]?out|\bnan\b|\binf\b|"
    r"overflow|killed|abort|retry|retries|unreachable|refused|corrupt|out of memory|"
    r"\boom\b",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """A message that a log repeats.

    Attributes:
      template: its words, with `<*>` for those that change.
      lines: how many lines it stands for.
      first: number of the first line, from 1.
      last: number of the last.
      ill: whether it speaks of trouble.
    """

    template: str
    lines: int
    first: int
    last: int
    ill: bool


class Messages:
    """Sorts lines into templates, one pass, bounded memory.

    A word that holds a digit changes by nature. Lines of equally many words and the
    same first word, half of whose words agree, are one template; where they differ, a
    word changes.

    Attributes:
      lost: lines that found no room: more than 2000 templates.

    Examples:
      >>> messages = Messages()
      >>> for i, host in enumerate(["alpha", "beta", "gamma"], 1):
      ...     messages.add(i, f"WARN host {host} slow: {i}.5 s")
      >>> messages.repeated()[0].template
      'WARN host <*> slow: <*> s'

    Source: P. He et al., Drain: an online log parsing approach with fixed depth tree,
    ICWS 2017. We differ: the tree has the two levels named above, and is bounded.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], list[list]] = {}
        self._count = 0
        self.lost = 0

    def add(self, line: int, text: str) -> None:
        """Takes a line in, given its number."""
        words = [
            _WORD if any(map(str.isdigit, word)) else word
            for word in text.split(maxsplit=_WORDS)
        ]
        if not words:
            return
        group = self._groups.setdefault((len(words), words[0]), [])
        best, most = None, _ALIKE * len(words)
        for one in group:
            same = sum(map(str.__eq__, one[0], words))
            if same >= most:
                best, most = one, same
        if best is not None:
            pairs = zip(best[0], words, strict=True)
            best[0] = [a if a == b else _WORD for a, b in pairs]
            best[1] += 1
            best[3] = line
        elif self._count < _GROUPS and len(group) < _IN_A_GROUP:
            self._count += 1
            group.append([words, 1, line, line])
        else:
            self.lost += 1

    def repeated(self, least: int = 2) -> list[Message]:
        """Templates of `least` lines or more; those of trouble first, then by lines."""
        found = [
            Message(" ".join(words), lines, first, last, bool(_ILL.search(text)))
            for group in self._groups.values()
            for words, lines, first, last in group
            if lines >= least
            for text in [" ".join(words)]
        ]
        return sorted(found, key=lambda m: (not m.ill, -m.lines, m.first))


def only_in_one(logs: Sequence[Sequence[Message]]) -> list[tuple[int, Message]]:
    """Messages of trouble that one log of three or more repeats and no other holds.

    Args:
      logs: the messages of each log, with those of a single line.

    Returns:
      Number of the log and message, in the order of the logs.

    Source: the comparison across nodes of L4, arXiv:2503.20263.
    """
    if len(logs) < 3:
        return []
    found = []
    for i, log in enumerate(logs):
        others = {m.template for j, rest in enumerate(logs) if j != i for m in rest}
        found += [
            (i, m) for m in log if m.ill and m.lines > 1 and m.template not in others
        ]
    return found
