"""What can be seen of a run that is not open, without its model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from stabil.checkpoints import _manifest, _offline, _rollback
from stabil.checkpoints._errors import DamagedError
from stabil.checkpoints._folder import HEALTH, MANIFEST, QUARANTINE, Folder
from stabil.checkpoints._remote import Copy, Remote


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
      directory: a folder that a `Keeper` made, or the URL of its remote level, which
        has no quarantined ones.
    Raises:
      NotARunFolderError: it is something else.
    """
    if is_url(directory):
        return _list_afar(Remote(os.fspath(directory), create=False))
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

    Needs no model, and memory for one state. A damaged step is tagged suspect; one at
    a remote level is not, and each is brought to a temporary folder to be read.

    Args:
      directory: a folder that a `Keeper` made, or the URL of its remote level.
      step: one step; all of them by default.
    Yields:
      One `Verified` a step, as soon as it is known.
    Raises:
      NotARunFolderError: the folder is something else.
      ValueError: there is no such step.
      UnreadableError: a step is whole and was not read; no tag was changed.
    """
    if is_url(directory):
        return _verify_afar(Remote(os.fspath(directory), create=False), step)
    folder = Folder(directory)
    steps = folder.steps()
    if step is not None:
        _offline.require_step(folder, step)
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
    return len(_offline.read_plain(folder.path(step), manifest))


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place is the URL of a remote level."""
    return "://" in os.fspath(place)


def _list_afar(remote: Remote) -> list[StepInfo]:
    found = []
    for copy in remote.copies():
        manifest = remote.read(copy.name, MANIFEST) or {}
        health = remote.read(copy.name, HEALTH) or {}
        found.append(
            StepInfo(
                copy.step,
                copy.tag,
                health.get("cause", ""),
                health.get("by", ""),
                manifest.get("time", ""),
                sum(copy.marker["files"].values()),
                copy.name,
            )
        )
    return found


def _verify_afar(remote: Remote, step: int | None) -> Iterator[Verified]:
    copies = remote.copies()
    if step is not None and step not in [copy.step for copy in copies]:
        there = ", ".join(str(copy.step) for copy in copies) or "none"
        raise ValueError(
            f"needed a step of {remote.url}, got {step}: the steps there are {there}"
        )
    wanted = [copy for copy in reversed(copies) if step in (None, copy.step)]
    return (_verify_copy(remote, copy) for copy in wanted)


def _verify_copy(remote: Remote, copy: Copy) -> Verified:
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(place, create=True)
        try:
            remote.pull(folder, copy)
        except DamagedError as error:
            return Verified(copy.step, copy.tag, False, str(error), 0)
        (found,) = _verify_each(folder, [copy.step])
    # In the words of the place that was asked about.
    here, there = str(folder.path(copy.step)), f"{remote.url}/{copy.name}"
    return found._replace(tag=copy.tag, problem=found.problem.replace(here, there))
