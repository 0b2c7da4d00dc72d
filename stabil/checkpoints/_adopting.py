"""Going on from a checkpoint of another structure, or from before stabil."""

from __future__ import annotations

import fnmatch
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil.checkpoints import _digest, _files, _leaves, _manifest, _matching, _store
from stabil.checkpoints._errors import DamagedError, StructureError
from stabil.checkpoints._folder import MANIFEST
from stabil.checkpoints._leaves import Leaf
from stabil.checkpoints._restoring import Restored


def find(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """The folder that holds arrays, and the step that its path names.

    Takes the root of a run (its newest step), a step, or the item itself.

    Raises:
      FileNotFoundError: no Orbax checkpoint is there.
    """
    steps = [int(p.name) for p in path.iterdir() if p.name.isdigit() and p.is_dir()]
    place = path / str(max(steps)) if steps else path
    candidates = [place, place / _store.STATE, place / "default", place / "pytree"]
    candidates += sorted(p for p in place.iterdir() if p.is_dir())
    for item in candidates:
        if (item / "_METADATA").is_file():
            named = [p.name for p in (item, item.parent) if p.name.isdigit()]
            return item, int(named[0]) if named else None
    raise FileNotFoundError(
        f"needed an Orbax checkpoint, a step folder, or a run of them, got {path}, in "
        "which no _METADATA was found: name the folder that holds the step numbers"
    )


def _form(leaf: Leaf, value: Any) -> str:
    """Shape and dtype as a text; keys by their data, Python numbers as scalars."""
    if leaf.kind == "key" and isinstance(value, jax.Array):
        data = jax.random.key_data(value)
        return f"{data.dtype.name}{list(data.shape)}"
    if leaf.shape == () and leaf.dtype in ("int", "int32", "int64", "uint32"):
        return "int[]"
    if leaf.shape == () and leaf.dtype in ("float", "float32", "float64"):
        return "float[]"
    return f"{leaf.dtype}{list(leaf.shape)}"


def _like(value: Any, fresh: Any) -> Any:
    """An old value in the type and the place of the fresh one."""
    if isinstance(fresh, (bool, int, float, str)):
        return type(fresh)(np.asarray(value).item() if fresh is not str else value)
    if isinstance(fresh, np.ndarray):
        return np.asarray(value, fresh.dtype)
    if _leaves.is_key(fresh):
        key = jax.random.wrap_key_data(
            jnp.asarray(value), impl=jax.random.key_impl(fresh)
        )
        return jax.device_put(key, fresh.sharding)
    return jax.device_put(np.asarray(value, fresh.dtype), fresh.sharding)


def adopt(
    path: pathlib.Path, state: Any, may_start_fresh: Sequence[str], step: int | None
) -> Restored:
    """Carries over every leaf of an old checkpoint that a new state has a place for.

    Raises:
      FileNotFoundError: no checkpoint is there.
      DamagedError: it cannot be read, or its digests differ.
      StructureError: a leaf has no counterpart and may not start fresh.
      ValueError: the path names no step and none was given.
    """
    item, named = find(path)
    step = named if step is None else step
    if step is None:
        raise ValueError(
            f"needed the step of the checkpoint in {item}, got a path that names none: "
            "write adopt(..., step=...)"
        )
    old_leaves, old_values, _ = _leaves.flatten(_store.load_foreign(item))
    notes = [_checked(item, old_leaves, old_values)]
    new_leaves, fresh, treedef = _leaves.flatten(state)
    old = {x.path: v for x, v in zip(old_leaves, old_values, strict=True)}
    pairs = _matching.match(
        {x.path: _form(x, v) for x, v in zip(old_leaves, old_values, strict=True)},
        {
            x.path: _form(x, v)
            for x, v in zip(new_leaves, fresh, strict=True)
            if x.kind != "empty"
        },
    )
    missing = [x for x in new_leaves if x.path not in pairs and x.kind != "empty"]
    _refuse(step, missing, old_leaves, pairs, may_start_fresh)
    values = [
        _like(old[pairs[x.path]], v) if x.path in pairs else v
        for x, v in zip(new_leaves, fresh, strict=True)
    ]
    moved = [f"{'/'.join(b)} to {'/'.join(a)}" for a, b in pairs.items() if a != b]
    left = [x.name for x in old_leaves if x.path not in set(pairs.values())]
    notes += _said("started fresh", [x.name for x in missing])
    notes += _said("left behind", left)
    notes += _said("moved", moved)
    statistics = _leaves.statistics(state)
    bad = [
        "/".join(path)
        for path, source in pairs.items()
        if path not in statistics and _holds_nonfinite(old[source])
    ]
    notes += _said("not finite", bad)
    return Restored(treedef.unflatten(values), step, {}, tuple(notes))


def _holds_nonfinite(value: Any) -> bool:
    return _digest.count_nonfinite(np.ravel(value)) > 0


def _said(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}"] if names else []


def _checked(item: pathlib.Path, leaves: list[Leaf], values: list[Any]) -> str:
    try:
        manifest = _files.read_sealed(item.parent / MANIFEST)
    except FileNotFoundError:
        return "saved without digests: its bytes could not be checked"
    by_path = {x.path: v for x, v in zip(leaves, values, strict=True)}
    saved = _manifest.leaves_of(manifest)
    lost = [x.name for x in saved if x.kind != "empty" and x.path not in by_path]
    if lost:
        raise DamagedError(f"{item} has lost leaves: {', '.join(lost)}")
    _manifest.check(manifest, [by_path.get(x.path) for x in saved], str(item))
    return "checked against its digests"


def _refuse(
    step: int,
    missing: list[Leaf],
    old: list[Leaf],
    pairs: dict[Any, Any],
    may_start_fresh: Sequence[str],
) -> None:
    refused = [
        x
        for x in missing
        if not any(fnmatch.fnmatchcase(x.name, p) for p in may_start_fresh)
    ]
    if not refused:
        return
    used = set(pairs.values())
    unused = [f"{x.name} {x.form}" for x in old if x.path not in used]
    raise StructureError(
        f"needed a counterpart in step {step} for "
        f"{_leaves.listed([f'{x.name} {x.form}' for x in refused])}; what is there and "
        f"not used: {_leaves.listed(unused) or 'nothing'}. To let leaves keep the "
        "values that they have in the state given, name them: "
        f"may_start_fresh=[{refused[0].name!r}, ...]; `*` stands for anything"
    )
