"""The folder of a run: its steps, their tags, and where steps go to that left it.

RUN/stabil.json                  makes the folder ours
RUN/120/                         a step, an ordinary Orbax checkpoint, and in it
RUN/120/stabil-manifest.json       its leaves and digests; without it no step
RUN/120/stabil-health.json         its tag; without it the step is pending
RUN/_quarantine/ID/130/          what a rollback set aside, and in ID/rollback.json why
RUN/_rollback.json               a rollback that has begun and not ended
RUN/_trash/                      steps on their way out
RUN/keeper.jsonl, deletions.jsonl  what happened, one JSON object a line
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import uuid
from typing import Any

from stabil.checkpoints import _files, _points
from stabil.checkpoints._errors import DamagedError, NotARunFolderError
from stabil.checkpoints._manifest import FORMAT
from stabil.checkpoints._store import UNCOMMITTED
from stabil.checkpoints._verdict import Verdict, weighed

MARK = "stabil.json"
MANIFEST = "stabil-manifest.json"
HEALTH = "stabil-health.json"
QUARANTINE = "_quarantine"
ROLLBACK = "rollback.json"
TRASH = "_trash"
TAGS = ("pending", "healthy", "suspect", "quarantined")
_STEP = re.compile(r"0|[1-9][0-9]*")


class Folder:
    """Reads and changes the folder of a run; knows nothing of states.

    Args:
      directory: the run's folder of checkpoints.
      create: make the folder ours if it is missing or empty; otherwise it must be.
    Raises:
      NotARunFolderError: the folder is something else; nothing in it was changed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, create: bool = False):
        text = os.fspath(directory)
        if "://" in text:
            raise NotARunFolderError(
                f"needed a folder on a local or mounted file system, got {text!r}: "
                "name a folder on this machine and write Keeper(folder, "
                f"remote={text!r}), which brings healthy steps there"
            )
        self.root = pathlib.Path(text).absolute()
        if (self.root / MARK).is_file():
            return
        if self.root.exists() and not self.root.is_dir():
            raise NotARunFolderError(
                f"needed a folder, got the file {self.root}: name another place"
            )
        content = []
        if self.root.exists():
            content = sorted(
                p.name for p in self.root.iterdir() if not _is_leftover(p.name)
            )
        if content or not create:
            what = f"one that holds {content[0]!r}" if content else "none"
            raise NotARunFolderError(
                f"needed a folder that a stabil Keeper made, got {what} at "
                f"{self.root}: nothing was changed; name a new or empty folder"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        _files.write_sealed(
            self.root / MARK,
            {"format": FORMAT, "made": _files.utc_now()},
        )

    def present(self) -> bool:
        """Whether the folder is still there and still ours."""
        return (self.root / MARK).is_file()

    # --- what is there ---------------------------------------------------------------

    def path(self, step: int) -> pathlib.Path:
        """The folder of a step."""
        return self.root / str(step)

    def _numbered(self) -> list[int]:
        try:
            names = [entry.name for entry in os.scandir(self.root)]
        except (FileNotFoundError, NotADirectoryError):  # the disk may be away
            return []
        return sorted(int(n) for n in names if _STEP.fullmatch(n))

    def steps(self) -> list[int]:
        """Steps that were saved to the end, ascending."""
        return [
            s
            for s in self._numbered()
            if (self.path(s) / MANIFEST).is_file() or (self.path(s) / HEALTH).is_file()
        ]

    def half_made(self) -> list[pathlib.Path]:
        """Folders that look like steps and were not saved to the end."""
        whole = set(self.steps())
        parts = [self.path(s) for s in self._numbered() if s not in whole]
        return parts + sorted(self.root.glob(f"*{UNCOMMITTED}*"))

    def quarantined(self) -> list[tuple[str, int]]:
        """Rollback id and step of all that was set aside, oldest rollback first."""
        folder = self.root / QUARANTINE
        if not folder.is_dir():
            return []
        found = [
            (batch.name, int(step.name))
            for batch in folder.iterdir()
            if batch.is_dir()
            for step in batch.iterdir()
            if _STEP.fullmatch(step.name)
        ]
        return sorted(found)

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step.

        Raises:
          DamagedError: it is lost, not what was written, or that of another step.
        """
        manifest = self.manifest_at(self.path(step))
        if manifest["step"] != step:
            raise DamagedError(
                f"{self.path(step) / MANIFEST} is that of step {manifest['step']}"
            )
        return manifest

    def manifest_at(self, path: pathlib.Path) -> dict[str, Any]:
        """The manifest in a folder, wherever it lies."""
        try:
            return _files.read_sealed(path / MANIFEST)
        except FileNotFoundError as error:
            raise DamagedError(f"{path} has lost its {MANIFEST}") from error

    # --- tags ------------------------------------------------------------------------

    def health(self, step: int) -> dict[str, Any]:
        """Tag, cause, decider and history of a step; `pending` before any judgement."""
        try:
            return self.judgement(step)
        except DamagedError as error:
            # A judgement that cannot be read is not taken for a good one.
            cause = str(error)
            return {"tag": "suspect", "cause": cause, "by": "stabil", "history": []}

    def judgement(self, step: int) -> dict[str, Any]:
        """As `health`, for who must know of damage.

        Raises:
          DamagedError: it is not what was written, or that of another step.
        """
        path = self.path(step) / HEALTH
        try:
            record = _files.read_sealed(path)
        except FileNotFoundError:
            return {"tag": "pending", "cause": "", "by": "", "history": []}
        if record.get("step") != step:
            raise DamagedError(f"{path} is that of step {record.get('step')}")
        return record

    def tags(self) -> dict[int, str]:
        """Tag of every step, ascending by step."""
        return {s: self.health(s)["tag"] for s in self.steps()}

    def tag(
        self, step: int, tag: str, cause: str, by: str, metric: float | None = None
    ) -> str:
        """Tags a step; a state that holds a non-finite entry is not made healthy.

        Args:
          step: a step on disk.
          tag: the tag.
          cause: why.
          by: who decided.
          metric: replaces the one that the step has, if not None.
        Returns:
          The tag that the step has now.
        """
        before = self.health(step)
        metric = before.get("metric") if metric is None else metric
        stated = {} if metric is None else {"metric": metric}
        verdict = weighed(Verdict(tag, cause, by), lambda: self.manifest(step) | stated)
        tag, cause, by, _ = verdict
        entry = {"tag": tag, "cause": cause, "by": by, "time": _files.utc_now()}
        history = [*before["history"], entry]
        record = {"step": step, **entry, **stated, "history": history}
        _files.write_sealed(self.path(step) / HEALTH, record)
        self.log("tag", step=step, tag=tag, cause=cause, by=by)
        return tag

    # --- going out -------------------------------------------------------------------

    def delete(self, path: pathlib.Path, reason: str) -> None:
        """Deletes a step's folder, whole or not at all for every reader."""
        log = self.root / "deletions.jsonl"
        record = {"path": str(path.relative_to(self.root)), "reason": reason}
        try:
            _files.append_line(log, record)
            logged = True
        except OSError:
            # The disk may be full, and what goes makes room for the line.
            logged = False
        _points.reached("deletion_logged")
        trash = self.root / TRASH
        trash.mkdir(exist_ok=True)
        gone = trash / f"{path.name}-{uuid.uuid4().hex[:8]}"
        os.replace(path, gone)
        _files.fsync_path(self.root)
        _points.reached("step_in_trash")
        shutil.rmtree(gone, ignore_errors=True)
        if not logged:
            _files.append_line(log, record)

    def sweep(self) -> None:
        """Ends deletions and removes saves that a kill cut short."""
        shutil.rmtree(self.root / TRASH, ignore_errors=True)
        for path in self.half_made():
            self.log("half_made", path=path.name)
            shutil.rmtree(path, ignore_errors=True)

    def log(self, event: str, **fields: Any) -> None:
        """Appends to the keeper's log; a log that cannot be written stops nothing."""
        try:
            record = {"event": event, **fields}
            _files.append_line(self.root / "keeper.jsonl", record)
        except OSError:
            pass


def _is_leftover(name: str) -> bool:
    return name.startswith(_files.TEMPORARY)
