"""Reads a step's vitals once they have arrived, and never waits for a running step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stabil._tree import is_measured, path_name
from stabil.policy import Observation
from stabil.vocabulary import Vitals


class InFlight(NamedTuple):
    """A step whose vitals have not been read yet.

    Attributes:
      step: number of the step.
      data_index: position of its batch.
      batch_id: what the user calls the batch, or None.
      vitals: of the step, on the device.
    """

    step: int
    data_index: int
    batch_id: str | None
    vitals: Vitals


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
    for leaf in jax.tree.leaves(vitals):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()


def fetch(vitals: Vitals) -> Vitals:
    """The vitals as NumPy arrays; waits for the step that makes them."""
    return jax.tree.map(np.asarray, vitals)


def to_observation(flown: InFlight, vitals: Vitals, resets_before: int) -> Observation:
    """What the ladder needs of vitals whose leaves are on the host."""
    measures = vitals.measures
    return Observation(
        step=flown.step,
        severity=int(vitals.verdict.severity),
        causes=vitals.causes if int(vitals.verdict.flags) else (),
        first=vitals.first,
        loss=float(measures.loss),
        grad_norm=float(measures.grad_norm),
        clip_factor=float(measures.clip_factor),
        score=float(vitals.verdict.score),
        # The tally goes back with the state in a rollback, so a difference can be < 0.
        resets=max(0, int(vitals.tally.resets) - resets_before),
        data_index=flown.data_index,
        batch_id=flown.batch_id,
    )


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])


def first_nonfinite(state: Any) -> str | None:
    """Name of a floating leaf that holds NaN or Inf, parameters first; else None.

    Statistics of stabil itself are left out: NaN there means "not measured". They are
    the arrays that are themselves fields of a stabil record; trees in such a record,
    such as moments, are looked at. Compiles once and waits for the state: to be asked
    only when there is a reason.

    Examples:
      >>> first_nonfinite({"mu": jnp.zeros(2), "params": {"w": jnp.full(2, jnp.nan)}})
      'params/w'
    """
    named = list(_checked(state, ""))
    if not named:
        return None
    finite = jax.device_get(_finite([jnp.asarray(x) for _, x in named]))
    bad = [name for (name, _), ok in zip(named, finite, strict=True) if not ok]
    return min(bad, key=lambda name: "params" not in name, default=None)


class DamageCheck:
    """Looks for non-finite leaves when steps keep failing, and only then."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        self._in_a_row = 0

    def __call__(self, seen: Observation, state: Any) -> str | None:
        """Name of a non-finite leaf of the state, or None if none was looked for."""
        if not any(c.startswith("nonfinite") for c in seen.causes):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        named = "nonfinite_parameter" in seen.causes
        due = named or self._in_a_row == 2 or self._in_a_row % 50 == 0
        return first_nonfinite(state) if due else None


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
