"""One save in the background: bytes, digests, manifest, tag, then what must go."""

from __future__ import annotations

import pathlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax

from stabil.checkpoints import (
    _files,
    _holding,
    _leaves,
    _manifest,
    _points,
    _position,
    _processes,
    _store,
)
from stabil.checkpoints._digest import Digest
from stabil.checkpoints._folder import MANIFEST, Folder

# How long the first process waits for the digests of another one.
PART_SECONDS = 120


class Job:
    """A save in flight.

    Args:
      folder: where the step goes.
      step: its number; no folder of that name may exist.
      state: any pytree; may be donated as soon as this returns.
      extra: JSON-able.
      position: of the data on this process, or None.
      metric: kept with the step, or None.
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
        position: Any,
        metric: float | None,
        config: dict[str, Any],
        compress: bool,
        then: Callable[[int], None],
    ):
        self.step = step
        self.error: BaseException | None = None
        self._folder, self._then = folder, then
        self._extra, self._metric, self._config = extra, metric, config
        self._positions = _position.as_saved(position)
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
        self._digests = _holding.hold(values)
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
            if _processes.is_first():
                self._write_manifest(self._with_other_parts(digests))
            else:
                self._write_part(digests)
                return
            _points.reached("manifest_written")
            self._then(self.step)
            _points.reached("retention_done")
        except BaseException as error:
            self.error = error

    def _part(self, process: int) -> pathlib.Path:
        return self._folder.path(self.step) / f"stabil-part-{process}.json"

    def _write_part(self, digests: list[Digest]) -> None:
        part = {
            "save": self.step,
            "digests": [list(d) for d in digests],
            "positions": self._positions,
        }
        _files.write_sealed(self._part(jax.process_index()), part)

    def _with_other_parts(self, digests: list[Digest]) -> list[Digest]:
        """Adds what the other processes hold; files, because threads may not talk."""
        give_up = time.monotonic() + PART_SECONDS
        for process in range(1, jax.process_count()):
            path = self._part(process)
            while not path.exists():
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"process {process} did not finish its part of step "
                        f"{self.step} in {PART_SECONDS} seconds"
                    )
                time.sleep(0.01)
            part = _files.read_sealed(path)
            self._positions |= part["positions"]
            pairs = zip(digests, part["digests"], strict=True)
            digests = [a + Digest(*b) for a, b in pairs]
        return digests

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
            "metric": self._metric,
            "positions": self._positions,
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
