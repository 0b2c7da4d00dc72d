"""How likely a high loss is to come back by itself."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

# Fitted to the labelled events of public training logs by `benchmarks/recovery.py`,
# which prints them again and says how well they predict curves they have not seen.
START = (-0.31, -0.96, 0.31, 0.0)
# Precision of the prior around START. Height is what the logs of one run agree about;
# the weights of duration and gradient hardly carry over, so that they move little.
PRECISION = (1.0, 1.0, 10.0, 10.0)
_NEWTON_STEPS = 8
_LARGEST_GRADIENT = 5.0


class Case(NamedTuple):
    """A high loss at one moment.

    Attributes:
      steps: how long it has been high; steps, >= 1.
      height: log of the loss over its level; 0 at the level.
      gradient: log of the gradient norm of the last steps over its level; 0 at the
        level and where it is not known.
    """

    steps: int
    height: float
    gradient: float


class Recovery:
    """Chance that a loss which has been high for d steps is back before 2 d steps.

    p = 1 / (1 + exp(-w . x)),   x = (1, height, log10(d) - 2, gradient)

    The question has no scale of its own, as spikes have none: some last five steps and
    some five thousand. `w` starts at what public logs say and is fitted anew after each
    lesson of the run itself: a few Newton steps on the log-likelihood of its newest 200
    lessons and a normal prior around the start. Plain float64 arithmetic on what it is
    told. Events `wait`, `rollback` and `recovered` hold the newest lessons, each once,
    in `numbers["lessons"]`, so that the log alone gives the weights:

      recovery.set_state(
          row for e in read_events(run) for row in e.numbers.get("lessons", ())
      )

    Attributes:
      weights: `w`.
      lessons: pairs of `Case` and whether the loss came back, oldest first.

    Examples:
      >>> recovery = Recovery()
      >>> low, high = Case(20, 0.1, 0.0), Case(20, 2.0, 0.0)
      >>> recovery.probability(low) > recovery.probability(high)
      True
      >>> before = recovery.probability(high)
      >>> for _ in range(5):
      ...     recovery.learn(high, True)
      >>> recovery.probability(high) > before
      True
    """

    def __init__(self) -> None:
        self.weights: tuple[float, ...] = START
        self.lessons: collections.deque[tuple[Case, bool]] = collections.deque(
            maxlen=200
        )

    def probability(self, case: Case) -> float:
        """See above; in (0, 1)."""
        z = sum(w * x for w, x in zip(self.weights, _inputs(case), strict=True))
        return 1 / (1 + math.exp(-min(max(z, -30.0), 30.0)))

    def learn(self, case: Case, back: bool) -> None:
        """Takes one outcome in and fits the weights anew."""
        self.lessons.append((case, back))
        self._fit()

    def get_state(self) -> list[list[float]]:
        return [[*case, float(back)] for case, back in self.lessons]

    def set_state(self, rows: Iterable[Iterable[Any]]) -> None:
        """Fits to lessons, as `get_state` and the event log's `lessons` have them."""
        self.lessons.clear()
        for steps, height, gradient, back in rows:
            case = Case(int(steps), float(height), float(gradient))
            self.lessons.append((case, bool(back)))
        self._fit()

    def _fit(self) -> None:
        if not self.lessons:
            self.weights = START
            return
        x = np.array([_inputs(case) for case, _ in self.lessons])
        y = np.array([float(back) for _, back in self.lessons])
        self.weights = tuple(map(float, fit(x, y, START, PRECISION)))


def fit(
    x: np.ndarray,
    y: np.ndarray,
    start: Iterable[float],
    precision: Iterable[float],
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """The most likely weights of a logistic model under a normal prior.

    Args:
      x: float64 `[cases, inputs]`.
      y: float64 `[cases]`, 0 or 1.
      start: `[inputs]`, mean of the prior and first guess.
      precision: `[inputs]`, inverse variances of the prior; > 0.
      weight: float64 `[cases]`, how often each case counts; once when None.
    """
    mean, prior = np.array([*start]), np.diag([*precision])
    w, often = mean, np.ones(len(y)) if weight is None else weight
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        slope = x.T @ (often * (y - p)) - prior @ (w - mean)
        curvature = (x * (often * p * (1 - p))[:, None]).T @ x + prior
        w = w + np.linalg.solve(curvature, slope)
    return w


def _inputs(case: Case) -> tuple[float, float, float, float]:
    gradient = min(max(case.gradient, -_LARGEST_GRADIENT), _LARGEST_GRADIENT)
    return 1.0, case.height, math.log10(max(case.steps, 1)) - 2, gradient
