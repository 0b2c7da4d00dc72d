"""A second level far away: healthy steps as objects under any URL of fsspec.

Object stores have no rename, so a step is there when its marker is, which is written
last and names every file. A save has a folder of its own, so nothing is overwritten:

URL/stabil.json                 makes the place ours
URL/120-3f2a9c81/               the files of step 120, as they are on the disk
URL/120-3f2a9c81/stabil-remote.json   the marker
URL/_rollbacks/ID.json          a rollback: what was saved before it and lies after its
                                target is no longer chosen
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import uuid
from typing import Any, NamedTuple

from stabil.checkpoints import _files, _manifest, _points, _rollback
from stabil.checkpoints._errors import DamagedError, NotARunFolderError
from stabil.checkpoints._folder import HEALTH, MARK, Folder

MARKER = "stabil-remote.json"
ROLLBACKS = "_rollbacks"
_NAME = re.compile(r"(0|[1-9][0-9]*)-[0-9a-f]+")


class Copy(NamedTuple):
    """A step that is there whole.

    Attributes:
      name: its folder.
      step: its number.
      marker: what the marker says: `save_id`, `files` with sizes, `after`.
      tag: its tag.
    """

    name: str
    step: int
    marker: dict[str, Any]
    tag: str


class Remote:
    """Healthy steps under a URL.

    Args:
      url: for example `gs://bucket/run`; the package of its protocol is needed.
      create: make an empty place ours; otherwise it must be.
    Raises:
      NotARunFolderError: something else lies there.
    """

    def __init__(self, url: str, *, create: bool = True):
        import fsspec

        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)
        if self.read(MARK) is not None:
            return
        content = self._names("")
        if content or not create:
            what = f"one that holds {content[0]!r}" if content else "none"
            raise NotARunFolderError(
                f"needed a place that a stabil Keeper made, got {what} at {url}: "
                "nothing was changed; name a new place"
            )
        self._write({"format": _manifest.FORMAT, "made": _files.utc_now()}, MARK)

    # --- objects ---------------------------------------------------------------------

    def _at(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *names])

    def _names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(*filter(None, [folder])), detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found})

    def read(self, *names: str) -> dict[str, Any] | None:
        """A sealed object; None if it is not there or was cut short."""
        try:
            return _files.unsealed(self._fs.cat_file(self._at(*names)), names[-1])
        except (FileNotFoundError, DamagedError):
            return None

    def _write(self, payload: dict[str, Any], *names: str) -> None:
        path = self._at(*names)
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(path, _files.sealed(payload).encode())

    # --- steps -----------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Every step that may be chosen, ascending."""
        rollbacks = {
            name: self.read(ROLLBACKS, name) or {} for name in self._names(ROLLBACKS)
        }
        found = []
        for name in self._names(""):
            marker = self.read(name, MARKER) if _NAME.fullmatch(name) else None
            if marker is None:
                continue
            step = int(name.split("-")[0])
            left = [
                n
                for n, record in rollbacks.items()
                if n not in marker["after"] and step > record.get("target", step)
            ]
            tag = (self.read(name, HEALTH) or {"tag": "suspect"})["tag"]
            if not left:
                found.append(Copy(name, step, marker, tag))
        return sorted(found, key=lambda copy: copy.step)

    def healthy(self) -> dict[int, Copy]:
        """The healthy ones by step."""
        return {c.step: c for c in self.copies() if c.tag == "healthy"}

    def tell_rollbacks(self, folder: Folder) -> None:
        """Writes down every rollback of the run that is not yet known here."""
        records = [*_rollback.records(folder), _rollback.pending(folder)]
        for record in filter(None, records):
            name = f"{record['id']}.json"
            if self.read(ROLLBACKS, name) is None:
                self._write({"target": record["target"]}, ROLLBACKS, name)

    def push(self, folder: Folder, keep: int) -> None:
        """Brings the newest healthy steps of the disk here, and their tags.

        Args:
          folder: of the run.
          keep: healthy steps to have here; older ones are deleted.
        """
        self.tell_rollbacks(folder)
        there = {copy.name: copy for copy in self.copies()}
        tags = folder.tags()
        newest = [s for s, tag in tags.items() if tag == "healthy"][-keep:]
        for step in tags:
            # A step may leave the disk at any moment.
            with contextlib.suppress(FileNotFoundError, DamagedError):
                name = f"{step}-{folder.manifest(step)['save_id'][:12]}"
                if name in there and there[name].tag != tags[step]:
                    # Damage on the disk says nothing of the copy.
                    if folder.health(step)["by"] not in ("stabil", "verify"):
                        self._send(folder.path(step) / HEALTH, name, HEALTH)
                elif name not in there and step in newest:
                    self._push_one(folder, step, name)
        valid = self.copies()
        healthy = [c for c in valid if c.tag == "healthy"]
        last = healthy[-1].step if healthy else -1
        spare = [c.name for c in healthy[:-keep]]
        spare += [c.name for c in valid if c.tag != "healthy" and c.step < last]
        # What a rollback left behind, and what a kill cut short.
        stale = set(self._names("")) - {c.name for c in valid}
        for name in [*spare, *sorted(filter(_NAME.fullmatch, stale))]:
            if MARKER in self._names(name):
                self._fs.rm_file(self._at(name, MARKER))
            self._fs.rm(self._at(name), recursive=True)
            folder.log("remote_deletion", name=name, url=self.url)

    def _send(self, path: pathlib.Path, *names: str) -> None:
        target = self._at(*names)
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(path), target)

    def _push_one(self, folder: Folder, step: int, name: str) -> None:
        root, sizes = folder.path(step), {}
        # Read first: a rollback that begins while this runs, or has not ended, counts
        # against the step. After one that has ended, the step is no longer on the disk.
        after = self._names(ROLLBACKS)
        begun = _rollback.pending(folder)
        if begun is not None:
            after = [name for name in after if name != f"{begun['id']}.json"]
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            if not path.name.startswith(_files.TEMPORARY):
                part = path.relative_to(root).as_posix()
                self._send(path, name, *part.split("/"))
                sizes[part] = path.stat().st_size
        _points.reached("remote_files_sent")
        marker = {
            "save_id": folder.manifest(step)["save_id"],
            "files": sizes,
            "after": after,
        }
        self._write(marker, name, MARKER)
        folder.log("remote_save", step=step, url=self.url)

    def pull(self, folder: Folder, copy: Copy) -> None:
        """Brings a step to the disk, in the place of the one that may be there.

        Raises:
          DamagedError: a file is not there, or not whole.
        """
        aside = folder.root / f"{_files.TEMPORARY}{copy.step}-{uuid.uuid4().hex[:8]}"
        try:
            for part, size in copy.marker["files"].items():
                path = aside / part
                if not path.resolve().is_relative_to(aside.resolve()):
                    raise DamagedError(f"{self.url}/{copy.name} names {part}")
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._fs.get_file(self._at(copy.name, part), str(path))
                except FileNotFoundError as error:
                    text = f"{self.url}/{copy.name} has lost {part}"
                    raise DamagedError(text) from error
                if path.stat().st_size != size and part != HEALTH:
                    raise DamagedError(f"{self.url}/{copy.name}/{part} was cut short")
                _files.fsync_path(path)
            if folder.path(copy.step).exists():
                reason = f"damaged, and replaced from {self.url}"
                folder.delete(folder.path(copy.step), reason)
            os.replace(aside, folder.path(copy.step))
            _files.fsync_path(folder.root)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        folder.log("remote_restore", step=copy.step, url=self.url)
