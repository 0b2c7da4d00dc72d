"""What the judge remembers from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._baseline import BaselineState
from stabil.detectors._drift import DriftState
from stabil.detectors._loss import LossState
from stabil.detectors._replicas import ReplicaState
from stabil.detectors._rows import KINDS
from stabil.detectors._shadow import fresh_shadow
from stabil.detectors._siblings import SiblingState
from stabil.vocabulary import Shadow


class JudgeState(NamedTuple):
    """What the judge remembers, with G gradient leaves and room for R rows.

    Attributes:
      loss: `LossState`.
      signals: `BaselineState` over `[2 + 2 G]`: the logs of the global gradient norm,
        of each gradient leaf's norm, of each leaf's moments and of the update.
      activations: `BaselineState` over `[4 R]`: the logs of each row's magnitude,
        standard deviation, kurtosis and stable rank.
      rows: uint32 scalar, fingerprint of the readings' row names; what is known of the
        rows is learnt again when it changes.
      siblings: `SiblingState` over `[G + R]`.
      replicas: `ReplicaState` over `[R]`.
      crowded: bool `[R]`, rows that left a number format at the newest reading.
      drift: `DriftState` over `[3]`: loss, gradient norm, update.
      shadow: `Shadow`, how often other thresholds would have fired.
    """

    loss: LossState
    signals: BaselineState
    activations: BaselineState
    rows: jax.Array
    siblings: SiblingState
    replicas: ReplicaState
    crowded: jax.Array
    drift: DriftState
    shadow: Shadow

    @classmethod
    def empty(
        cls,
        leaves: int,
        max_readings: int,
        shadow: tuple[float, ...] = (4.0, 8.0, 12.0),
    ) -> JudgeState:
        """A judge that has seen nothing."""
        return cls(
            loss=LossState.empty(),
            signals=BaselineState.empty(2 + 2 * leaves),
            activations=BaselineState.empty(KINDS * max_readings),
            rows=jnp.zeros([], jnp.uint32),
            siblings=SiblingState.empty(leaves + max_readings),
            replicas=ReplicaState.empty(max_readings),
            crowded=jnp.zeros([max_readings], bool),
            drift=DriftState.empty(3),
            shadow=fresh_shadow(shadow),
        )

    def for_rows(self, fingerprint: jax.Array) -> JudgeState:
        """The state for rows of these names: fresh for rows that it does not know."""
        size = self.crowded.shape[0]
        if size == 0:
            return self._replace(rows=fingerprint)
        leaves = self.siblings.habit.shape[0] - size
        fresh = JudgeState.empty(leaves, size, (0.0,))
        known = self.rows == fingerprint
        of_leaves = jnp.arange(leaves + size) < leaves

        def keep(old: Any, new: Any, also: Any = False) -> Any:
            return jax.tree.map(lambda o, n: jnp.where(known | also, o, n), old, new)

        return self._replace(
            activations=keep(self.activations, fresh.activations),
            siblings=keep(self.siblings, fresh.siblings, of_leaves),
            replicas=keep(self.replicas, fresh.replicas),
            crowded=keep(self.crowded, fresh.crowded),
            rows=fingerprint,
        )
