"""Reads a step's vitals once they have arrived, and never waits for a running step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stabil._tree import is_measured, path_name
from stabil.policy import Observation
from stabil.vocabulary import Severity, Vitals


class InFlight(NamedTuple):
    """A step whose vitals have not been read yet.

    Attributes:
      step: number of the step.
      data_index: position of its batch.
      vitals: of the step, on the device.
      batch_id: what the user calls the batch, or None.
      micro_batch: position in the accumulation window; -1 without one.
      sample_ids: what the user calls the samples, or a function that makes them.
    """

    step: int
    data_index: int
    vitals: Vitals
    batch_id: str | None = None
    micro_batch: int = -1
    sample_ids: Sequence[Any] | Callable[[], Sequence[Any]] = ()


def start_copy(vitals: Vitals) -> None:
    """Asks for the values on the host as soon as the step has made them.

    Raises:
      TypeError: these are no `Vitals`.
    """
    if not isinstance(vitals, Vitals):
        raise TypeError(
            f"end_step: needed the step's Vitals, got {type(vitals).__name__}; return "
            "stabil.vitals(opt_state, params=params) from the train step"
        )
    # What a CPU has made lies on the host, and to ask costs a third of a quiet step.
    flags = vitals.verdict.flags
    if isinstance(flags, jax.Array) and next(iter(flags.devices())).platform != "cpu":
        for leaf in jax.tree.leaves(vitals):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()


def fetch(vitals: Vitals) -> Vitals:
    """The vitals as NumPy arrays, unless quiet; waits for the step that makes them.

    Of a quiet step a few values are wanted, which `number` reads one by one.
    """
    severity = np.asarray(vitals.verdict.severity)
    if severity.ndim == 0 and severity.item() <= int(Severity.OK):
        return vitals
    return jax.tree.map(np.asarray, vitals)


def number(scalar: Any) -> Any:
    """A scalar on the host, three times as fast as by `float` of a `jax.Array`."""
    return np.asarray(scalar).item()


def worst(vitals: Vitals) -> tuple[Vitals, int]:
    """One set of vitals out of those of several micro-batches, and which it is.

    The first of the most severe ones speaks, with the tally of the last; the loss is
    the mean of all. Vitals without a leading axis come back as they are, with -1.
    """
    severity = vitals.verdict.severity
    if severity.ndim == 0:
        return vitals, -1
    at = int(np.argmax(severity))
    one = jax.tree.map(lambda x: x[at], vitals)
    last = jax.tree.map(lambda x: x[-1], vitals.tally)
    measures = one.measures
    if severity[at] <= Severity.OK:
        measures = measures._replace(loss=np.mean(vitals.measures.loss))
    one = dataclasses.replace(one, tally=last, measures=measures)
    return one, at if severity[at] > Severity.OK else -1


def to_observation(
    flown: InFlight, vitals: Vitals, resets_before: int, can_roll_back: bool = False
) -> Observation:
    """What the ladder needs of a step's vitals."""
    verdict, measures = vitals.verdict, vitals.measures
    severity, found = number(verdict.severity), number(verdict.flags)
    return Observation(
        step=flown.step,
        severity=severity,
        causes=vitals.causes if found else (),
        first=vitals.first if found else None,
        loss=number(measures.loss),
        grad_norm=number(measures.grad_norm),
        clip_factor=number(measures.clip_factor),
        score=number(verdict.score),
        # The tally goes back with the state in a rollback, so a difference can be < 0.
        resets=max(0, number(vitals.tally.resets) - resets_before),
        can_roll_back=can_roll_back,
        data_index=flown.data_index,
        batch_id=flown.batch_id,
        micro_batch=flown.micro_batch,
        sample_ids=_names(flown.sample_ids) if severity > Severity.OK else (),
        also=_nonfinite_rows(vitals) if severity > Severity.OK else (),
    )


def _names(ids: Sequence[Any] | Callable[[], Sequence[Any]]) -> tuple[str, ...]:
    return tuple(str(i) for i in (ids() if callable(ids) else ids))


def _nonfinite_rows(vitals: Vitals) -> tuple[str, ...]:
    """Names of the readings that hold a value which is not finite."""
    readings = vitals.readings
    if readings is None or readings.values.ndim != 2:
        return ()
    bad = np.zeros(len(readings.names), bool)
    for statistic in ("nan_count", "inf_count"):
        if statistic in readings:
            bad |= np.asarray(readings[statistic]) > 0
    return tuple(f"activations/{readings.names[i]}" for i in np.flatnonzero(bad))


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])


def first_nonfinite(state: Any, but: Collection[str] = ()) -> str | None:
    """Name of a floating leaf that holds NaN or Inf, parameters first; else None.

    Leaves named in `but` do not count.

    Statistics of stabil itself are left out: NaN there means "not measured". They are
    the arrays that are themselves fields of a stabil record; trees in such a record,
    such as moments, are looked at. Compiles once and waits for the state: to be asked
    only when there is a reason.

    Examples:
      >>> first_nonfinite({"mu": jnp.zeros(2), "params": {"w": jnp.full(2, jnp.nan)}})
      'params/w'
    """
    bad = [name for name in nonfinite(state) if name not in but]
    return min(bad, key=lambda name: "params" not in name, default=None)


def nonfinite(state: Any) -> list[str]:
    """Names of all those leaves."""
    named = list(_checked(state, ""))
    if not named:
        return []
    finite = jax.device_get(_finite([jnp.asarray(x) for _, x in named]))
    return [name for (name, _), ok in zip(named, finite, strict=True) if not ok]


class DamageCheck:
    """Looks for non-finite leaves when steps keep failing, and before a save."""

    def __init__(self):
        self._from_the_start: list[str] = []
        self.forget()

    def begin(self, state: Any) -> None:
        """Notes what is not finite in the first state, and so is meant to be."""
        self._from_the_start = nonfinite(state)

    def forget(self) -> None:
        self._in_a_row = 0

    def __call__(self, seen: Observation, state: Any, is_kept: bool) -> Observation:
        """The observation with a non-finite leaf of the state, if one was found."""
        suspected = any(c.startswith("nonfinite") for c in seen.causes)
        self._in_a_row = self._in_a_row + 1 if suspected else 0
        named = "nonfinite_parameter" in seen.causes
        due = named or self._in_a_row == 2 or suspected and self._in_a_row % 50 == 0
        found = None
        if due or is_kept:
            found = first_nonfinite(state, but=() if due else self._from_the_start)
        if found is None or suspected:
            return seen._replace(damaged=found)
        # Nothing that was computed so far has met it.
        return seen.warned("nonfinite_parameter", found)._replace(damaged=found)


def _is_record(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__module__.startswith("stabil.")


def _checked(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and values of the leaves that must be finite."""
    if _is_record(node):
        for name, field in zip(node._fields, node, strict=True):
            if not jax.tree_util.all_leaves([field]):
                yield from _checked(field, f"{prefix}{name}/")
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_record)[0]:
        name = prefix + path_name(path)
        if _is_record(leaf):
            yield from _checked(leaf, f"{name}/" if path else prefix)
        elif is_measured(leaf):
            yield name, leaf
