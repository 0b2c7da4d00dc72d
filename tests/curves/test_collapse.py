"""Runs laid over a reference: fitted end, departure, and what is refused."""

import math
import re

import numpy as np
import pytest

from stabil.curves import collapse, timescale


def curve(rng, steps, final, noise=0.003):
    """A curve whose normalised shape does not depend on its length or its end."""
    t = np.linspace(0, 1, 2000)
    shape = (1.05 / (t + 0.05)) ** 0.15 + 0.05 * (1 - t)
    return steps * t, final * shape * (1 + noise * rng.normal(size=t.size))


def test_final_loss_is_known_at_half_the_run(rng):
    small, large = curve(rng, 1000, 3.0), curve(rng, 50_000, 2.2)
    half = tuple(v[:1100] for v in large)
    found = collapse(half, 50_000, small)
    assert math.isclose(found.final_loss, 2.2, rel_tol=0.003)
    assert math.isnan(found.departs_at)
    whole = collapse(large, 50_000, small)
    assert math.isnan(whole.departs_at)
    assert np.max(np.abs(whole.residual[whole.fraction > 0.25])) < 0.01


def test_departure_is_dated_before_the_loss_rises(rng):
    small, (steps, losses) = curve(rng, 1000, 3.0), curve(rng, 50_000, 2.2)
    t = steps / 50_000
    losses = losses * (1 + 0.1 * np.maximum(t - 0.6, 0))
    found = collapse((steps, losses), 50_000, small)
    assert 0.6 < found.departs_at < 0.75
    before = losses[(t > 0.55) & (t < 0.6)].mean()
    assert losses[(t > 0.7) & (t < 0.75)].mean() < before


def test_timescale_is_batch_over_rate_decay_and_tokens():
    batch, tokens = 512.0, 1e7
    expected = batch / (3e-3 * 0.1 * tokens)
    assert math.isclose(timescale(3e-3, 0.1, tokens / batch), expected)


def test_what_is_refused(rng):
    small, large = curve(rng, 1000, 3.0), curve(rng, 50_000, 2.2)
    early = tuple(v[:800] for v in large)
    text = (
        "collapse: needed a run that has reached 0.5 of its 50000 steps, got 0.4; "
        "wait, or write window=(0.1, 0.4)"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        collapse(early, 50_000, small)
    large[1][5] = np.nan
    text = (
        "collapse: needed finite steps and losses, got some that are not; leave those "
        "rows out"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        collapse(large, 50_000, small)
