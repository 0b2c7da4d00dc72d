"""Selection of modules by glob patterns over slash paths, and by class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

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


def as_choice(
    where: str | type | tuple[str | type, ...],
) -> tuple[str | type, ...]:
    """The patterns and classes of the `where` argument of a model's probe.

    Raises:
      TypeError: `where` is no string, no class, and no non-empty sequence of such.
    """
    chosen = (where,) if isinstance(where, (str, type)) else where
    if (
        not isinstance(chosen, (tuple, list))
        or not chosen
        or not all(isinstance(c, type) or (isinstance(c, str) and c) for c in chosen)
    ):
        raise TypeError(
            "needed `where` as a glob over slash paths, a module class, or a tuple of "
            f"such, got {where!r}; write for example where='**/mlp*', "
            "where=nn.LayerNorm, or where='**' for everything"
        )
    return tuple(chosen)


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


def selected(patterns: Iterable[str | type], *names: str, kind: type = object) -> bool:
    """Whether any pattern matches any of the names of one place, or its class."""
    return any(
        issubclass(kind, p)
        if isinstance(p, type)
        else any(matches(p, n) for n in names)
        for p in patterns
    )


def as_names(
    chosen: Iterable[str | type], places: Mapping[tuple[str, ...], type]
) -> tuple[str, ...]:
    """The patterns, with the names of the places of a class instead of the class.

    Raises:
      ValueError: no place has the class.
    """
    patterns = []
    for one in chosen:
        if isinstance(one, str):
            patterns.append(one)
            continue
        found = [names[0] for names, kind in places.items() if issubclass(kind, one)]
        if not found:
            known = ", ".join(dict.fromkeys(k.__name__ for k in places.values()))
            raise ValueError(
                "needed `where` classes of modules that are called in the model, got "
                f"{one.__name__}; called are {known or 'none'}: write for example "
                "where=nn.LayerNorm, or where='**' for everything"
            )
        patterns += found
    return tuple(patterns)


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
