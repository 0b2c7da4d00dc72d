"""Plays a recorded curve through the judge that `stabil.guard` runs in the step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from stabil.detectors import Evidence, JudgeState, judge, read_rows
from stabil.vocabulary import Cause

_ROWS = 4096  # curves are padded to a multiple, so that few lengths are compiled


@jax.jit
def _play(
    losses: jax.Array, norms: jax.Array, waited: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def step(state: JudgeState, row: tuple[jax.Array, ...]):
        loss, norm, waited = row
        state = state._replace(loss=state.loss._replace(waited=waited))
        evidence = Evidence(
            loss=loss,
            loss_given=jnp.asarray(True),
            gradient_sums=jnp.square(norm)[None],
            moment_levels=jnp.full([1], jnp.nan),
            bad_moments=jnp.zeros([1], bool),
            impossible_moments=jnp.zeros([1], bool),
            update_rms=jnp.float32(jnp.nan),
            rows=read_rows(None, 0),
        )
        found = judge(
            state,
            evidence,
            threshold=6.0,
            warmup_steps=20,
            max_consecutive_steps=5,
            rows_fingerprint=jnp.uint32(0),
        )
        return found.state, (found.verdict.severity, found.verdict.flags)

    return jax.lax.scan(step, JudgeState.empty(1, 0), (losses, norms, waited))[1]


def play(
    losses: Sequence[float],
    norms: Sequence[float | None],
    steps: Sequence[float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Severity of every row, and where the gradient norm alone spoke.

    A gradient norm that the log does not have is 0 throughout, which says nothing.

    Args:
      losses: one a row.
      norms: one a row, or None.
      steps: training step of each row, for a judge that is told how many steps passed
        without a loss; None for one that takes each row for the next step.
    """
    rows = len(losses)
    pad = (0, -rows % _ROWS)
    given = [0.0 if n is None else n for n in norms]
    arrays = [np.pad(np.array(v, np.float32), pad, "edge") for v in (losses, given)]
    waited = np.zeros(rows, np.int32)
    if steps is not None:
        waited[1:] = np.clip(np.diff(steps) - 1, 0, 2**20)
    arrays.append(np.pad(waited, pad))
    severity, flags = (np.asarray(v)[:rows] for v in _play(*arrays))
    return severity, (severity == 1) & ((flags & int(Cause.GRADIENT_SPIKE)) != 0)
