"""Globs over module paths."""

import re

import pytest

from stabil.probes import _select


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("**", "a/b/c", True),
        ("**", "a", True),
        ("*", "a", True),
        ("*", "a/b", False),
        ("a/*", "a/b", True),
        ("a/*", "a", False),
        ("a/**", "a", True),
        ("a/**", "a/b/c", True),
        ("a/**", "ab", False),
        ("**/mlp*", "mlp", True),
        ("**/mlp*", "b/c/mlp_in", True),
        ("**/mlp*", "b/mlp/up", False),
        ("**/attn/**", "b/attn/q", True),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("layers_?", "layers_3", True),
        ("layers_?", "layers_30", False),
        ("a.b", "axb", False),
        ("a[0]", "a[0]", True),
    ],
)
def test_glob(pattern, path, expected):
    assert _select.matches(pattern, path) is expected


@pytest.mark.parametrize("where", [3, (), ("a", 3), "", ("a", "")])
def test_refuses_what_is_no_glob(where):
    text = (
        "needed `where` as a glob over slash paths or a tuple of globs, got "
        f"{where!r}; write for example where='**/mlp*', or where='**' for everything"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        _select.as_patterns(where)


def test_a_pattern_without_a_match_lists_what_exists():
    places = [(f"layer_{i}",) for i in range(23)]
    text = (
        "needed `where` patterns that match a place in the program, got 'mlp'; "
        f"places: {', '.join(f'layer_{i}' for i in range(20))} and 3 more; "
        "write for example where='**/mlp*', or where='**' for everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        _select.require_matches(("layer_2", "mlp"), places)


@pytest.mark.parametrize("where", [3, (), (int, 3), "", (int, "")])
def test_refuses_what_is_no_choice_of_modules(where):
    text = (
        "needed `where` as a glob over slash paths, a module class, or a tuple of "
        f"such, got {where!r}; write for example where='**/mlp*', "
        "where=nn.LayerNorm, or where='**' for everything"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        _select.as_choice(where)


def test_a_class_stands_for_the_names_of_its_modules():
    places = {("a",): int, ("b", "c"): bool, ("d",): str}
    assert _select.as_names(("x*", int, str), places) == ("x*", "a", "b", "d")
    assert _select.selected((int,), "d", kind=bool)
    assert not _select.selected((int, "e"), "d", kind=str)
    text = (
        "needed `where` classes of modules that are called in the model, got float; "
        "called are int, bool, str: write for example where=nn.LayerNorm, or "
        "where='**' for everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        _select.as_names((float,), places)
