"""The background of a Keeper: one save in flight, and what follows when it lands."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

from stabil.checkpoints import _files, _manifest, _processes, _retention, _rollback
from stabil.checkpoints._errors import DamagedError, SaveFailedError
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._retention import KeepAlso, Known
from stabil.checkpoints._saving import Job
from stabil.checkpoints._verdict import Verdict


class Saver:
    """Begins saves, surfaces their failures, and keeps the folder within its limits.

    Args:
      folder: of the run.
      keep_last: healthy steps to keep.
      keep_also: what else to keep.
      keep_quarantined: quarantined steps to keep.
      compress: compress arrays.
      config: kept with every step.
      judged: called when a step that has landed was given its verdict.

    Attributes:
      lock: held by whoever changes tags or the list of steps; the background does too.
      base: the step that the run stands on; None before its first save or restore.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        keep_last: int,
        keep_also: KeepAlso | None,
        keep_quarantined: int,
        compress: bool,
        config: dict[str, Any],
        judged: Callable[[], None],
    ):
        self.lock = threading.RLock()
        self.base: int | None = None
        self._folder = folder
        self._keep_last, self._keep_also = keep_last, keep_also
        self._keep_quarantined = keep_quarantined
        self._compress, self._config, self._judged = compress, config, judged
        self._job: Job | None = None
        self._before_job: int | None = None
        self._marks: list[Verdict] = []
        self._swept = False

    def begin(
        self,
        step: int,
        state: Any,
        extra: dict[str, Any],
        position: Any = None,
        metric: float | None = None,
    ) -> None:
        """Begins to save; waits for the save before it.

        Raises:
          SaveFailedError: that one failed, or this one could not begin.
          ValueError: the step does not lie after the one the run stands on.
          TypeError: the state cannot be saved.
        """
        self.wait()
        with self.lock:
            _processes.decide(lambda: self._make_room(step))
            before, self.base = self.base, step
            try:
                self._job = Job(
                    self._folder,
                    step,
                    state,
                    extra=extra,
                    position=position,
                    metric=metric,
                    config=self._config,
                    compress=self._compress,
                    then=self._landed,
                )
            except BaseException as error:
                self.base = before
                if isinstance(error, OSError):
                    raise self._failure(step, error) from error
                raise
            self._before_job = before

    def in_flight(self, step: int) -> bool:
        """Whether the save of this step has begun and not ended."""
        return self._job is not None and self._job.step == step and not self._job.done

    def judge_on_landing(self, verdict: Verdict) -> None:
        """Keeps a judgement of the step in flight until it lands."""
        self._marks.append(verdict)

    def wait(self, *, only_if_done: bool = False) -> None:
        """Waits for the save in flight, or only looks whether it has ended.

        Raises:
          SaveFailedError: it failed.
        """
        job = self._job
        if job is None:
            return
        # Processes end at different times; they look together, when they wait.
        if only_if_done and not (_processes.alone() and job.done):
            return
        job.wait()
        self._job = None
        if _processes.anywhere(job.error is not None) and job.error is None:
            job.error = RuntimeError("another process could not save its part")
        if job.error is not None:
            self._marks.clear()
            self._free_space()
            if job.step in self._folder.steps():
                raise SaveFailedError(
                    f"step {job.step} was saved, but what follows a save failed: "
                    f"{type(job.error).__name__}: {job.error}. Steps that should be "
                    f"deleted may still be in {self._folder.root}"
                ) from job.error
            self.base = self._before_job
            if _processes.is_first():
                self._folder.log("save_failed", step=job.step, cause=repr(job.error))
            raise self._failure(job.step, job.error) from job.error

    def _free_space(self) -> None:
        """Removes what a failed save left: a full disk would stay full of it."""
        if _processes.is_first():
            with self.lock, contextlib.suppress(OSError):
                self._folder.sweep()

    def settle(self) -> list[str]:
        """Waits; a failure comes back as a note."""
        try:
            self.wait()
        except SaveFailedError as error:
            return [str(error)]
        return []

    def _failure(self, step: int, error: BaseException) -> SaveFailedError:
        tags = self._folder.tags()
        healthy = max((s for s, t in tags.items() if t == "healthy"), default=None)
        return SaveFailedError(
            f"the save of step {step} failed: {type(error).__name__}: {error}. Nothing "
            f"older was touched and the newest healthy step is {healthy}: look at the "
            f"space and the permissions of {self._folder.root}, then go on; the next "
            "save that is due is tried as usual"
        )

    def not_written(self, what: str, error: OSError) -> SaveFailedError:
        """The error for a small file that the disk did not take."""
        return SaveFailedError(
            f"the {what} was not written: {type(error).__name__}: {error}. Nothing was "
            f"changed: look at the space and the permissions of {self._folder.root}, "
            "then ask again"
        )

    def _make_room(self, step: int) -> None:
        """Sets aside what an abandoned branch left, so that its numbers are free."""
        if not self._folder.present():
            raise self._failure(step, FileNotFoundError("the run's folder is gone"))
        there = self._folder.steps()
        if self.base is None and there:
            raise ValueError(
                f"needed an empty run folder or a restored state, got steps up to "
                f"{there[-1]} in {self._folder.root} and no restore: call "
                "keeper.restore first, or name a new folder to start from scratch"
            )
        if self.base is not None and step <= self.base:
            raise ValueError(
                f"needed a step after {self.base}, where this run stands, got {step}: "
                "keeper.rollback goes back and frees the numbers"
            )
        if self.base is not None and there and there[-1] > self.base:
            reason = f"saving went on from step {self.base}"
            _rollback.begin(
                self._folder, target=self.base, before=self.base + 1, reason=reason
            )
            _rollback.finish(self._folder)
        if not self._swept:
            self._folder.sweep()
            self._swept = True
        try:
            # Orbax's threads would wait minutes for a folder that cannot be made.
            _files.try_to_write(self._folder.root)
        except OSError as error:
            raise self._failure(step, error) from error

    def _landed(self, step: int) -> None:
        """Runs in the background when a step is whole on disk."""
        with self.lock:
            self._folder.log("save", step=step)
            manifest = self._folder.manifest(step)
            bad = _manifest.nonfinite(manifest)
            if bad:
                cause = f"not finite when saved: {', '.join(bad)}"
                self._folder.tag(step, "suspect", cause, "stabil")
            marks, self._marks = self._marks, []
            for mark in marks:
                self._folder.tag(step, *mark)
            if marks:
                self._judged()
            # A rollback that has begun still needs its target.
            if _rollback.pending(self._folder) is not None:
                return
            known = self._known()
            kept = _retention.kept(
                known, keep_last=self._keep_last, keep_also=self._keep_also
            )
            for old in sorted(set(known) - kept):
                reason = f"{known[old].tag}, not among the steps to keep"
                self._folder.delete(self._folder.path(old), reason)
            _rollback.trim_quarantine(self._folder, self._keep_quarantined)

    def _known(self) -> dict[int, Known]:
        """What retention knows of every step; metric and time only if a rule asks."""
        found = {}
        for step in self._folder.steps():
            health, manifest = self._folder.health(step), {}
            if self._keep_also is not None:
                with contextlib.suppress(DamagedError):
                    manifest = self._folder.manifest(step)
            metric = health.get("metric", manifest.get("metric"))
            found[step] = Known(
                health["tag"],
                math.nan if metric is None else metric,
                _files.seconds(manifest.get("time", "")),
            )
        return found
