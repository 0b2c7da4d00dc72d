"""Choosing a step and reading it, with damage as an expected case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

from stabil.checkpoints import _holding, _leaves, _manifest, _processes, _store
from stabil.checkpoints._errors import (
    DamagedError,
    NoHealthyStepError,
    UnreadableError,
)
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._memory import Ring
from stabil.checkpoints._mirror import Mirror


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state that came back.

    Attributes:
      state: in the structure, dtypes and shardings of the state asked for.
      step: the step that it was saved at.
      extra: the JSON that was saved with it.
      notes: what happened on the way, for people; empty when nothing did.
      source: `disk` or `memory`.
      positions: where the data stood, by the index of the process.
    """

    state: Any
    step: int
    extra: dict[str, Any]
    notes: tuple[str, ...] = ()
    source: str = "disk"
    positions: dict[str, Any] = dataclasses.field(default_factory=dict)


def with_notes(restored: Restored, before: list[str]) -> Restored:
    """The same with notes put in front."""
    return dataclasses.replace(restored, notes=(*before, *restored.notes))


def compare(folder: Folder, ring: Ring, step: int, abstract_state: Any) -> None:
    """Refuses a state of other leaves before anything is changed.

    Raises:
      StructureError: the leaves differ.
    """
    wanted = _leaves.flatten(abstract_state)[0]
    snapshot = ring.find(step)
    if snapshot is not None and snapshot.tag == "healthy":
        _leaves.compare(step, snapshot.leaves, wanted)
        return
    try:
        manifest = folder.manifest(step)
    except DamagedError:
        # Found again, and dealt with, when the step is read.
        return
    _leaves.compare(step, _manifest.leaves_of(manifest), wanted)


def from_disk(folder: Folder, step: int, abstract_state: Any) -> Restored:
    """Reads a step and checks every byte of it.

    Raises:
      StructureError: the leaves differ.
      DamagedError: the step cannot be read, or holds other bytes than were saved. It
        has been tagged suspect.
      UnreadableError: it cannot be read, and its files are what was saved; its tag is
        what it was.
    """
    path, manifest, problem, intact = folder.path(step), {}, "", False
    raw: list[Any] = []
    state = None
    with _holding.Arrivals() as arrivals:
        try:
            manifest = folder.manifest(step)
            saved = _manifest.leaves_of(manifest)
            _leaves.compare(step, saved, _leaves.flatten(abstract_state)[0])
            raw, state = _store.read(path, saved, abstract_state, arrivals.take)
        except DamagedError as error:
            problem = str(error)
        except UnreadableError as error:
            problem = str(error)
            intact = not _manifest.changed_files(manifest, path)
        # What only one process found counts for all.
        found = _processes.gathered([bool(problem), intact])
        if found[:, 0].any():
            problem = problem or f"{path} cannot be read by another process"
        else:
            try:
                _manifest.check(manifest, raw, str(path), arrivals)
            except DamagedError as error:
                problem = str(error)
    if found[:, 1].any():
        raise UnreadableError(
            f"{problem}. Its files are what was saved, so that its tag stays: look at "
            "the memory that is free and at the versions of the libraries, then "
            "restore again"
        )
    if problem:
        text = "; ".join([problem, *_manifest.changed_files(manifest, path)])
        _processes.decide(lambda: _condemn(folder, step, text))
        raise DamagedError(text)
    positions = manifest.get("positions", {})
    return Restored(state, step, manifest["extra"], positions=positions)


def _condemn(folder: Folder, step: int, cause: str) -> None:
    folder.log("damage", step=step, cause=cause)
    # A folder that cannot be written can still be read from.
    with contextlib.suppress(OSError):
        folder.tag(step, "suspect", cause, "stabil")


def at(
    folder: Folder, ring: Ring, mirror: Mirror, step: int, abstract_state: Any
) -> Restored:
    """Reads a healthy step from memory if it is there, else from disk, else from afar.

    Raises:
      StructureError: the leaves differ.
      DamagedError: the step cannot be had from any level.
      UnreadableError: as for `from_disk`.
    """
    snapshot = ring.find(step)
    if snapshot is not None and snapshot.tag == "healthy":
        state = ring.restore(snapshot, abstract_state)
        extra = json.loads(snapshot.extra)
        return Restored(state, step, extra, (), "memory", snapshot.positions)
    notes: list[str] = []
    if _processes.decide(lambda: step in folder.steps()):
        try:
            return from_disk(folder, step, abstract_state)
        except DamagedError as error:
            notes, damage = [str(error)], error
    else:
        damage = DamagedError(f"it is not in {folder.root}")
    note = _processes.decide(lambda: mirror.pull(step))
    if not note:
        raise damage
    return with_notes(from_disk(folder, step, abstract_state), [*notes, note])


def newest(folder: Folder, ring: Ring, mirror: Mirror, abstract_state: Any) -> Restored:
    """The newest healthy step that can be read, whatever its level.

    Raises:
      NoHealthyStepError: no step is healthy.
      DamagedError: every healthy step is damaged.
      StructureError: the leaves differ.
      UnreadableError: as for `from_disk`.
    """
    there = _processes.decide(
        lambda: [
            *(s for s, tag in folder.tags().items() if tag == "healthy"),
            *mirror.healthy(),
        ]
    )
    notes: list[str] = []
    for step in sorted({*there, *ring.healthy()}, reverse=True):
        try:
            restored = at(folder, ring, mirror, step, abstract_state)
            return with_notes(restored, notes)
        except DamagedError as error:
            notes.append(f"step {step} was passed over: {error}")
    raise none_left(folder, None, notes)


def none_left(folder: Folder, before: int | None, notes: list[str]) -> Exception:
    """The error for a run that has no step to go back to."""
    if notes:
        return DamagedError(
            f"needed a healthy step in {folder.root} that can be read, got none: "
            f"{'; '.join(notes)}. Name another step with "
            "keeper.restore(abstract_state, step=...), or start from scratch in a new "
            "folder"
        )
    tags = folder.tags()
    limit = "" if before is None else f" before {before}"
    if not tags:
        return NoHealthyStepError(
            f"needed a healthy step{limit} in {folder.root}, got an empty run: start "
            "from scratch and call keeper.save"
        )
    there = ", ".join(f"{s} {tag}" for s, tag in tags.items())
    return NoHealthyStepError(
        f"needed a healthy step{limit} in {folder.root}, got {there}: judge one with "
        "keeper.mark(step, 'healthy'), or choose one whatever its tag with "
        "keeper.restore(abstract_state, step=...)"
    )
