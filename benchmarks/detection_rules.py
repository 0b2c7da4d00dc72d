"""Rules that others use to find faults in a run, written from their specification.

Each rule is fed row by row and says whether it raises an alarm. What each does with a
value that is not finite is what the original does, unless the rule has no original.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable

from stabil.curves._window import Window

Rule = Callable[[float, float | None], bool]


def mean_and_deviations(signal: str, k: float, window: int = 100) -> Rule:
    """A value above mean + k sd of the finite values in the window, or not finite."""
    values = Window(window)

    def rule(loss: float, norm: float | None) -> bool:
        x = loss if signal == "loss" else norm
        if x is None:
            return False
        if not math.isfinite(x):
            return True
        alarm = False
        if len(values.values) >= 20:
            alarm = x > values.mean() + k * values.deviation()
        values.append(x)
        return alarm

    return rule


def median_and_deviations(k: float = 6.0, window: int = 100) -> Rule:
    """A loss above median + k scaled MAD of the window, or not finite."""
    values = collections.deque(maxlen=window)

    def rule(loss: float, norm: float | None) -> bool:
        del norm
        if not math.isfinite(loss):
            return True
        alarm = False
        if len(values) >= 20:
            median = statistics.median(values)
            mad = statistics.median(abs(v - median) for v in values)
            alarm = loss > median + k * max(1.4826 * mad, 1e-6 * abs(median))
        values.append(loss)
        return alarm

    return rule


def skip_step(window: int = 128, k: float = 6.0) -> Rule:
    """OLMo-core, MaxText and Levanter: loss or norm above mean + 6 unbiased sd.

    The first window / 2 - 1 steps are free. Every value enters the window, so a NaN
    makes every comparison false, and the step counts as skipped, for a whole window.
    """
    windows = Window(window), Window(window)

    def rule(loss: float, norm: float | None) -> bool:
        alarm = False
        for x, values in zip((loss, norm), windows, strict=True):
            if x is None:
                continue
            if len(values.values) + 1 >= max(2, window // 2):
                alarm |= not x - values.mean() <= k * values.deviation(1)
            values.append(x)
        return alarm

    return rule


def stability_monitor(window: int = 128, k: float = 6.0) -> Rule:
    """OLMo-core's monitor: loss or norm above mean + 6 population sd, full windows."""
    windows = Window(window), Window(window)

    def rule(loss: float, norm: float | None) -> bool:
        alarm = False
        for x, values in zip((loss, norm), windows, strict=True):
            if x is None:
                continue
            if len(values.values) == window:
                sd = values.deviation()
                alarm |= sd >= 1e-10 and x > values.mean() + k * sd
            values.append(x)
        return alarm

    return rule


class ZClip:
    """ZClip 1.0.0 with its defaults: z > 2.5 of the gradient norm's moving average."""

    def __init__(self, alpha: float = 0.97, limit: float = 2.5, warmup: int = 25):
        self.alpha, self.limit, self.warmup = alpha, limit, warmup
        self.first = Window(warmup)
        self.mean = self.variance = math.nan

    def __call__(self, loss: float, norm: float | None) -> bool:
        del loss
        if norm is None:
            return False
        if len(self.first.values) < self.warmup:
            self.first.append(norm)
            if len(self.first.values) == self.warmup:
                self.mean = self.first.mean()
                self.variance = self.first.deviation() ** 2
            return False
        sd = math.sqrt(self.variance)
        z = (norm - self.mean) / (sd + 1e-6)
        alarm = z > self.limit
        x = self.mean + self.limit * sd / (z / self.limit) if alarm else norm
        self.mean = self.alpha * self.mean + (1 - self.alpha) * x
        gap = (x - self.mean) ** 2 if math.isfinite(x) else math.nan
        self.variance = self.alpha * self.variance + (1 - self.alpha) * gap
        return alarm


def lightning(window: int = 10, rtol: float = 2.0) -> Rule:
    """Lightning's SpikeDetection: a rise to 3 times the mean of the 10 accepted losses.

    The newest accepted loss is not in the mean; a spike enters no statistic.
    """
    accepted = collections.deque(maxlen=window + 1)

    def rule(loss: float, norm: float | None) -> bool:
        del norm
        if not math.isfinite(loss):
            return True
        alarm = False
        if len(accepted) >= 2:
            mean = math.fsum(list(accepted)[:-1]) / (len(accepted) - 1)
            alarm = loss > accepted[-1] and abs(loss - mean) >= abs(rtol * mean)
        if not alarm:
            accepted.append(loss)
        return alarm

    return rule


def megatron(samples: int = 100, factor: float = 10.0) -> Rule:
    """Megatron: 10 times the largest of the first 100 finite values, or a NaN loss."""
    largest, seen = [-math.inf, -math.inf], [0, 0]

    def rule(loss: float, norm: float | None) -> bool:
        alarm = not math.isfinite(loss)
        for i, x in enumerate((loss, norm)):
            if x is None or not math.isfinite(x):
                continue
            if seen[i] < samples:
                seen[i] += 1
                largest[i] = max(largest[i], x)
            else:
                alarm |= x >= factor * largest[i]
        return alarm

    return rule


def kill_loss_spike(rows: int, patience: int = 4, ratio: float = 2.0) -> Rule:
    """LLM Foundry: 5 losses in a row of twice the mean, or half a window above a cap.

    The window holds 100 rows or 5 % of the run, whichever is more; the cap is the
    largest loss of the first window, at most 10. A NaN is no outlier and stays in the
    mean.
    """
    window = max(100, rows // 20)
    losses = Window(window)
    state = {"run": 0, "cap": math.inf, "above": 0}

    def rule(loss: float, norm: float | None) -> bool:
        del norm
        alarm = False
        if len(losses.values) == window:
            if state["cap"] == math.inf:
                state["cap"] = min(10.0, max(losses.values))
                state["above"] = sum(v > state["cap"] for v in losses.values)
            high = loss >= ratio * losses.mean()
            state["run"] = state["run"] + 1 if high else 0
            alarm = state["run"] > patience or state["above"] >= window / 2
            state["above"] += (loss > state["cap"]) - (losses.values[0] > state["cap"])
        losses.append(loss)
        return alarm

    return rule
