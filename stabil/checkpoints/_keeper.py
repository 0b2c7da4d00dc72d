"""Health-tagged checkpoints of one run.

Longer than a module should be, because it is one class that is its own manual: what it
does is done in `_saver`, `_judge` and `_way_back`.
"""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

from stabil.checkpoints import _arguments, _position, _processes, _rollback
from stabil.checkpoints._cadence import Cadence
from stabil.checkpoints._comparison import Comparison
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._judge import Judge
from stabil.checkpoints._memory import Ring
from stabil.checkpoints._mirror import Mirror
from stabil.checkpoints._remote import Remote
from stabil.checkpoints._restoring import Restored
from stabil.checkpoints._retention import KeepAlso
from stabil.checkpoints._saver import Saver
from stabil.checkpoints._signals import SignalWatch
from stabil.checkpoints._verdict import Verdict
from stabil.checkpoints._way_back import WayBack


class Keeper:
    """Saves, judges and restores the states of one run.

    Every step on disk is an ordinary Orbax checkpoint with a manifest of digests and a
    tag beside it. A step is `pending` until `mark` judges it; only healthy steps are
    chosen by `restore` and `rollback`, and the newest healthy step is never deleted.
    Saving runs in the background; what goes wrong there is raised by the next call.

    With several processes every method is a collective: all processes call it, in the
    same order. The first one decides and changes the folder, which all must see; a
    failure on one is a failure on all. One that dies in a save leaves the others to
    JAX's own heartbeat, and to a `SaveFailedError` after two minutes.

    Args:
      directory: folder of this run's checkpoints, made if it is missing; a folder that
        holds anything else is refused and left alone.
      keep_last: healthy steps to keep on disk; >= 1. Steps that are not judged yet and
        the two newest of any tag stay as well.
      keep_also: steps to keep beside those: the best, one every so often, milestones.
      save_every: steps between saves; >= 1.
      save_every_minutes: minutes between saves, whichever comes first; None for none.
      keep_in_memory: snapshots to keep in host memory; >= 0.
      snapshot_every: steps between snapshots that `save` takes by itself, beside what
        it saves to disk; None takes none. Each copies the state to host memory while
        the loop waits.
      keep_quarantined: steps to keep of those that rollbacks set aside; >= 0.
      remote: URL of a second level that outlives this machine, for example
        `gs://bucket/run`: any that fsspec knows, given the package of its protocol. The
        newest healthy steps are brought there in the background, and the newest one is
        fetched when the disk has none as new.
      keep_remote: healthy steps to have there; >= 1.
      compress: compress arrays with zstd: about a tenth smaller, two to three times
        slower to save on few cores.
      config: JSON-able and kept with every step, for example the hyperparameters and
        the commit of the code; what differs at a restore is told in its notes, as are
        versions of libraries.
    Attributes:
      directory: the folder, absolute.
      save_every: as given.
    Raises:
      NotARunFolderError: the folder is something else.
      ValueError: an argument is out of range.

    Examples:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> state = {"w": jnp.arange(3.0), "step": jnp.int32(7)}
      >>> with Keeper(tempfile.mkdtemp()) as keeper:
      ...     _ = keeper.save(7, state)
      ...     keeper.wait()
      ...     _ = keeper.mark(7, "healthy", "loss is flat")
      ...     print(keeper.steps(), keeper.restore(jax.eval_shape(lambda: state)).step)
      {7: 'healthy'} 7
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 5,
        keep_also: KeepAlso | None = None,
        save_every: int = 500,
        save_every_minutes: float | None = 15,
        keep_in_memory: int = 2,
        snapshot_every: int | None = None,
        keep_quarantined: int = 5,
        remote: str | None = None,
        keep_remote: int = 2,
        compress: bool = False,
        config: dict[str, Any] | None = None,
    ):
        _arguments.require_at_least(
            1, keep_last=keep_last, save_every=save_every, keep_remote=keep_remote
        )
        _arguments.require_at_least(
            0, keep_in_memory=keep_in_memory, keep_quarantined=keep_quarantined
        )
        _arguments.require_minutes(
            "save_every_minutes", save_every_minutes, "None to count steps alone"
        )
        if snapshot_every is not None:
            _arguments.require_at_least(
                1, snapshot_every=snapshot_every, keep_in_memory=keep_in_memory
            )
        config = _arguments.as_json(config, "config")
        _processes.decide(lambda: _open(directory))
        self._folder = Folder(directory)
        first = remote is not None and _processes.is_first()
        far = Remote(remote) if first and remote is not None else None
        self._mirror = Mirror(self._folder, far, keep_remote)
        self._remote = remote
        _processes.decide(self._mirror.pull_newer)
        self.directory, self.save_every = self._folder.root, save_every
        self._saver = Saver(
            self._folder,
            keep_last=keep_last,
            keep_also=keep_also,
            keep_quarantined=keep_quarantined,
            compress=compress,
            config=config,
            judged=self._mirror.push,
        )
        milestones = keep_also.milestones if keep_also is not None else ()
        self._cadence = Cadence(save_every, save_every_minutes, milestones)
        self._comparison = Comparison()
        self._ring, self._snapshot_every = Ring(keep_in_memory), snapshot_every
        levels = self._folder, self._ring, self._saver, self._mirror
        self._judge = Judge(*levels)
        self._way_back = WayBack(*levels, self._judge, self._cadence, config)
        self._signals = SignalWatch()
        self._saved_on_signal = False

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.close()
        else:
            # The error that ends the block is the one to see.
            self._signals.stop()
            self._saver.settle()

    # --- saving ----------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: dict[str, Any] | None = None,
        data: Any = None,
        metric: float | None = None,
        force: bool = False,
    ) -> bool:
        """Saves in the background if a save is due; call it every step.

        With `snapshot_every` a copy in host memory counts as a save too. The first call
        of a run saves. A due save waits for the one before it, and the one that a
        signal asks for, see `watch_signals`, for itself.

        Args:
          step: number of the state, >= 0 and rising; the number to restore.
          state: any pytree of arrays, PRNG keys, numbers and text. The next train step
            may donate it.
          extra: JSON-able, for example the position in the data.
          data: an iterator with `get_state` and `set_state`, such as Grain's; where it
            stands is kept with the step, for each process.
          metric: number by which `KeepAlso` ranks the step, for example a validation
            loss. A step whose metric is NaN or infinite becomes suspect.
          force: save whether due or not.
        Returns:
          Whether a save was begun, or a snapshot taken: there is a new step to judge.
        Raises:
          SaveFailedError: the save before this one failed, or this one could not begin;
            training may go on.
          ValueError: the step does not lie after the last one, or the folder holds
            steps and none was restored.
          TypeError: the state, `extra` or the position of `data` cannot be saved.
        """
        step = _arguments.whole_number(step)
        self._saver.wait(only_if_done=True)
        copied = self._is_snapshot_due(step)
        if copied:
            self.snapshot(step, state, extra=extra, data=data)
        if not force and not self._is_save_due(step):
            return copied
        extra = _arguments.as_json(extra)
        if self._remote is not None:
            _processes.decide(self._mirror.look)
        position = _position.taken(data)
        self._saver.begin(step, state, extra, position, _arguments.as_metric(metric))
        self._cadence.saved(step)
        self._comparison.saved()
        if _processes.anywhere(self._asked()):
            self._saved_on_signal = True
            if _processes.is_first():
                self._folder.log("emergency", step=step, cause=self.interrupted)
            self.wait()
        return True

    def due(self, step: int) -> bool:
        """Whether `save` would save at this step.

        Several processes compare clocks and signals about every five seconds.
        """
        step = _arguments.whole_number(step)
        return self._is_snapshot_due(step) or self._is_save_due(step)

    def _is_snapshot_due(self, step: int) -> bool:
        if self._snapshot_every is None:
            return False
        newest = self._ring.newest
        every = self._snapshot_every
        return newest is None or step // every > newest // every

    def _is_save_due(self, step: int) -> bool:
        if _processes.alone():
            return self._asked() or self._cadence.due(step)
        if self._cadence.due_by_steps(step):
            return True
        late = self._cadence.due(step)
        return self._comparison.anywhere(step, self._asked(), late)

    def _asked(self) -> bool:
        return self.interrupted is not None and not self._saved_on_signal

    @property
    def interrupted(self) -> str | None:
        """Name of the signal that asked for the end, or None; leave the loop on it."""
        return self._signals.seen

    def watch_signals(self, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        """Makes a signal ask for one more save instead of ending the process.

        The next `save` then saves whatever its step and returns when the bytes are on
        the disk; `interrupted` tells the loop to end. The same signal again does what
        it did before. `close` puts the old handlers back. Several processes hear of it
        when they compare, see `due`.

        Args:
          signals: numbers, by default the SIGTERM that clusters send before they take
            a machine away.
        Raises:
          RuntimeError: not called in the main thread.
        Examples:
          >>> import tempfile, jax.numpy as jnp
          >>> with Keeper(tempfile.mkdtemp()) as keeper:
          ...     keeper.watch_signals()
          ...     for step in range(100):
          ...         state = {"w": jnp.ones(3)}
          ...         if step == 7:
          ...             signal.raise_signal(signal.SIGTERM)
          ...         _ = keeper.save(step, state)
          ...         if keeper.interrupted:
          ...             break
          >>> keeper.interrupted, keeper.steps()
          ('SIGTERM', {0: 'pending', 7: 'pending'})
        """
        self._signals.start(signals)

    def snapshot(
        self,
        step: int,
        state: Any,
        *,
        extra: dict[str, Any] | None = None,
        data: Any = None,
    ) -> None:
        """Copies a state to host memory, the first level that a rollback looks at.

        The copies are the keeper's own: the next step may donate the state.

        Args:
          step: number of the state, >= 0.
          state: as for `save`.
          extra: as for `save`.
          data: as for `save`.
        """
        position = _position.as_saved(_position.taken(data))
        self._ring.take(
            _arguments.whole_number(step), state, _arguments.as_json(extra), position
        )

    def wait(self) -> None:
        """Waits for the save in flight, and for what goes to the remote level.

        Raises:
          SaveFailedError: one of them failed.
        """
        self._saver.wait()
        if self._remote is not None:
            _processes.decide(self._mirror.wait)

    def close(self) -> None:
        """Waits for the save in flight; a script must not end before this.

        Raises:
          SaveFailedError: it failed.
        """
        self._signals.stop()
        self.wait()

    # --- judging ---------------------------------------------------------------------

    def mark(
        self,
        step: int,
        tag: str,
        cause: str = "",
        *,
        by: str = "caller",
        metric: float | None = None,
    ) -> str:
        """Judges a step, on disk and in memory.

        A state with a NaN or an infinity in a float leaf is not made healthy: it
        becomes suspect, and the leaf is the cause. A step whose save is in flight is
        judged when it lands.

        Args:
          step: a step of `steps()`, of a snapshot, or in flight.
          tag: `healthy` or `suspect`.
          cause: why, for people.
          by: who decided.
          metric: as for `save`, where it is known only now.
        Returns:
          The tag that the step has now; `pending` while its save is in flight.
        Raises:
          ValueError: there is no such step or tag.
          SaveFailedError: the tag cannot be written; it is what it was.
        """
        metric = _arguments.as_metric(metric)
        return self._judge.mark(step, Verdict(tag, cause, by, metric))

    def tag(self, step: int) -> str:
        """The tag of a step: `pending`, `healthy`, `suspect` or `quarantined`.

        Raises:
          ValueError: there is no such step.
        """
        return self._judge.tag(step)

    def steps(self) -> dict[int, str]:
        """The tag of every step on disk, ascending; without the quarantined ones."""
        return self._judge.steps()

    def newest_healthy(self, before: int | None = None) -> int | None:
        """The newest healthy step on disk or in memory, below `before` if given."""
        return self._judge.newest_healthy(before)

    # --- going back ------------------------------------------------------------------

    def restore(
        self, abstract_state: Any, step: int | None = None, *, data: Any = None
    ) -> Restored:
        """The newest healthy state, checked against its digests.

        Damage is not an end: the step becomes suspect and the next older healthy one is
        taken, which `notes` says. Other leaves, shapes or dtypes are refused, never
        cast. The next save sets aside any step that is newer than the restored one.

        Args:
          abstract_state: structure, dtypes and shardings to restore into, for example
            `jax.eval_shape(make_state)`; a real state does as well. A leaf without a
            sharding goes to the first device.
          step: a certain step, whatever its tag; then nothing else is tried.
          data: an iterator to set to where it stood at that step; left as it is by
            default.
        Raises:
          NoHealthyStepError: nothing to choose from.
          DamagedError: the step, or every healthy one, is damaged.
          StructureError: the leaves differ.
          UnreadableError: a step is whole and was not read, for example for want of
            memory; no tag was changed.
          ValueError: there is no such step, or no position for `data` in it.
        """
        return self._way_back.restore(abstract_state, step, data)

    def rollback(
        self,
        abstract_state: Any,
        before: int,
        reason: str = "",
        *,
        extra: dict[str, Any] | None = None,
        data: Any = None,
    ) -> Restored:
        """Goes back to the newest healthy step below `before`.

        Everything newer is quarantined first, so that a restart cannot choose it and
        the next save works. A kill at any moment leaves a rollback that the next Keeper
        ends. May be repeated with an older `before`.

        Args:
          abstract_state: as for `restore`.
          before: steps from here on are not gone back to.
          reason: why, for people.
          extra: JSON-able and kept with the rollback, see `rollbacks`; for example the
            data to skip, which then survives a kill.
          data: as for `restore`; the batches to leave out are the caller's to draw.
        Raises:
          NoHealthyStepError: no healthy step lies before.
          DamagedError: all that do are damaged.
          StructureError: the leaves differ.
          UnreadableError: as for `restore`; restore again.
          SaveFailedError: the disk cannot be written; nothing was changed.
        """
        extra = _arguments.as_json(extra)
        intent = {"before": before, "reason": reason, "extra": extra}
        return self._way_back.rollback(abstract_state, intent, data)

    def adopt(
        self,
        path: str | os.PathLike[str],
        state: Any,
        *,
        may_start_fresh: Sequence[str] = ("*opt_state*",),
        step: int | None = None,
    ) -> Restored:
        """Goes on from a checkpoint of another structure, or from before stabil.

        Leaves are matched by name and by what stands around them, so that a guard put
        around the optimizer, or a member more in a chain, carries every moment over.
        `Restored.notes` names each leaf that started fresh, moved, or was left behind.
        The old checkpoint is only read; saves go to this keeper's folder.

        Args:
          path: a run of Orbax checkpoints (its newest step), or one step.
          state: the new state, initialised; leaves without a counterpart stay as they
            are in it.
          may_start_fresh: patterns of slash paths that need no counterpart; `*` stands
            for anything. A leaf outside of them is refused.
          step: number of the state where the path names none.
        Raises:
          FileNotFoundError: no checkpoint is there.
          StructureError: a leaf has no counterpart and may not start fresh.
          DamagedError, UnreadableError: the checkpoint cannot be read.
          ValueError: this keeper's folder holds steps, or the step is unknown.
        """
        place = pathlib.Path(path).absolute()
        return self._way_back.adopt(place, state, may_start_fresh, step)

    def rollbacks(self) -> list[dict[str, Any]]:
        """Every rollback of this run, oldest first: target, before, reason, extra."""
        return _processes.decide(lambda: _rollback.records(self._folder))


def _open(directory: str | os.PathLike[str]) -> None:
    """Makes the folder ours, and ends a rollback that a kill cut short."""
    _rollback.finish(Folder(directory, create=True))
