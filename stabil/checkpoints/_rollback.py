"""Setting steps aside so that a kill at any moment leaves one meaning.

The intent file is the decision: once it is on disk the rollback has happened, and
whoever opens the folder next ends it. Steps are renamed, never deleted, so nothing is
lost and no half-deleted step can be taken for a whole one.
"""

from __future__ import annotations

import os
import shutil
import uuid
from typing import Any

from stabil.checkpoints import _files, _points
from stabil.checkpoints._errors import DamagedError
from stabil.checkpoints._folder import QUARANTINE, ROLLBACK, Folder

INTENT = "_rollback.json"


def begin(
    folder: Folder,
    *,
    target: int,
    before: int,
    reason: str,
    extra: dict[str, Any] | None = None,
) -> str:
    """Writes the intent to go back to `target`; from here on it is decided.

    Returns:
      The id of the rollback.
    """
    batches = folder.root / QUARANTINE
    numbers = [0]
    if batches.is_dir():
        numbers += [int(p.name[:4]) for p in batches.iterdir() if p.name[:4].isdigit()]
    name = f"{max(numbers) + 1:04d}-{uuid.uuid4().hex[:8]}"
    intent = {
        "id": name,
        "target": target,
        "before": before,
        "reason": reason,
        "extra": extra or {},
        "time": _files.utc_now(),
    }
    _files.write_sealed(folder.root / INTENT, intent)
    _points.reached("intent_written")
    return name


def pending(folder: Folder) -> dict[str, Any] | None:
    """The intent of a rollback that has begun and not ended."""
    path = folder.root / INTENT
    try:
        return _files.read_sealed(path)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        # Written whole or not at all, so this is bit rot. The tags still protect.
        os.replace(path, path.with_suffix(".damaged"))
        folder.log("damage", path=str(path), cause=str(error))
        return None


def finish(folder: Folder) -> dict[str, Any] | None:
    """Ends the rollback that has begun, if there is one; may be called again.

    Every step after the target leaves the folder's list by a rename into
    `_quarantine/ID/`, together with what a save left unfinished.

    Returns:
      The rollback that was ended, or None.
    """
    intent = pending(folder)
    if intent is None:
        return None
    batch = folder.root / QUARANTINE / intent["id"]
    batch.mkdir(parents=True, exist_ok=True)
    _files.fsync_path(folder.root)
    _points.reached("batch_made")
    half_made = folder.half_made()
    for step in folder.steps():
        if step > intent["target"]:
            os.replace(folder.path(step), batch / str(step))
            _points.reached("step_set_aside")
    for path in half_made:
        shutil.rmtree(path, ignore_errors=True)
    _files.fsync_path(folder.root)
    _points.reached("half_made_gone")
    os.replace(folder.root / INTENT, batch / ROLLBACK)
    _files.fsync_path(batch)
    _files.fsync_path(folder.root)
    _points.reached("intent_retired")
    folder.log("rollback", **{k: v for k, v in intent.items() if k != "time"})
    return intent


def records(folder: Folder) -> list[dict[str, Any]]:
    """Every rollback that ended, oldest first, with its reason and extra."""
    batches = folder.root / QUARANTINE
    if not batches.is_dir():
        return []
    found = []
    for batch in sorted(batches.iterdir()):
        try:
            found.append(_files.read_sealed(batch / ROLLBACK))
        except (FileNotFoundError, DamagedError):
            continue
    return found


def trim_quarantine(folder: Folder, keep: int) -> None:
    """Deletes the steps that were set aside first, until `keep` are left."""
    aside = folder.quarantined()
    for batch, step in aside[: max(len(aside) - keep, 0)]:
        path = folder.root / QUARANTINE / batch / str(step)
        folder.delete(path, f"more than {keep} quarantined steps")
