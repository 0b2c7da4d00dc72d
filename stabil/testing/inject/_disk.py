"""A disk that is full or gone."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from types import TracebackType

from stabil.testing.inject._fault import Fault, due


class Disk:
    """Takes the disk below a folder away, and gives it back.

    `full` lets no file of this whole process grow beyond `size` bytes (0 if None), by
    the operating system's own limit, so that writes fail in C++ libraries too, with
    "file too large"; files that another process writes are spared. `gone` moves the
    folder aside and puts an empty file in its place, so that every path below it fails;
    a file that is open already can still be written. Unix only.

    Use as a context, and call `at` between steps; leaving gives the disk back.

    Args:
      schedule: the planted faults; those of places other than `disk` are ignored.
      folder: the folder; must exist when a `gone` strikes.

    Examples:
      >>> import tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> fault = Fault(kind="gone", place="disk", step=3, duration=2)
      >>> with Disk((fault,), folder) as disk:
      ...     for step in range(6):
      ...         disk.at(step)
      ...         print(step, folder.is_dir())
      0 True
      1 True
      2 True
      3 False
      4 False
      5 True
    """

    def __init__(self, schedule: Sequence[Fault], folder: str | os.PathLike[str]):
        self._schedule = tuple(schedule)
        self._folder = pathlib.Path(folder)
        self._aside = self._folder.with_name(self._folder.name + ".gone")
        self._limit: tuple[int, int] | None = None  # before it was lowered

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._set(())

    def at(self, step: int) -> None:
        """Makes the disk what it is to be at `step`, a Python integer."""
        self._set(due(self._schedule, step, "disk"))

    def _set(self, faults: Sequence[Fault]) -> None:
        by_kind = {fault.kind: fault for fault in faults}
        self._set_full(by_kind.get("full"))
        self._set_gone("gone" in by_kind)

    def _set_full(self, fault: Fault | None) -> None:
        import resource  # of Unix alone

        if fault is not None and self._limit is None:
            self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            lowered = (int(fault.size or 0), self._limit[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, lowered)
        elif fault is None and self._limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
            self._limit = None

    def _set_gone(self, wanted: bool) -> None:
        if wanted and not self._aside.exists():
            self._folder.rename(self._aside)
            self._folder.touch()
        elif not wanted and self._aside.exists():
            self._folder.unlink()
            self._aside.rename(self._folder)
