"""A run's folder: claimed once, never taken over from somebody else's files."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
from collections.abc import Iterable
from typing import Any

MARKER = "stabil-run.json"


class RunFolder:
    """The folder that holds a run's logs and notes.

    Args:
      path: folder; created when missing.
      ignore: folders that may already lie in it, such as a keeper's.
      run: name of the run when another process has claimed the folder already.

    Attributes:
      path: the folder, absolute.
      run: name of the run: the folder's name and a random part, made once.
      is_new: whether the run begins here.

    Raises:
      ValueError: the folder holds files but no marker, or is no local folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ignore: Iterable[pathlib.Path] = (),
        run: str = "",
    ):
        if "://" in str(path):
            raise ValueError(
                f"needed a local folder as run_dir, got {path}; write logs to a local "
                "disk, and hand the remote path to stabil.checkpoints.Keeper"
            )
        self.path = pathlib.Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"needed a folder as run_dir, got the file {self.path}; choose another "
                "run_dir, nothing was changed"
            )
        marker = self.path / MARKER
        self.is_new = not marker.exists()
        if run:
            self.path.mkdir(parents=True, exist_ok=True)
            self.run = run
            return
        if self.is_new:
            self._refuse_foreign(ignore)
            self.path.mkdir(parents=True, exist_ok=True)
            run = f"{self.path.name}-{secrets.token_hex(3)}"
            write_json(marker, {"made_by": "stabil", "schema": 1, "run": run})
        self.run = str(json.loads(marker.read_text())["run"])

    def _refuse_foreign(self, ignore: Iterable[pathlib.Path]) -> None:
        if not self.path.is_dir():
            return
        ignored = {pathlib.Path(p).absolute() for p in ignore}
        foreign = sorted(
            p.name
            for p in self.path.iterdir()
            if not p.name.startswith(MARKER)
            and not any(p == i or p in i.parents for i in ignored)
        )
        if foreign:
            raise ValueError(
                f"needed a new or empty folder or one made by stabil as run_dir, got "
                f"{self.path} with {len(foreign)} other entries (first: {foreign[0]}); "
                "choose another run_dir, nothing was changed"
            )

    def read(self, name: str) -> Any:
        """The content of a JSON file of the folder, or None without one."""
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None

    def write(self, name: str, content: Any) -> None:
        """Replaces a JSON file of the folder in one step and syncs it to the disk."""
        write_json(self.path / name, content)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file so that a reader or a crash never sees a part of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
