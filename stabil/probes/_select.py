"""Selection of modules by glob patterns over slash paths."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PIECES = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|[^*?]+?")
_REGEX = {
    "**/": "(?:.*/)?",
    "/**": "(?:/.*)?",
    "**": ".*",
    "*": "[^/]*",
    "?": "[^/]",
}


def as_patterns(where: str | tuple[str, ...]) -> tuple[str, ...]:
    """The patterns of a `where` argument.

    Raises:
      TypeError: `where` is no string and no non-empty sequence of strings.
    """
    patterns = (where,) if isinstance(where, str) else where
    if (
        not isinstance(patterns, (tuple, list))
        or not patterns
        or not all(isinstance(p, str) and p for p in patterns)
    ):
        raise TypeError(
            "needed `where` as a glob over slash paths or a tuple of globs, got "
            f"{where!r}; write for example where='**/mlp*', or where='**' for "
            "everything"
        )
    return tuple(patterns)


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole slash path.

    `**` stands for any number of segments, none included; `*` for any text within one
    segment; `?` for one character.

    Examples:
      >>> matches("**/mlp*", "block_3/mlp"), matches("*/mlp", "a/b/mlp")
      (True, False)
      >>> matches("block_3/**", "block_3"), matches("**", "any/module")
      (True, True)
    """
    pieces = _PIECES.findall(pattern)
    regex = "".join(_REGEX.get(piece, re.escape(piece)) for piece in pieces)
    return re.fullmatch(regex, path) is not None


def selected(patterns: Iterable[str], *names: str) -> bool:
    """Whether any pattern matches any of the names of one place."""
    return any(matches(p, n) for p in patterns for n in names)


def require_matches(patterns: Iterable[str], places: Iterable[tuple[str, ...]]) -> None:
    """Raises unless each pattern matches a place; a place is its possible names.

    Raises:
      ValueError: a pattern matches nothing.
    """
    known = list(places)
    for pattern in patterns:
        # Everything of nothing is nothing.
        if pattern != "**" and not any(selected((pattern,), *names) for names in known):
            paths = list(dict.fromkeys(names[0] for names in known))
            shown = ", ".join(paths[:20]) or "none"
            more = f" and {len(paths) - 20} more" if len(paths) > 20 else ""
            raise ValueError(
                "needed `where` patterns that match a place in the program, got "
                f"{pattern!r}; places: {shown}{more}; write for example "
                "where='**/mlp*', or where='**' for everything"
            )
