"""Looks at every entry of the parameters now and then: for one that no update made.

The guard reads a few columns of each leaf in every step. A flipped bit elsewhere may
hide for good: a norm behind it bounds what it does, and the loss rises by a little.

  leapt  <=>  b > 4 max_j a_j  and  b > 30 a  and  b > 30 m

with b and m the largest and the mean absolute entry of a leaf, a the b of the last look
and the a_j those of all leaves. Training moves many entries, so one that grows beyond
every other of the model stands out in its own leaf only where it was overwritten.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil._tree import is_measured, path_name
from stabil.policy import Observation
from stabil.vocabulary import Severity

_OVER_ALL, _OVER_OWN = 4.0, 30.0
_FIRST_LOOK = 4
_PAUSE = 10  # steps between two looks that the activations ask for
_BELIEVED_STEPS = 1000
_SYMPTOMS = frozenset(("activation_shift", "activation_limit", "layer_disagreement"))


class LeapCheck:
    """Remembers the largest entry of each parameter leaf of a session's state.

    It looks before a save, at steps 4, 8, 16, ..., and where activations are out of
    line; a look reads every parameter once. A leaf that is told twice within 1,000
    steps grows by itself, and is believed. The leaves are those that `stabil.vitals`
    names and that the state has under the same names.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._told: dict[str, int] = {}
        self._last_asked = -_PAUSE

    def __call__(
        self, seen: Observation, state: Any, signals: tuple[str, ...], is_kept: bool
    ) -> Observation:
        """The observation with a leaf that has leapt, if a look is due and finds one.

        Args:
          seen: the step.
          state: the newest state.
          signals: `Vitals.signals`.
          is_kept: whether the state is about to be saved.
        """
        if seen.damaged is not None or not (is_kept or self._is_due(seen)):
            return seen
        found = self._look(seen.step, state, signals)
        if found is None:
            return seen
        name = f"params/{found}"
        return seen.warned("parameter_leap", name)._replace(leapt=name)

    def _is_due(self, seen: Observation) -> bool:
        if seen.severity > Severity.OK and not _SYMPTOMS.isdisjoint(seen.causes):
            if 0 <= seen.step - self._last_asked < _PAUSE:
                return False
            self._last_asked = seen.step
            return True
        return seen.step >= _FIRST_LOOK and seen.step & (seen.step - 1) == 0

    def _look(self, step: int, state: Any, signals: tuple[str, ...]) -> str | None:
        leaves = _parameters(state, signals)
        if not leaves:
            return None
        extent = np.asarray(_extent(list(leaves.values()))).tolist()
        bound = _OVER_ALL * max(self._largest.values(), default=np.inf)
        told = None
        for name, (largest, mean) in zip(leaves, extent, strict=True):
            own = _OVER_OWN * max(self._largest.get(name, np.inf), mean)
            believed = step - self._told.get(name, -_BELIEVED_STEPS) < _BELIEVED_STEPS
            if largest > max(bound, own) and not believed:
                told = told or name
            elif np.isfinite(largest):
                self._largest[name] = largest
        if told is not None:
            self._told[told] = step
        return told


@jax.jit
def _extent(leaves: list[jax.Array]) -> jax.Array:
    """Largest and mean absolute entry of each leaf, float32 `[leaves, 2]`."""
    sizes = [jnp.abs(x).astype(jnp.float32) for x in leaves]
    return jnp.stack([jnp.stack([jnp.max(x), jnp.mean(x)]) for x in sizes])


def _parameters(state: Any, signals: tuple[str, ...]) -> dict[str, jax.Array]:
    """The parameter leaves of the state by name: moments have longer ones."""
    wanted = {s.removeprefix("params/") for s in signals if s.startswith("params/")}
    found: dict[str, tuple[int, jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        names = (path_name(path[start:]) for start in range(len(path)))
        name = next((n for n in names if n in wanted), None)
        if name is None or not is_measured(leaf) or jnp.size(leaf) == 0:
            continue
        if name not in found or len(path) < found[name][0]:
            found[name] = len(path), leaf
    return {name: leaf for name, (_, leaf) in found.items()}
