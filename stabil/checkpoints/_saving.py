"""One save in the background: bytes, digests, manifest, tag, then what must go."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from stabil.checkpoints import _files, _leaves, _manifest, _points, _store
from stabil.checkpoints._folder import MANIFEST, Folder


class Job:
    """A save in flight.

    Args:
      folder: where the step goes.
      step: its number; no folder of that name may exist.
      state: any pytree; may be donated as soon as this returns.
      extra: JSON-able.
      config: JSON-able.
      compress: whether Orbax compresses arrays.
      then: called in the background with the step's number once it is whole.

    Attributes:
      step: the step's number.
      error: what went wrong, after the end.
    """

    def __init__(
        self,
        folder: Folder,
        step: int,
        state: Any,
        *,
        extra: dict[str, Any],
        config: dict[str, Any],
        compress: bool,
        then: Callable[[int], None],
    ):
        self.step = step
        self.error: BaseException | None = None
        self._folder, self._then = folder, then
        self._extra, self._config = extra, config
        self._leaves, values, treedef = _leaves.flatten(state)
        values = [
            _leaves.to_disk(x, v) for x, v in zip(self._leaves, values, strict=True)
        ]
        self._python = [
            _manifest.python_value(x, v)
            for x, v in zip(self._leaves, values, strict=True)
        ]
        self._statistics = _leaves.statistics(state)
        self._save_id = uuid.uuid4().hex
        self._digests = _manifest.hold(values)
        self._wait = _store.save(
            folder.path(step),
            treedef.unflatten(values),
            compress=compress,
            save_id=self._save_id,
        )
        self._thread = threading.Thread(target=self._run, name=f"stabil-save-{step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            try:
                _points.reached("save_begun")
                digests = self._digests()
            finally:
                # Whatever went wrong, Orbax must not be left writing.
                self._wait()
            _points.reached("orbax_committed")
            self._write_manifest(digests)
            _points.reached("manifest_written")
            self._then(self.step)
            _points.reached("retention_done")
        except BaseException as error:
            self.error = error

    def _write_manifest(self, digests: list[Any]) -> None:
        path = self._folder.path(self.step)
        # Orbax flushes its data files, but not the small files that name them.
        for small in [*path.iterdir(), *(path / _store.STATE).iterdir()]:
            if small.is_file():
                _files.fsync_path(small)
        _files.fsync_path(self._folder.root)
        manifest = {
            "format": _manifest.FORMAT,
            "step": self.step,
            "save_id": self._save_id,
            "time": _files.utc_now(),
            "versions": _manifest.versions(),
            "config": self._config,
            "extra": self._extra,
            "files": _manifest.files(path),
            "leaves": _manifest.describe(
                self._leaves, self._python, digests, self._statistics
            ),
        }
        _files.write_sealed(path / MANIFEST, manifest)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the end; look at `error` afterwards."""
        self._thread.join()
