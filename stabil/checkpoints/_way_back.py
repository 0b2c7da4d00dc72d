"""Going back to an earlier state, and on from it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from stabil.checkpoints import (
    _adopting,
    _manifest,
    _offline,
    _points,
    _position,
    _processes,
    _restoring,
    _rollback,
)
from stabil.checkpoints._cadence import Cadence
from stabil.checkpoints._errors import DamagedError
from stabil.checkpoints._folder import Folder
from stabil.checkpoints._judge import Judge
from stabil.checkpoints._memory import Ring
from stabil.checkpoints._mirror import Mirror
from stabil.checkpoints._restoring import Restored
from stabil.checkpoints._saver import Saver


class WayBack:
    """Restores, rolls back and adopts; see the methods of `Keeper` with these names."""

    def __init__(
        self,
        folder: Folder,
        ring: Ring,
        saver: Saver,
        mirror: Mirror,
        judge: Judge,
        cadence: Cadence,
        config: dict[str, Any],
    ):
        self._folder, self._ring = folder, ring
        self._saver, self._mirror = saver, mirror
        self._judge, self._cadence, self._config = judge, cadence, config

    def restore(self, abstract_state: Any, step: int | None, data: Any) -> Restored:
        """See `Keeper.restore`."""
        notes = self._saver.settle()
        with self._saver.lock:
            if step is None:
                restored = _restoring.newest(
                    self._folder, self._ring, self._mirror, abstract_state
                )
            elif step not in self._judge.steps():
                raise ValueError(_offline.no_such_step(self._folder, step))
            else:
                restored = _restoring.from_disk(self._folder, step, abstract_state)
            return self._stand_on(restored, notes, data)

    def rollback(
        self, abstract_state: Any, intent: dict[str, Any], data: Any
    ) -> Restored:
        """See `Keeper.rollback`; the intent lacks its target."""
        notes: list[str] = []
        limit = intent["before"]
        while True:
            target = self._judge.newest_healthy(limit)
            if target is None:
                raise _restoring.none_left(self._folder, intent["before"], notes)
            _restoring.compare(self._folder, self._ring, target, abstract_state)
            whole = {**intent, "target": target}
            _processes.decide(lambda whole=whole: self._begin(whole))
            notes += self._set_aside(target)
            try:
                with self._saver.lock:
                    restored = _restoring.at(
                        self._folder, self._ring, self._mirror, target, abstract_state
                    )
                    return self._stand_on(restored, notes, data)
            except DamagedError as error:
                notes.append(f"step {target} was passed over: {error}")
                limit = target

    def _begin(self, intent: dict[str, Any]) -> None:
        try:
            _rollback.begin(self._folder, **intent)
        except OSError as error:
            raise self._saver.not_written("intent to go back", error) from error

    def _set_aside(self, target: int) -> list[str]:
        """Ends the rollback that has begun; what the save in flight had to say."""
        try:
            notes = self._saver.settle()
            _points.reached("save_settled")
        finally:
            with self._saver.lock:
                _processes.decide(lambda: _rollback.finish(self._folder))
                self._ring.drop_after(target)
                _processes.decide(self._mirror.tell_rollbacks)
        return notes

    def adopt(
        self,
        place: pathlib.Path,
        state: Any,
        may_start_fresh: Sequence[str],
        step: int | None,
    ) -> Restored:
        """See `Keeper.adopt`."""
        there = self._judge.steps()
        if there:
            raise ValueError(
                "needed a keeper without steps to adopt into, got "
                f"{self._folder.root} with {len(there)}: name a new folder in "
                "Keeper(...)"
            )
        if not place.is_dir():
            raise FileNotFoundError(f"needed a folder to adopt, got {place}")
        found = _adopting.adopt(place, state, may_start_fresh, step)
        if _processes.is_first():
            self._folder.log("adopted", path=str(place), notes=list(found.notes))
        self._saver.base = found.step
        self._cadence.saved(found.step)
        return found

    def _stand_on(self, restored: Restored, notes: list[str], data: Any) -> Restored:
        self._saver.base = restored.step
        self._cadence.saved(restored.step)
        _position.put_back(data, restored.positions, restored.step)
        if restored.source == "disk":
            manifest = self._folder.manifest(restored.step)
            notes = [*notes, *_manifest.differences(manifest, self._config)]
        return _restoring.with_notes(restored, notes)
