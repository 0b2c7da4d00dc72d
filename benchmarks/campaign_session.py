"""The protected run of `campaign.py`: guard, probe, session, keeper and ladder."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import campaign_runs as runs
import jax
import numpy as np
import optax
import orbax.checkpoint as orbax
from campaign_faults import Trial

import stabil
from stabil.checkpoints import Keeper
from stabil.session import Session, TrainingStopped
from stabil.telemetry import read_events
from stabil.testing import inject

INTERVENTIONS = ("skip", "reset", "cut", "rollback", "stop")


class Protected(NamedTuple):
    """What a protected run left behind.

    Attributes:
      ended: whether it came to its last step.
      stopped: why it did not, or "".
      loss: held-out loss at the end.
      sound: whether every parameter is finite at the end.
      bad_steps: steps after which a parameter was not finite.
      summary: of the session.
      events: of the event log.
      healthy: held-out loss of each checkpoint that is tagged healthy, by step.
    """

    ended: bool
    stopped: str
    loss: float
    sound: bool
    bad_steps: int
    summary: dict[str, Any]
    events: list[Any]
    healthy: dict[int, float]


class Protection:
    """Runs trials with one compiled step.

    Args:
      setting: what to train.
    """

    def __init__(self, setting: runs.Setting):
        self.setting = setting
        self.tx = stabil.guard(setting.optimizer())
        self.names = setting.dial_names(self.tx)
        self.step = self._step()
        self.evaluate = jax.jit(setting.evaluate)

    def _step(self) -> Callable[..., Any]:
        tx, setting = self.tx, self.setting
        probed: Any = stabil.probe(setting.model, where="**")

        @jax.jit
        def step(state: Any, batch: Any, dial: Any, controls: Any) -> Any:
            at = batch["position"]
            params, opt_state = runs.struck_state(dial, at, *state)
            loss, grads, readings = runs.struck_gradients(
                setting, probed.apply, params, dial, (at, batch["tokens"])
            )
            seen = dict(loss=loss, readings=readings, controls=controls)
            updates, opt_state = tx.update(grads, opt_state, params, **seen)
            params = optax.apply_updates(params, updates)
            vitals = stabil.vitals(opt_state, params=params, readings=readings)
            return (params, opt_state), vitals, runs.all_finite(params)

        return step

    def first_state(self, seed: int) -> Any:
        params = self.setting.params(seed)
        return params, self._init(params)

    @functools.cached_property
    def _init(self) -> Callable[..., Any]:
        return jax.jit(self.tx.init)

    def run(self, trial: Trial, folder: pathlib.Path) -> Protected:
        """Trains through one trial's faults."""
        sound: list[jax.Array] = []
        setting = self.setting
        keeper = Keeper(folder / "run" / "checkpoints", save_every=runs.SAVE_EVERY)
        others = [trial.other] if trial.other else []
        channel = inject.AlertChannel(others)
        session = Session(
            folder / "run",
            checkpoints=keeper,
            alerts=[channel],
            total_steps=setting.steps,
            progress=False,
        )
        stopped, last = "", -1
        state = self.first_state(trial.seed)
        dial = inject.Dial.of(trial.fault, self.names)
        struck: set[inject.Fault] = set()
        with inject.Disk(others, keeper.directory) as disk:
            try:
                with keeper, session:
                    data = functools.partial(setting.batch, trial.seed)
                    for last, batch in session.steps(state, data):  # noqa: B007
                        position = int(batch["position"])
                        disk.at(position)
                        _damage(keeper, others, position, struck)
                        inject.process(others, position, once=folder / "struck")
                        state, vitals, ok = self.step(
                            state, batch, dial, session.controls
                        )
                        sound.append(ok)
                        state = session.end_step(state, vitals)
                    disk.at(setting.steps * 10)
            except TrainingStopped as error:
                stopped = error.reason
            except Exception as error:  # a run that breaks is a result
                stopped = f"{type(error).__name__}: {error}"
            finally:
                channel.close()
        with contextlib.suppress(Exception):
            session.close()
        return Protected(
            ended=not stopped and last == setting.steps - 1,
            stopped=stopped,
            loss=float(self.evaluate(state[0])),
            sound=bool(runs.all_finite(state[0])),
            bad_steps=int(sum(not ok for ok in np.array(jax.device_get(sound)))),
            summary=session.summary(),
            events=list(read_events(folder / "run")),
            healthy=self._healthy(folder / "run" / "checkpoints", state, trial),
        )

    def _healthy(
        self, folder: pathlib.Path, state: Any, trial: Trial
    ) -> dict[int, float]:
        """Held-out loss of the checkpoints that are tagged healthy; NaN if unsound.

        Only of those that a fault of the arrays can have reached: step n is saved
        before the batch at position n is seen. As they lie on the disk, but for one
        that the keeper finds damaged.
        """
        found = {}
        with Keeper(folder) as keeper:
            for step, tag in keeper.steps().items():
                if tag != "healthy" or not trial.fault or step <= trial.fault.step:
                    continue
                with contextlib.suppress(stabil.checkpoints.DamagedError):
                    if trial.other:  # its digests matter
                        params = keeper.restore(_abstract(state), step).state[0]
                    else:
                        params = _read_params(folder / str(step) / "state", state)
                    found[step] = float(self.evaluate(params))
        return found


def _abstract(state: Any) -> Any:
    def of(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(of, state)


def _read_params(item: pathlib.Path, state: Any) -> Any:
    """The parameters of a saved pair alone, a fifth of the cost of all."""
    params, opt_state = state
    wanted = (_abstract(params), jax.tree.map(lambda _: orbax.PLACEHOLDER, opt_state))
    as_numpy = jax.tree.map(
        lambda _: orbax.RestoreArgs(restore_type=np.ndarray), wanted
    )
    how = orbax.args.PyTreeRestore(item=wanted, restore_args=as_numpy)
    return orbax.PyTreeCheckpointHandler().restore(item, args=how)[0]


def _damage(keeper: Any, others: list, position: int, struck: set) -> None:
    """Damages the newest checkpoint when a fault says so; once."""
    for fault in inject.due(others, position, "checkpoint"):
        if fault not in struck:
            struck.add(fault)
            keeper.wait()
            newest = keeper.directory / str(max(keeper.steps()))
            inject.checkpoint((fault,), position, newest)
