"""Which leaf of an old state is which leaf of a new one, when the structure changed.

Nodes are matched before leaves: two nodes are the same when all leaves below them have
the same relative paths, shapes and dtypes. A position in a chain says nothing (one
member more shifts all that follow), so children that are numbered are matched by what
they hold, in order; children that are named, by name. A node that was wrapped, or
unwrapped, is found below the other one. Where more than one answer is possible there is
none: a fresh moment costs some steps, a wrong one costs the run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Path = tuple[str, ...]


@dataclasses.dataclass
class _Node:
    path: Path
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)
    form: str | None = None

    def signature(self) -> frozenset[tuple[Path, str]]:
        return frozenset(
            (leaf.path[len(self.path) :], leaf.form or "") for leaf in self.leaves()
        )

    def leaves(self) -> list[_Node]:
        if self.form is not None:
            return [self]
        return [leaf for child in self.children.values() for leaf in child.leaves()]

    def below(self) -> list[_Node]:
        found = []
        for child in self.children.values():
            found += [child, *child.below()]
        return found


def _tree(forms: dict[Path, str]) -> _Node:
    root = _Node(())
    for path, form in forms.items():
        node = root
        for n, part in enumerate(path, 1):
            node = node.children.setdefault(part, _Node(path[:n]))
        node.form = form
    return root


def match(old: dict[Path, str], new: dict[Path, str]) -> dict[Path, Path]:
    """For every leaf of `new` that was found, the leaf of `old` that it is.

    Args:
      old: shape and dtype of each old leaf, as a text, by path.
      new: the same of the new leaves.

    Examples:
      >>> old = {("0", "count"): "i", ("0", "mu"): "f", ("1", "count"): "i"}
      >>> new = {("0", "seen"): "i", ("1", "count"): "i", ("1", "mu"): "f",
      ...        ("2", "count"): "i"}
      >>> for a, b in sorted(match(old, new).items()):
      ...     print("/".join(a), "is", "/".join(b))
      1/count is 0/count
      1/mu is 0/mu
      2/count is 1/count
    """
    pairs: dict[Path, Path] = {}
    _match_nodes(_tree(old), _tree(new), pairs)
    return pairs


def _pair(old: _Node, new: _Node, pairs: dict[Path, Path]) -> None:
    for leaf in new.leaves():
        pairs[leaf.path] = old.path + leaf.path[len(new.path) :]


def _match_nodes(old: _Node, new: _Node, pairs: dict[Path, Path]) -> None:
    if old.signature() == new.signature():
        _pair(old, new, pairs)
        return
    inside = _outermost(new, old.signature())
    if inside is not None:
        _pair(old, inside, pairs)
        return
    outside = _outermost(old, new.signature())
    if outside is not None:
        _pair(outside, new, pairs)
        return
    if not old.children or not new.children:
        return
    names = [*old.children, *new.children]
    if all(name.isdigit() for name in names):
        rest = _match_in_order(old, new, pairs)
    else:
        shared = [n for n in old.children if n in new.children]
        for name in shared:
            _match_nodes(old.children[name], new.children[name], pairs)
        rest = (
            [c for n, c in old.children.items() if n not in shared],
            [c for n, c in new.children.items() if n not in shared],
        )
    _match_rest(*rest, pairs)


def _outermost(node: _Node, signature: frozenset[Any]) -> _Node | None:
    """The one node below with that signature; of nested ones the outermost."""
    found = [n for n in node.below() if n.children and n.signature() == signature]
    outer = [
        n
        for n in found
        if not any(m is not n and n.path[: len(m.path)] == m.path for m in found)
    ]
    return outer[0] if len(outer) == 1 else None


def _match_in_order(
    old: _Node, new: _Node, pairs: dict[Path, Path]
) -> tuple[list[_Node], list[_Node]]:
    by_number = lambda node: [  # noqa: E731
        node.children[k] for k in sorted(node.children, key=int)
    ]
    groups: dict[frozenset[Any], tuple[list[_Node], list[_Node]]] = {}
    for side, node in enumerate((old, new)):
        for child in by_number(node):
            groups.setdefault(child.signature(), ([], []))[side].append(child)
    old_rest: list[_Node] = []
    new_rest: list[_Node] = []
    for before, after in groups.values():
        if len(before) == len(after):
            for a, b in zip(before, after, strict=True):
                _pair(a, b, pairs)
        else:
            old_rest += before
            new_rest += after
    return old_rest, new_rest


def _match_rest(old: list[_Node], new: list[_Node], pairs: dict[Path, Path]) -> None:
    # A leaf under another name is another leaf.
    old = [node for node in old if node.children]
    new = [node for node in new if node.children]
    if len(old) == len(new) == 1:
        _match_nodes(old[0], new[0], pairs)
        return
    for child in old:
        inside = [_outermost(other, child.signature()) for other in new]
        inside += [other for other in new if other.signature() == child.signature()]
        found = [node for node in inside if node is not None]
        if len(found) == 1:
            _pair(child, found[0], pairs)
