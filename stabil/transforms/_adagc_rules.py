"""The arithmetic of AdaGC: the published readings of the rule, and the cured one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.transforms import _scaling

# A tensor cut below this share of its norm, step after step, has changed its level.
HARD_CLIP = 0.5


class AdaGCState(NamedTuple):
    """State of `adagc`. A row is a tensor, a layer of a stacked one, or the whole tree.

    Attributes:
      gamma: float32 `[rows]`; running norm of the clipped gradient.
      known: bool `[rows]`; whether gamma has been set.
      hard_steps: int32 `[rows]`; steps in a row that cut the norm to less than half.
      hard_norm: float32 `[rows]`; least norm seen in that run.
      level_shifts: int32; how often such a run became the new level of a row.
      steps: int32; finite steps seen.
      clip_factor: float32; the smallest factor of any row, 0 on a non-finite step.
      norm: float32; joint L2 norm before clipping, of the newest finite step.
      threshold: float32; `max_norm` in the warm-up, then the smallest limit of a row.
      clipped_share: float32; share of rows that were scaled down in this step.
      clipped_steps: int32; finite steps in which a row was scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    gamma: jax.Array
    known: jax.Array
    hard_steps: jax.Array
    hard_norm: jax.Array
    level_shifts: jax.Array
    steps: jax.Array
    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_share: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


class Rule(NamedTuple):
    """The three readings of the rule; each gives factors, a state and the limits."""

    lambda_rel: float
    lambda_abs: float
    decay: float
    eps: float

    def cured(
        self,
        rows: jax.Array,
        total: jax.Array,
        warm: jax.Array,
        state: AdaGCState,
        patience: int,
    ) -> tuple[jax.Array, AdaGCState, jax.Array]:
        reference = jnp.where(state.known, state.gamma, rows)
        limit = jnp.where(warm, self.lambda_abs, self.lambda_rel * reference)
        factors = _scaling.ratio(limit, jnp.where(warm, total, rows))
        kept = rows * factors
        lowest = jnp.where(state.known, jnp.minimum(state.gamma, kept), kept)
        mean = self.decay * reference + (1 - self.decay) * kept
        gamma = jnp.where(warm, lowest, mean)
        hard = ~warm & (factors < HARD_CLIP)
        run = jnp.where(hard, state.hard_steps + 1, 0)
        least = jnp.where(run > 1, jnp.minimum(state.hard_norm, rows), rows)
        shift = run >= patience
        gamma = jnp.where(shift, least, gamma)
        present = rows > 0
        return (
            factors,
            state._replace(
                gamma=jnp.where(present, gamma, state.gamma),
                known=state.known | present,
                hard_steps=jnp.where(shift, 0, run),
                hard_norm=jnp.where(hard & ~shift, least, 0),
                level_shifts=state.level_shifts + jnp.sum(shift, dtype=jnp.int32),
            ),
            limit,
        )

    def official(
        self,
        rows: jax.Array,
        total: jax.Array,
        warm: jax.Array,
        state: AdaGCState,
        scope: str,
    ) -> tuple[jax.Array, AdaGCState, jax.Array]:
        c = self.lambda_abs / (total + self.eps)
        early = jnp.where(c < 1, c, 1.0)
        if scope == "global":
            after_warm = jnp.minimum(rows, self.lambda_abs)
        else:
            after_warm = rows * early
        first = jnp.where(state.known, state.gamma, after_warm)
        reference = jnp.where(state.known, state.gamma, rows)
        limit = self.lambda_rel * reference
        over = rows > limit
        late = jnp.where(over, limit / (rows + self.eps), 1.0)
        kept = jnp.where(over, limit, rows)
        mean = self.decay * reference + (1 - self.decay) * kept
        gamma = jnp.where(warm, jnp.minimum(first, after_warm), mean)
        new = state._replace(gamma=gamma, known=jnp.ones_like(state.known))
        limit = jnp.where(warm, self.lambda_abs, limit)
        return jnp.where(warm, early, late), new, limit

    def pytorch_optimizer(
        self, rows: jax.Array, total: jax.Array, warm: jax.Array, state: AdaGCState
    ) -> tuple[jax.Array, AdaGCState, jax.Array]:
        # That package accumulates the global norm in float32.
        total = jnp.sqrt(jnp.sum(jnp.square(rows).astype(jnp.float32)))
        total = total.astype(rows.dtype)
        early = jnp.minimum(self.lambda_abs / jnp.maximum(total, self.eps), 1.0)
        reference = jnp.where(state.known, state.gamma, rows)
        limit = self.lambda_rel * jnp.maximum(reference, self.eps)
        late = jnp.minimum(limit / jnp.maximum(rows, self.eps), 1.0)
        factors = jnp.where(warm, early, late)
        kept = rows * factors
        first = jnp.where(state.known, state.gamma, kept)
        mean = self.decay * reference + (1 - self.decay) * kept
        gamma = jnp.where(warm, jnp.minimum(first, kept), mean)
        new = state._replace(gamma=gamma, known=jnp.ones_like(state.known))
        return factors, new, jnp.where(warm, self.lambda_abs, limit)
