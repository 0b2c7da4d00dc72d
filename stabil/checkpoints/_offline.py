"""What can be done to the folder of a run that is not open, without its model."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

from stabil.checkpoints import _leaves, _manifest, _rollback, _store
from stabil.checkpoints._errors import DamagedError, NoHealthyStepError
from stabil.checkpoints._folder import Folder


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
    require_step(folder, step)
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


def require_step(folder: Folder, step: int) -> None:
    """Refuses a step that is not there.

    Raises:
      ValueError: it is not.
    """
    if step not in folder.steps():
        raise ValueError(no_such_step(folder, step))


def no_such_step(folder: Folder, step: Any) -> str:
    """The text of the error for a step that is not there."""
    there = ", ".join(str(s) for s in folder.steps()) or "none"
    return (
        f"needed a step of {folder.root}, got {step!r}: the steps on disk are {there}"
    )
