"""Whether a run follows the normalised curve of a smaller one (scaling with collapse).

At the same schedule, tokens per parameter and timescale tau, curves of all sizes agree
once time is divided by the whole run and loss by the final loss:

  l(t) = L(t T) / L(T),   tau = 1 / (eta lambda T)

While a run goes on its L(T) is unknown; it is the divisor that lays its curve on the
reference between a quarter and a half of the run. From then on the residual

  r(t) = L(t T) / L(T) - l_ref(t)

in units of its own noise there, tells a run that departs before the loss itself rises.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Collapse(NamedTuple):
    """A run laid over its reference.

    Attributes:
      fraction: float64 `[P]`, points of the run, as a share of its steps; in (0, 1].
      residual: float64 `[P]`, normalised loss minus that of the reference.
      score: float64 `[P]`, residual in standard deviations of the aligned part.
      final_loss: the fitted loss at the end of the run.
      noise: standard deviation of the residual in the aligned part.
      departs_at: first fraction from which on the score stays beyond the threshold for
        2 % of the run; NaN if it does not.
    """

    fraction: np.ndarray
    residual: np.ndarray
    score: np.ndarray
    final_loss: float
    noise: float
    departs_at: float


def timescale(learning_rate: float, weight_decay: float, steps: float) -> float:
    """tau of AdamW: its memory of updates as a share of the run; dimensionless.

    Args:
      learning_rate: peak learning rate eta.
      weight_decay: lambda, as multiplied by the learning rate.
      steps: steps of the whole run.

    Examples:
      >>> round(timescale(1e-3, 0.1, 100_000), 3)
      0.1
    """
    return 1 / (learning_rate * weight_decay * steps)


def collapse(
    curve: tuple[np.ndarray, np.ndarray],
    steps: float,
    reference: tuple[np.ndarray, np.ndarray],
    *,
    window: tuple[float, float] = (0.25, 0.5),
    smooth_rows: int = 100,
    threshold: float = 5.0,
) -> Collapse:
    """Lays a run, finished or not, over the curve of a finished reference.

    Args:
      curve: steps and losses of the run so far, `[N]` each, steps rising from 0.
      steps: steps that the whole run will have.
      reference: steps and losses of a finished run with the same schedule, tokens per
        parameter and tau.
      window: part of the run that is aligned, as shares of it.
      smooth_rows: rows of the moving average that both curves get.
      threshold: score beyond which the run departs; either side.

    Raises:
      ValueError: the run has not reached the end of the window, or a curve holds
        values that are not finite.

    Source: Bergsma et al., Scaling with Collapse, arXiv:2509.25087. The paper gives no
    numeric alarm; noise, score and threshold are ours.
    """
    t, run = _smooth(*curve, smooth_rows)
    t_ref, ref = _smooth(*reference, smooth_rows)
    t, t_ref = t / steps, t_ref / t_ref[-1]
    begin, end = window
    if t[-1] < end:
        raise ValueError(
            f"collapse: needed a run that has reached {end:g} of its {steps:g} steps, "
            f"got {t[-1]:.3g}; wait, or write window=(0.1, {t[-1]:.2g})"
        )
    expected = np.interp(t, t_ref, ref / ref[-1])
    part = (t >= begin) & (t <= end)
    final_loss = float(run[part] @ run[part] / (run[part] @ expected[part]))
    residual = run / final_loss - expected
    noise = float(
        1.4826 * np.median(np.abs(residual[part] - np.median(residual[part])))
    )
    score = residual / max(noise, 1e-6)
    after = (np.abs(score) > threshold) & (t > end)
    return Collapse(t, residual, score, final_loss, noise, _lasting(t, after))


def _smooth(
    steps: np.ndarray, losses: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """A trailing moving average; the steps are the middles of the averaged rows."""
    steps, losses = (np.asarray(v, np.float64) for v in (steps, losses))
    if not (np.all(np.isfinite(losses)) and np.all(np.isfinite(steps))):
        raise ValueError(
            "collapse: needed finite steps and losses, got some that are not; leave "
            "those rows out"
        )
    rows = min(rows, max(len(losses) // 20, 1))
    # Only the loss is averaged: the last row stays the end of the run.
    padded = np.concatenate([np.full(rows - 1, losses[0]), losses])
    total = np.cumsum(np.concatenate([[0.0], padded]))
    return steps, (total[rows:] - total[:-rows]) / rows


def _lasting(t: np.ndarray, out: np.ndarray) -> float:
    """First t from which on `out` holds for 2 % of the run or to its end so far."""
    start = math.nan
    for at, high in zip(t.tolist(), out.tolist(), strict=True):
        if not high:
            start = math.nan
        elif math.isnan(start):
            start = at
        elif at - start >= 0.02:
            return start
    return math.nan
