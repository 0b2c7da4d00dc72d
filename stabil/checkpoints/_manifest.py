"""The manifest of a step: which leaves it holds and the digest of each."""

from __future__ import annotations

import functools
import math
import pathlib
import platform
import zlib
from collections.abc import Set
from typing import Any

import numpy as np

from stabil.checkpoints import _files, _holding, _processes
from stabil.checkpoints._digest import Digest
from stabil.checkpoints._errors import DamagedError
from stabil.checkpoints._leaves import Leaf

FORMAT = 1
# Names of the files that stabil adds to a step begin so, finished or not.
_OURS = ("stabil-", _files.TEMPORARY)
_SMALL = 1 << 20


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a state means."""
    import importlib.metadata as metadata

    found = {"python": platform.python_version()}
    for name in ("stabil", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def python_value(leaf: Leaf, value: Any) -> str | None:
    """A Python leaf as an exact text; None for arrays."""
    if leaf.kind != "python":
        return None
    return repr(value.item() if isinstance(value, np.ndarray) else value)


def describe(
    leaves: list[Leaf],
    values: list[Any],
    digests: list[Digest],
    statistics: Set[tuple[str, ...]] = frozenset(),
) -> list[dict[str, Any]]:
    """The JSON of the leaves of a state.

    Args:
      leaves: what the leaves are.
      values: the text of each Python leaf, see `python_value`.
      digests: one for each leaf.
      statistics: paths of the leaves in which NaN is no fault.
    """
    rows = []
    for leaf, value, digest in zip(leaves, values, digests, strict=True):
        row: dict[str, Any] = {
            "path": list(leaf.path),
            "kind": leaf.kind,
            "shape": list(leaf.shape),
            "dtype": leaf.dtype,
        }
        if leaf.kind == "python":
            row["value"] = value
        else:
            row["digest"] = f"{digest.first:08x}{digest.second:08x}"
            row["nonfinite"] = 0 if leaf.path in statistics else digest.nonfinite
        rows.append(row)
    return rows


def leaves_of(manifest: dict[str, Any]) -> list[Leaf]:
    """The `Leaf` of every row of a manifest."""
    return [
        Leaf(tuple(r["path"]), r["kind"], tuple(r["shape"]), r["dtype"])
        for r in manifest["leaves"]
    ]


def nonfinite(manifest: dict[str, Any]) -> list[str]:
    """Names of the leaves, and the metric, saved with NaN or infinite entries."""
    found = [
        "/".join(row["path"])
        for row in manifest["leaves"]
        if row.get("nonfinite")
        or row.get("dtype") == "float"
        and row.get("value") in ("nan", "inf", "-inf")
    ]
    return found + ([] if math.isfinite(manifest.get("metric") or 0) else ["metric"])


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict) or not config:
        return {prefix: config} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}/{key}" if prefix else str(key))
    return found


def changes(
    what: str, old: dict[str, Any], new: dict[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Name, old and new value of what differs between two nested dicts."""
    before, after = _flat(old), _flat(new)
    found = []
    for name in sorted({*before, *after}):
        x, y = before.get(name, "absent"), after.get(name, "absent")
        if x != y:
            found.append((what + name, x, y))
    return found


def differences(manifest: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What is not as it was when the step was saved: versions and configuration."""
    found = [
        *changes("version of ", manifest.get("versions", {}), versions()),
        *changes("config ", manifest.get("config", {}), config),
    ]
    return [f"{name}: {old} when saved, {new} now" for name, old, new in found]


def files(path: pathlib.Path) -> dict[str, list[Any]]:
    """Size in bytes and checksum of every file of a step that is not ours.

    A file beyond 1 MiB has None for a checksum: it holds arrays, which have digests.
    """
    found: dict[str, list[Any]] = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        if not file.name.startswith(_OURS):
            size = file.stat().st_size
            small = size <= _SMALL
            checksum = f"{zlib.crc32(file.read_bytes()):08x}" if small else None
            found[str(file.relative_to(path))] = [size, checksum]
    return found


def changed_files(manifest: dict[str, Any], path: pathlib.Path) -> list[str]:
    """Names of the files that are not as they were saved, and what is wrong."""
    now, changed = files(path), []
    for name, (size, checksum) in manifest.get("files", {}).items():
        if name not in now:
            changed.append(f"{name} is gone")
        elif now[name][0] != size:
            changed.append(f"{name} has {now[name][0]} bytes instead of {size}")
        elif now[name][1] != checksum:
            changed.append(f"{name} has other bytes")
    return changed


def check(
    manifest: dict[str, Any],
    values: list[Any],
    where: str,
    arrivals: _holding.Arrivals | None = None,
) -> None:
    """Compares restored values with the digests of their manifest.

    Args:
      manifest: of the step.
      values: as they are on disk, one for each row of the manifest.
      where: names the step in the error.
      arrivals: was shown some of the values as they came.
    Raises:
      DamagedError: names the leaves whose bytes differ.
    """
    leaves = leaves_of(manifest)
    digests = _holding.hold(values, finite=False, arrivals=arrivals)()
    table = np.array(digests, np.uint32).reshape(-1, 3)
    rows = _processes.added_up(table)
    digests = [Digest(*(int(v) for v in row)) for row in rows]
    python = [python_value(x, v) for x, v in zip(leaves, values, strict=True)]
    found = describe(leaves, python, digests)
    bad = [
        leaf.name
        for leaf, old, new in zip(leaves, manifest["leaves"], found, strict=True)
        if (old.get("digest"), old.get("value"))
        != (
            new.get("digest"),
            new.get("value"),
        )
    ]
    if bad:
        raise DamagedError(
            f"{where} holds other bytes than were saved: {', '.join(bad)}"
        )
