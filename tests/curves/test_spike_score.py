"""Spike scores against recorded runs of pandas and OLMo-core, and the window below."""

import json
import math
import pathlib

import numpy as np
import pytest

from stabil.curves import SpikeScore, StabilityMonitor, spike_score
from stabil.curves._window import Window

VECTORS = pathlib.Path(__file__).parents[1] / "vectors"
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def recorded(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


def series():
    """The input of `spikescore_pandas.json`, from its own recipe."""
    rng = np.random.default_rng(20250409)
    values = 0.3 + 0.02 * rng.standard_normal(6000)
    at = rng.choice(np.arange(1000, 6000), size=40, replace=False)
    values[at] += rng.uniform(0.05, 0.8, size=40)
    return values


@pytest.mark.parametrize("threshold", [4, 6, 7, 10])
@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("unbiased", [True, False])
def test_spike_score_against_pandas(threshold, two_sided, unbiased):
    data, values = recorded("spikescore_pandas"), series()
    np.testing.assert_allclose(values[:5], data["s_first5"], rtol=1e-12)
    score = SpikeScore(threshold=threshold, two_sided=two_sided, unbiased=unbiased)
    for x in values.tolist():
        score.add(x)
    name = f"k{threshold}_{'unbiased' if unbiased else 'pop'}"
    name += "_twosided" if two_sided else "_onesided"
    assert score.spikes == data["counts"][name]
    assert score.judged == data["evaluated"]


@pytest.mark.parametrize("two_sided", [True, False])
def test_spike_score_equals_its_definition_whatever_came_before(rng, two_sided):
    values = 3 + 0.01 * rng.normal(size=400)
    values[[50, 120, 121, 303]] *= 1e30, 1.1, 0.9, -1e9
    values[200:260] = 2.5
    values[260] = 2.6  # a constant window judges nothing
    score, spikes = SpikeScore(window=16, two_sided=two_sided), 0
    for i, x in enumerate(values):
        score.add(x)
        if i >= 16:
            window = values[i - 16 : i]
            away, spread = x - np.mean(window), np.std(window)
            spikes += 0 < 7 * spread <= (abs(away) if two_sided else away)
        assert i % 7 or (score.spikes, score.judged) == (spikes, max(0, i - 15))


def test_values_whose_squares_overflow_count_as_infinite():
    values = [1.0, 1.1, 0.9, 1.0] * 5
    assert spike_score([*values, 1e200, *values], window=4, threshold=3) == 1 / 37
    window = Window(4)
    for x in (1e200, 1.0, 2.0, 3.0, 4.0):
        window.append(x)
        assert math.isnan(window.mean()) == (x != 4)
    assert window.mean() == 2.5


def test_monitor_against_olmo_core():
    data = recorded("olmo_stability_monitor")
    monitor = StabilityMonitor(window=16, threshold=6.0, rolling=32)
    for step in data["steps"]:
        assert monitor.row(step["loss"], step["grad_norm"]) == step["is_spike"]
        for name in ("running", "total"):
            expected = math.nan if step[name] is None else step[name]
            np.testing.assert_allclose(getattr(monitor, name), expected)


def test_nonfinite_values_are_spikes_and_enter_no_window():
    values = [1.0, 1.1, 0.9, 1.0] * 5
    with_nan = [*values[:10], math.nan, *values[10:]]
    assert spike_score(values, window=4, threshold=3) == 0
    assert spike_score(with_nan, window=4, threshold=3) == 1 / 17
    assert math.isnan(spike_score([1.0, 2.0]))


def test_window_against_scipy():
    data = recorded("windowstats_scipy_w16")
    window = Window(16)
    for x, step in zip(data["x"], data["steps"], strict=True):
        if window.bad:
            assert math.isnan(window.mean()) and math.isnan(window.deviation())
        elif len(window.values) > 1:
            np.testing.assert_allclose(window.mean(), step["mean"], rtol=1e-9)
            sd = window.deviation(1)
            np.testing.assert_allclose(sd, step["std_unbiased"], rtol=1e-9)
        window.append(NONFINITE.get(x, x) if isinstance(x, str) else x)


def test_window_keeps_its_digits_after_a_giant(rng):
    window = Window(32)
    values = [*(3 + 0.01 * rng.normal(size=100)), 1e19, *rng.normal(size=100)]
    for i, x in enumerate(values):
        window.append(x)
        newest = values[max(0, i - 31) : i + 1]
        np.testing.assert_allclose(window.mean(), np.mean(newest), rtol=1e-6)
        sd = window.deviation()
        np.testing.assert_allclose(sd, np.std(newest), rtol=1e-5, atol=1e-9)


def test_a_constant_signal_costs_no_new_sums(monkeypatch):
    window, sums = Window(64), []
    original = Window._sum_up
    monkeypatch.setattr(Window, "_sum_up", lambda w: (sums.append(1), original(w)))
    for _ in range(1000):
        window.append(0.5)
    assert len(sums) <= 8  # while it fills
    assert window.mean() == 0.5 and window.deviation() == 0.0
