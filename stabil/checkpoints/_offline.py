"""What can be done to a run's folder without its model."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from stabil.checkpoints import _leaves, _manifest, _rollback, _store
from stabil.checkpoints._errors import DamagedError, NoHealthyStepError
from stabil.checkpoints._folder import QUARANTINE, Folder


class StepInfo(NamedTuple):
    """One step of a run, as `list_steps` gives it.

    Attributes:
      step: its number.
      tag: `pending`, `healthy`, `suspect` or `quarantined`.
      cause: why, in the words of who decided.
      by: who decided.
      saved: when, UTC; empty if the manifest cannot be read.
      size: bytes on disk.
      path: its folder, relative to the run's.
    """

    step: int
    tag: str
    cause: str
    by: str
    saved: str
    size: int
    path: str


class Verified(NamedTuple):
    """What `verify` found of one step.

    Attributes:
      step: its number.
      tag: its tag.
      ok: whether every byte is as it was saved.
      problem: what is not; empty when ok.
      leaves: leaves that were checked.
    """

    step: int
    tag: str
    ok: bool
    problem: str
    leaves: int


def list_steps(directory: str | os.PathLike[str]) -> list[StepInfo]:
    """Every step of a run, ascending, then the quarantined ones; changes nothing.

    Args:
      directory: a folder that a `Keeper` made.
    Raises:
      NotARunFolderError: it is something else.
    """
    folder = Folder(directory)
    found = []
    for step in folder.steps():
        health = folder.health(step)
        found.append(
            _info(folder, step, str(step), health["tag"], health["cause"], health["by"])
        )
    reasons = {r["id"]: r["reason"] for r in _rollback.records(folder)}
    for batch, step in folder.quarantined():
        path = f"{QUARANTINE}/{batch}/{step}"
        cause = reasons.get(batch, "")
        found.append(_info(folder, step, path, "quarantined", cause, "rollback"))
    return found


def _info(
    folder: Folder, step: int, path: str, tag: str, cause: str, by: str
) -> StepInfo:
    place = folder.root / path
    try:
        saved = folder.manifest_at(place)["time"]
    except DamagedError:
        saved = ""
    size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    return StepInfo(step, tag, cause, by, saved, size, path)


def verify(
    directory: str | os.PathLike[str], step: int | None = None
) -> Iterator[Verified]:
    """Reads steps and compares every file and every array, newest first.

    Needs no model, and memory for one state. A damaged step is tagged suspect.

    Args:
      directory: a folder that a `Keeper` made.
      step: one step; all of them by default.
    Yields:
      One `Verified` a step, as soon as it is known.
    Raises:
      NotARunFolderError: the folder is something else.
      ValueError: there is no such step.
    """
    folder = Folder(directory)
    steps = folder.steps()
    if step is not None:
        _require(folder, step)
        steps = [step]
    return _verify_each(folder, sorted(steps, reverse=True))


def _verify_each(folder: Folder, steps: list[int]) -> Iterator[Verified]:
    for step in steps:
        leaves, problem = 0, ""
        try:
            leaves = _verify_one(folder, step)
        except DamagedError as error:
            problem = str(error)
            folder.log("damage", step=step, cause=problem)
            folder.tag(step, "suspect", problem, "verify")
        tag = folder.health(step)["tag"]
        yield Verified(step, tag, not problem, problem, leaves)


def _verify_one(folder: Folder, step: int) -> int:
    folder.judgement(step)
    manifest = folder.manifest(step)
    changed = _manifest.changed_files(manifest, folder.path(step))
    if changed:
        raise DamagedError(f"{folder.path(step)} has changed: {'; '.join(changed)}")
    return len(read_plain(folder.path(step), manifest))


def read_plain(
    path: pathlib.Path, manifest: dict[str, Any]
) -> dict[tuple[str, ...], Any]:
    """The leaves of a step by path, as NumPy arrays, checked; None for empty ones.

    Raises:
      DamagedError: they are not what the manifest says.
    """
    saved = _manifest.leaves_of(manifest)
    tree = _store.load_foreign(path / _store.STATE)
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    values = {_leaves.parts(place): value for place, value in pairs}
    lost = [x.name for x in saved if x.kind != "empty" and x.path not in values]
    if lost:
        raise DamagedError(f"{path} has lost leaves: {', '.join(lost)}")
    # Keys come as their data; digests are of the data in any case.
    ordered = [values.get(x.path) for x in saved]
    _manifest.check(manifest, ordered, str(path))
    return {x.path: v for x, v in zip(saved, ordered, strict=True)}


def mark(
    directory: str | os.PathLike[str],
    step: int,
    tag: str,
    cause: str = "",
    *,
    by: str = "caller",
) -> str:
    """Judges a step of a run that is not open, as `Keeper.mark` does.

    Args:
      directory: a folder that a `Keeper` made.
      step: a step on disk.
      tag: `healthy` or `suspect`.
      cause: why, for people.
      by: who decided.
    Returns:
      The tag that the step has now: `suspect` where a leaf is not finite.
    Raises:
      NotARunFolderError: the folder is something else.
      ValueError: there is no such step or tag.
    """
    folder = Folder(directory)
    require_tag(tag)
    _require(folder, step)
    return folder.tag(step, tag, cause, by)


def rollback(
    directory: str | os.PathLike[str], before: int, reason: str = ""
) -> dict[str, Any]:
    """Quarantines every step after the newest healthy one below `before`.

    For a run that is not open; the next start goes on from the target.

    Args:
      directory: a folder that a `Keeper` made.
      before: steps from here on are not gone back to.
      reason: why, for people.
    Returns:
      The rollback's record: `id`, `target`, `before`, `reason`, `extra`, `time`.
    Raises:
      NotARunFolderError: the folder is something else.
      NoHealthyStepError: no healthy step lies before.
    """
    folder = Folder(directory)
    _rollback.finish(folder)
    healthy = [s for s, tag in folder.tags().items() if tag == "healthy" and s < before]
    if not healthy:
        raise NoHealthyStepError(
            f"needed a healthy step before {before} in {folder.root}, got none: judge "
            "one first with stabil.checkpoints.mark"
        )
    _rollback.begin(folder, target=healthy[-1], before=before, reason=reason)
    _rollback.finish(folder)
    return _rollback.records(folder)[-1]


def require_tag(tag: str) -> None:
    """Refuses a tag that cannot be given.

    Raises:
      ValueError: the tag is not `healthy` or `suspect`.
    """
    if tag not in ("healthy", "suspect"):
        raise ValueError(
            f"needed the tag 'healthy' or 'suspect', got {tag!r}: a step is pending "
            "until it is judged, and a rollback quarantines"
        )


def _require(folder: Folder, step: int) -> None:
    if step not in folder.steps():
        raise ValueError(no_such_step(folder, step))


def no_such_step(folder: Folder, step: Any) -> str:
    """The text of the error for a step that is not there."""
    there = ", ".join(str(s) for s in folder.steps()) or "none"
    return (
        f"needed a step of {folder.root}, got {step!r}: the steps on disk are {there}"
    )
