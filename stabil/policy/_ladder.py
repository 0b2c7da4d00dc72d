"""Decides, step by step, what is due: from a line in the log to the end of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stabil.policy._choice import Choice, Price
from stabil.policy._groups import WHOLE, Groups
from stabil.policy._interventions import Interventions
from stabil.policy._level import NORMAL, LossLevel
from stabil.policy._new_data import NewData
from stabil.policy._rate import Rate
from stabil.policy._recorded import recorded
from stabil.policy._rungs import FULL, Rung, check_rungs
from stabil.policy._shadow import as_shadow, check_shadows
from stabil.policy._track import Track
from stabil.policy._words import OK, Action, Observation


class Ladder:
    """Turns one observation a step into actions, gentle ones first.

    What the device did (clip, skip, restart of moments) is reported, and every other
    verdict above OK logged. Beyond that the strongest rung that is due, has budget left
    and is not cooling down acts; a rollback without budget, or at a place that has
    relapsed `max_relapses` times, becomes a stop with advice. Data on which a restored
    state has a far higher loss at once are left out the first time; where the data
    beyond them are the same, their loss becomes the level. A rollback after a slow rise
    of the loss, or at a place that had one before, lowers the learning rate. Where only
    the loss calls for a rollback, its cost is weighed against the chance that the loss
    comes back, see `least_saving_seconds`. Plain arithmetic on what it is told, with no
    clock and no chance: processes that read the same observations and costs decide the
    same.

    Args:
      rungs: interventions, gentle ones first.
      report_only: True writes all interventions down and does none.
      quiet_steps: steps without a warning or a high loss that end an event.
      healthy_after_steps: later steps without a warning after which a checkpoint
        counts as healthy.
      same_place_steps: rollbacks for events that begin within so many steps of each
        other, and share a cause or a layer, are relapses at one place, unless the run
        has got past it by `quiet_steps` good steps meanwhile.
      max_relapses: rollbacks at one place, after which the next stops the run.
      lowest_scale: bound that repeated cuts of the learning rate do not cross.
      least_saving_seconds: what waiting for the loss must be likely to save before it
        is preferred to a rollback. A minute by default, so that small runs, whose
        rollbacks are cheap, always take the sure state; `math.inf` never waits.
      longest_wait_steps: steps of one event that may be waited in all.
      groups: name of a part of the model to patterns for its signals, for example
        `{"embeddings": ("*embed*", "*wte*"), "experts": "*expert*"}`. Each part has
        events, budgets and relapses of its own, and is named in its actions and in
        advice; `""` is the rest.
      shadow: name to another ladder, which sees what this one sees; what it would have
        done is written down and never done. Ladders handed over are changed for that.

    Attributes:
      learning_rate_scale: what the next step's update is to be multiplied by.
      probe_level: 1 while probes are to read everything on every step, else 0.

    Raises:
      ValueError: a rung or number is out of range.
      TypeError: an entry of `rungs` is no `Rung`, one of `shadow` no `Ladder`, or
        `groups` holds no patterns.

    Examples:
      >>> ladder = Ladder()
      >>> ladder.decide(Observation(6, loss=2.0))
      ()
      >>> bad = Observation(7, severity=3, causes=("nonfinite_loss",), first="loss")
      >>> for step in (7, 8, 9):
      ...     actions = ladder.decide(bad._replace(step=step))
      >>> [a.kind for a in actions], actions[-1].numbers["event_step"]
      (['skip', 'rollback'], 7)
    """

    def __init__(
        self,
        rungs: Iterable[Rung] = FULL,
        *,
        report_only: bool = False,
        quiet_steps: int = 20,
        healthy_after_steps: int = 20,
        same_place_steps: int = 100,
        max_relapses: int = 3,
        lowest_scale: float = 0.1,
        least_saving_seconds: float = 60.0,
        longest_wait_steps: int = 400,
        groups: Mapping[str, str | Iterable[str]] | None = None,
        shadow: Mapping[str, Ladder] | None = None,
    ):
        rungs = tuple(rungs)
        check_rungs(rungs)
        whole = dict(
            quiet_steps=quiet_steps,
            healthy_after_steps=healthy_after_steps,
            max_relapses=max_relapses,
        )
        for name, value in whole.items():
            if value < 1:
                raise ValueError(f"Ladder: needed {name} >= 1, got {value}")
        self.healthy_after_steps = healthy_after_steps
        self._level = LossLevel()
        self._new_data = NewData()
        self._groups = Groups(groups)
        self._tracks = {
            name: Track(name, rungs, quiet_steps, same_place_steps)
            for name in self._groups.names
        }
        self._whole = self._track = self._tracks[WHOLE]
        self._choice = Choice(least_saving_seconds, longest_wait_steps)
        self._rate = Rate(lowest_scale)
        self._newest_is_good = True
        self._acts = Interventions(rungs, self._rate, self._choice, max_relapses)
        if report_only:
            self._acts.only_report()
        self._shadow = check_shadows(shadow, Ladder)
        for ladder in self._shadow.values():
            ladder._acts.only_report()

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return self._acts.rungs

    @property
    def report_only(self) -> bool:
        return self._acts.report_only

    @property
    def learning_rate_scale(self) -> float:
        return self._rate.scale

    @property
    def probe_level(self) -> int:
        return int(self._whole.ledger.seen < self._acts.look_until)

    @property
    def event_open(self) -> bool:
        """Whether something is wrong, or was within the last `quiet_steps` steps."""
        return any(t.episode.is_open for t in self._tracks.values())

    @property
    def in_trouble(self) -> bool:
        """Whether the newest step was bad, or its loss high in an event or drifting."""
        return any(
            t.drifted_steps or not t.episode.is_quiet for t in self._tracks.values()
        )

    @property
    def is_settled(self) -> bool:
        """Whether a state is worth keeping: no event is open, the newest step good.

        A loss that comes down from an event may be normal by the width of its noise
        long before the state is as good as it was.
        """
        return self._newest_is_good and not (self.event_open or self.in_trouble)

    def decide(
        self, observation: Observation, costs: Price | None = None
    ) -> tuple[Action, ...]:
        """The actions that this step calls for, gentle ones first; often none.

        Settings that last are read from `learning_rate_scale` and `probe_level`. After
        carrying out a `rollback`, call `rolled_back`.

        Args:
          observation: the step.
          costs: told what a rollback would be for (`event_step`, `before`), hands the
            same numbers back with `load_seconds`, `redone_steps` and `step_seconds`, on
            all processes the same. Asked only when there is a choice; None never waits.
        """
        seen = observation
        track = self._track = self._concerned(seen)
        height = self._level.observe(seen.loss)
        actions = recorded(seen)
        if self._new_data.observe(seen, height):
            actions.append(self._accept(seen))
            height = self._level.observe(seen.loss)
        self._newest_is_good = seen.severity <= OK and height == NORMAL
        for each in self._tracks.values():
            each.observe(seen, height, each is track, self._level.drift.up)
        actions += track.relapses.again(seen)
        actions += self._learn(seen, height)
        if not track.is_calm(seen):
            actions += self._acts.look(track, seen)
            actions += self._acts.strongest(track, seen, costs)
        for action in actions:
            if track.group:
                action.numbers["group"] = track.group
        if self._rate.ease(not self.in_trouble):
            numbers = {"learning_rate_scale": 1.0}
            actions.append(Action("return", "the learning rate is back", numbers))
        for name, ladder in self._shadow.items():
            actions += as_shadow(name, ladder.decide(seen, costs))
        return tuple(actions)

    def rolled_back(
        self,
        observation: Observation,
        target: int,
        window: tuple[int, ...],
        saved: dict[str, Any] | None = None,
    ) -> None:
        """Takes note that the state of step `target` runs again without `window`.

        Args:
          observation: the one that called for the rollback.
          target: step that runs next.
          window: first and last position of the data that is skipped.
          saved: what `get_state` gave when that state was saved, or None.
        """
        track = self._track
        seen, start = track.whole(observation), track.start(observation)
        self._new_data.restored(len(track.relapses.at(start, seen)))
        # Also where the run has got past the place: what goes wrong soon again is
        # helped by smaller steps.
        near = bool(track.relapses.near(start, seen))
        self._acts.slow_down(near, self._level.drift.leans)
        if saved is None:
            self._level.take_back(seen.step + 1 - target)
        else:
            self._level.go_back(saved["level"])
        track.relapses.note(start, seen, target, window)
        self._choice.forget()
        for each in self._tracks.values():
            each.renew()
        self._newest_is_good = True
        for ladder in self._shadow.values():
            ladder.rolled_back(observation, target, window, saved)

    def expect_change(self) -> None:
        """Announces a change of data, batch size or schedule: re-learns the level."""
        self._level.forget()
        self._choice.forget()
        for track in self._tracks.values():
            track.episode.close()
        for ladder in self._shadow.values():
            ladder.expect_change()

    def get_state(self) -> dict[str, Any]:
        """Everything that must survive a restart, ready for JSON."""
        return self._whole.get_state() | {
            "level": self._level.get_state(),
            "drift": self._level.drift.get_state(),
            "rate": self._rate.get_state(),
            "choice": self._choice.get_state(),
            "new_data": self._new_data.get_state(),
            "groups": {n: t.get_state() for n, t in self._tracks.items() if n},
            "shadow": {n: s.get_state() for n, s in self._shadow.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state; parts of it that this ladder lacks are left out."""
        self._whole.set_state(state)
        self._level.set_state(state["level"])
        self._rate.set_state(state["rate"])
        self._level.drift.set_state(state.get("drift", []))
        if "choice" in state:
            self._choice.set_state(state["choice"])
        if "new_data" in state:
            self._new_data.set_state(state["new_data"])
        for name, saved in state.get("groups", {}).items():
            if name in self._tracks:
                self._tracks[name].set_state(saved)
        for name, saved in state.get("shadow", {}).items():
            if name in self._shadow:
                self._shadow[name].set_state(saved)

    def _accept(self, seen: Observation) -> Action:
        """Takes the loss of new data as the level, as after an announcement."""
        text = (
            "the data have changed: a state that was healthy before has a high loss on "
            "them from its first step, so that going back again would not help"
        )
        self.expect_change()
        return Action("log", text, {"loss": seen.loss})

    def _concerned(self, seen: Observation) -> Track:
        """The group that a step is about: the one at fault, or with an open event."""
        track = self._tracks[self._groups.of(seen)]
        if track is not self._whole or seen.severity > OK:
            return track
        several = (t for t in self._tracks.values() if t.episode.is_open)
        return next(several, self._whole)

    def _learn(self, seen: Observation, height: int) -> list[Action]:
        high = self._track.episode.high_steps
        above = self._level.height(seen.loss) if height else 0.0
        steps = self._choice.observe(seen, height, above, high)
        if not steps:
            return []
        weights = list(self._choice.recovery.weights)
        numbers = {"lessons": self._choice.take_untold(), "weights": weights}
        return [
            Action("recovered", f"back after more than {steps} high steps", numbers)
        ]
