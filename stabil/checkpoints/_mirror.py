"""Brings healthy steps to the remote level in the background, and back."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Generator

from stabil.checkpoints._errors import DamagedError, SaveFailedError
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._remote import Remote


class Mirror:
    """The remote level of a run, or none.

    Only the first process has one. What goes wrong is told by `look` and `wait`, and
    tried again with the next verdict.

    Args:
      folder: of the run.
      remote: where to, or None.
      keep: healthy steps to have there.
    """

    def __init__(self, folder: Folder, remote: Remote | None, keep: int):
        self._folder, self._remote, self._keep = folder, remote, keep
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "stabil-remote")
        self._asked: list[concurrent.futures.Future[None]] = []

    def push(self) -> None:
        """Asks for the newest healthy steps and all tags to be brought there."""
        if self._remote is not None:
            job = self._pool.submit(self._remote.push, self._folder, self._keep)
            self._asked.append(job)

    def look(self) -> None:
        """Raises what has gone wrong.

        Raises:
          SaveFailedError: a copy did not succeed.
        """
        done = [job for job in self._asked if job.done()]
        self._asked = [job for job in self._asked if job not in done]
        # A later one has done what an earlier one could not.
        error = done[-1].exception() if done else None
        if error is not None and self._remote is not None:
            self._folder.log("remote_failed", cause=repr(error))
            raise SaveFailedError(
                f"the copy to {self._remote.url} failed: {type(error).__name__}: "
                f"{error}. What is in {self._folder.root} is whole: go on; the copy is "
                "tried again with the next verdict"
            ) from error

    def wait(self) -> None:
        """Waits for all that was asked, then looks.

        Raises:
          SaveFailedError: a copy did not succeed.
        """
        concurrent.futures.wait(self._asked)
        self.look()

    # --- the way back ----------------------------------------------------------------

    def tell_rollbacks(self) -> None:
        """Makes a rollback known there; if that fails, the next push does it."""
        if self._remote is not None:
            with self._in_vain("rollbacks"):
                self._remote.tell_rollbacks(self._folder)

    def healthy(self) -> list[int]:
        """Steps that are healthy there; none where that cannot be found out."""
        found: list[int] = []
        if self._remote is not None:
            with self._in_vain("list"):
                found = list(self._remote.healthy())
        return found

    def pull(self, step: int) -> str:
        """Puts the copy of a step on the disk, instead of the one that is there.

        Returns:
          A note; empty if there is no such copy or it cannot be had.
        """
        if self._remote is not None:
            with self._in_vain("pull"):
                copy = self._remote.healthy().get(step)
                if copy is not None:
                    self._remote.pull(self._folder, copy)
                    return f"step {step} was taken from {self._remote.url}"
        return ""

    def pull_newer(self) -> None:
        """Puts the newest whole copy on the disk if the disk has none as new.

        Raises:
          Exception: the place cannot be read; an older step is not taken without a
            word.
        """
        if self._remote is None:
            return
        self._remote.tell_rollbacks(self._folder)
        here = [s for s, tag in self._folder.tags().items() if tag == "healthy"]
        for step, copy in reversed(self._remote.healthy().items()):
            if step <= max(here, default=-1):
                return
            try:
                return self._remote.pull(self._folder, copy)
            except DamagedError as error:
                # A restore comes upon it again, and says so.
                self._folder.log("remote_failed", step=step, cause=str(error))

    @contextlib.contextmanager
    def _in_vain(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self._folder.log("remote_failed", what=what, cause=repr(error))
