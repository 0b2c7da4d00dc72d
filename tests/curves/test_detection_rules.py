"""The rules that the benchmark compares with, against recorded runs of their origin."""

import json
import math
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import detection_rules as rules  # noqa: E402

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def recorded(name):
    return json.loads((ROOT / "tests" / "vectors" / f"{name}.json").read_text())


def number(value):
    return NONFINITE.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize(
    "name", ["olmo_skipstep_w16_s6", "olmo_skipstep_nan", "maxtext_skipstep_w16_s6"]
)
def test_skip_step(name):
    rule = rules.skip_step(window=16, k=6.0)
    for step in recorded(name)["steps"]:
        # The originals hold the statistics in float32.
        loss, norm = (float(np.float32(number(step[k]))) for k in ("loss", "grad_norm"))
        skipped = step["skipped"] if "skipped" in step else step["step_factor"] == 0
        assert (step["t"], rule(loss, norm)) == (step["t"], skipped)


def test_stability_monitor():
    rule = rules.stability_monitor(window=16, k=6.0)
    for step in recorded("olmo_stability_monitor")["steps"]:
        assert rule(step["loss"], step["grad_norm"]) == step["is_spike"]


@pytest.mark.parametrize("name", ["zclip_default_f64", "zclip_default_nan_f64"])
def test_zclip(name):
    rule = rules.ZClip()
    for step in recorded(name)["steps"]:
        alarm = rule(math.nan, number(step["total_norm"]))
        assert (step["t"], alarm) == (step["t"], step["clip_val"] is not None)
        if step["mean"] is not None:
            mean, variance = number(step["mean"]), number(step["var"])
            np.testing.assert_allclose(rule.mean, mean, rtol=1e-9)
            np.testing.assert_allclose(rule.variance, variance, rtol=1e-9)


def play(rule, losses, norms=None):
    norms = [None] * len(losses) if norms is None else norms
    return [i for i, v in enumerate(zip(losses, norms, strict=True)) if rule(*v)]


def test_lightning_fires_beyond_three_times_the_mean():
    assert play(rules.lightning(), [1.0] * 20 + [2.96] + [1.0] * 5) == []
    assert play(rules.lightning(), [1.0] * 20 + [3.04] + [1.0] * 5) == [20]
    assert play(rules.lightning(), [1.0] * 20 + [math.nan]) == [20]


def test_megatron_judges_from_the_first_hundred_samples():
    losses = [2.0] * 50 + [3.0] * 50 + [29.0, 30.0, math.nan]
    assert play(rules.megatron(), losses) == [101, 102]


def test_kill_loss_spike_waits_for_five_in_a_row():
    losses = [2.0] * 300
    losses[200:212] = [7.2] * 12
    assert play(rules.kill_loss_spike(300), losses)[0] == 204
    dead = [2.0] * 150 + [math.nan] * 150
    assert play(rules.kill_loss_spike(300), dead) == []
