"""Saves, tags, resumes and rolls back: a session's dealings with its keeper."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from stabil.policy import Action
from stabil.session._agree import from_first
from stabil.session._alike import Alike
from stabil.session._data import Data
from stabil.session._pace import Pace
from stabil.session._tags import HealthTags
from stabil.telemetry import RunFolder

_NOTES = "session.json"
_FIRST = "the state that the run began with"


class Return(NamedTuple):
    """Where a run goes on after a resume or a rollback.

    Attributes:
      state: the state, of the structure and placement of the first one.
      step: step that runs next.
      window: first and last position of the data left out; empty after a resume.
      policy: state of the ladder when the state was saved, or None.
    """

    state: Any
    step: int
    window: tuple[int, ...] = ()
    policy: dict[str, Any] | None = None


class Rescue:
    """Keeps one run's checkpoints, data position and policy state together.

    Checkpoint `n` holds the state after `n` steps: the one that step `n` starts from.
    Number 0 is the state that the run began with, and is healthy by definition.

    Args:
      keeper: a `stabil.checkpoints.Keeper`, or None for a run that cannot go back.
      policy: the ladder, whose state is saved along.
      folder: where the skip list is noted as soon as it changes; a checkpoint older
        than a rollback does not know it.
      pace: times the loads.
    """

    def __init__(self, keeper: Any, policy: Any, folder: RunFolder, pace: Pace):
        self.keeper, self._policy, self._folder = keeper, policy, folder
        self._pace = pace
        # None exactly when the keeper is.
        self.tags: Any = None
        if keeper is not None:
            self.tags = HealthTags(keeper, policy.healthy_after_steps)
        self._alike: Any = None  # `Alike` from `begin` on
        self._failures = self._failing_since = self._try_again_at = 0

    def begin(self, state: Any, data: Data) -> Return | None:
        """Saves the first state, or restores the newest healthy one of an older run."""
        if self.keeper is None:
            return None
        self._alike = Alike(state)
        self._pace.expect(state)
        notes = from_first(self._folder.read(_NOTES))
        newest = from_first(self._newest_healthy())
        if newest is None:
            self._save(0, state, data, force=True)
            self.keeper.mark(0, "healthy", _FIRST)
            return None
        with self._pace.loading():
            found = self._restore(newest)
        saved = (found.extra or {}).get("session")
        for first, last in (notes or {}).get("windows", ()):
            data.skip(first, last)
        if notes and notes["leaving"] is not None:
            # Killed in the middle of a rollback: it did not get to name its window.
            position = saved["data"]["position"] if saved else found.step
            data.skip(position, max(position, notes["leaving"]))
        # A checkpoint made without a session has no position: one batch a step.
        bare = {"position": found.step, "windows": []}
        data.set_state(self._own_data(found, saved["data"]) if saved else bare)
        known = [n["policy"] for n in (saved, notes) if n]
        if known:
            self._policy.set_state(max(known, key=lambda p: p["seen"]))
        return Return(self._alike(found.state), found.step)

    def _restore(self, newest: int) -> Any:
        if max(self.keeper.steps()) > newest:
            # What lies behind is not known to be healthy and would be in the way of
            # the next saves.
            return self.keeper.rollback(self._alike.template, newest + 1, "resumed")
        return self.keeper.restore(self._alike.template)

    def _own_data(self, found: Any, first: dict[str, Any]) -> dict[str, Any]:
        """Where the data stood on this process; `first` is that of the first one."""
        each = getattr(found, "positions", {}) or {"0": first}
        if len(each) == jax.process_count():
            return each[str(jax.process_index())]
        # Iterators of another share of the data: the position is reached by drawing.
        return {name: x for name, x in first.items() if name != "iterator"}

    def _newest_healthy(self) -> int | None:
        """The newest healthy step, or None when the keeper holds no step at all."""
        steps = self.keeper.steps()
        if steps and self.keeper.newest_healthy() is None and 0 in steps:
            # Killed before the tag of the first state was on the disk.
            self.keeper.mark(0, "healthy", _FIRST)
        newest = self.keeper.newest_healthy()
        if steps and newest is None:
            tags = ", ".join(f"{step} {tag}" for step, tag in steps.items())
            raise LookupError(
                f"needed a healthy checkpoint to resume from, got {tags}; judge one "
                "with `stabil checkpoints mark RUN STEP healthy`, or begin a new run "
                "in another folder"
            )
        return newest

    def is_due(self, step: int) -> bool:
        """Whether the keeper says that it would save now; False if it cannot say."""
        ask = getattr(self.keeper, "due", None)
        return bool(ask and ask(step))

    def save(self, step: int, state: Any, data: Data, force: bool = False) -> bool:
        """Offers the state to the keeper, which keeps its own cadence.

        After a save that failed, the next try comes 1, 2, 4, ... steps later, up to the
        keeper's cadence.

        Raises:
          Exception: what the keeper raised; see `gives_up`.
        """
        if self.keeper is None or (step < self._try_again_at and not force):
            return False
        try:
            taken = self._save(step, state, data, force)
        except Exception:
            self._failing_since = self._failing_since or step
            self._try_again_at = step + min(2**self._failures, self._cadence)
            self._failures += 1
            raise
        if taken:
            self._failures = self._failing_since = self._try_again_at = 0
            self.tags.saved(step, in_event=self._policy.event_open)
        return taken

    def save_evidence(self, step: int, state: Any, data: Data, cause: str) -> bool:
        """Saves the state of a run that is given up, and waits until it is there.

        It is suspect from the start: a person may look at it, and choose it, but a
        resume does not. False without a keeper.

        Raises:
          Exception: what the keeper raised.
        """
        if self.keeper is None:
            return False
        self._save(step, state, data, force=True)
        self.keeper.wait()
        self.keeper.mark(step, "suspect", cause)
        return True

    def gives_up(self, step: int) -> bool:
        """Whether saves have failed three times and for twice the keeper's cadence."""
        lasts = step - self._failing_since >= 2 * self._cadence
        return self._failures >= 3 and lasts

    @property
    def _cadence(self) -> int:
        return getattr(self.keeper, "save_every", None) or 1

    def price(self, question: dict[str, Any], next_step: int) -> dict[str, Any]:
        """What a rollback would cost, the same on all processes.

        Args:
          question: `event_step` and `before` of the rollback, and what else is told.
          next_step: step that would run next without it.

        Returns:
          The first process's question with `load_seconds`, `load_measured`,
          `redone_steps` and `step_seconds`.
        """
        target = self._target(question)
        return from_first(
            question
            | dict(
                load_seconds=self._pace.load_seconds,
                load_measured=self._pace.is_measured,
                redone_steps=next_step - (target or 0),
                step_seconds=self._pace.step_seconds,
            )
        )

    def _target(self, numbers: dict[str, Any]) -> int | None:
        target = self.keeper.newest_healthy(before=numbers["before"])
        if target is None:  # a relapse asks for an older one than there may be
            target = self.keeper.newest_healthy(before=numbers["event_step"] + 1)
        return target

    def settle(self) -> None:
        """Waits for the save in flight: early in a run no other step may be healthy.

        Raises:
          SaveFailedError: it failed.
        """
        self.keeper.wait()

    def roll_back(self, action: Action, data: Data, newest_index: int) -> Return:
        """Restores a healthy state from before the event and leaves its data out.

        Raises:
          LookupError: no checkpoint is healthy and old enough.
        """
        numbers = action.numbers
        # A tag that is still on its way to the disk may differ between processes.
        target = from_first(self._target(numbers))
        if target is None:
            raise LookupError(
                f"no healthy checkpoint from before step {numbers['event_step']}"
            )
        self.note(data, leaving=newest_index)
        with self._pace.loading():
            found = self.keeper.rollback(
                self._alike.template, target + 1, action.reason
            )
        saved = (found.extra or {}).get("session")
        first = int(saved["data"]["position"]) if saved else newest_index
        last = newest_index + numbers["skip_more"]
        data.skip(first, last)
        self.tags.rolled_back(found.step)
        policy = saved["policy"] if saved else None
        return Return(self._alike(found.state), found.step, (first, last), policy)

    def finish(self, healthy: bool) -> None:
        """Waits for the last save, and tags what the end of the run has proved."""
        if self.keeper is None:
            return
        self.keeper.wait()
        if healthy:
            self.tags.finish()

    def note(self, data: Data, leaving: int | None = None) -> None:
        """Puts skip list and policy state on the disk at once.

        Args:
          data: holds the skip list.
          leaving: last position of a window whose beginning a rollback is about to
            find out; None when there is no such window.
        """
        if jax.process_index() > 0:
            return
        content = {
            "windows": [list(w) for w in data.windows],
            "leaving": leaving,
            "policy": self._policy.get_state(),
        }
        self._folder.write(_NOTES, content)

    def _save(self, step: int, state: Any, data: Data, force: bool) -> bool:
        extra = {"data": data.get_state(), "policy": self._policy.get_state()}
        # What else is kept is the first process's; the data of each are its own.
        own = {"data": data} if jax.process_count() > 1 else {}
        return self.keeper.save(
            step, state, extra={"session": extra}, force=force, **own
        )
