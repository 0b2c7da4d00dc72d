"""Notices of what shows over hundreds of rows only."""

import numpy as np
import pytest

from stabil.curves import find_events
from stabil.curves._slow import WINDOW, Slow, _period

ROWS = 4000
SLOW = ("data_pattern", "plateau", "drift")


def events(losses, norms=None):
    norms = [None] * len(losses) if norms is None else norms
    found = find_events(zip(range(len(losses)), losses, norms, strict=True))
    return [e for e in found if e.kind in SLOW]


def falling(rng, rows=ROWS):
    return 6 * (1 + np.arange(rows)) ** -0.2 * np.exp(0.03 * rng.normal(size=rows))


def test_healthy_run_has_none(rng):
    norms = np.exp(0.3 * rng.normal(size=ROWS))
    assert events(falling(rng), norms) == []


def test_alternating_shards_are_a_pattern_with_a_period(rng):
    loss = falling(rng)
    loss[1024:3072] *= 1 + 0.08 * (np.arange(2048) // 25 % 2)
    (pattern,) = events(loss)
    assert (pattern.kind, pattern.severity) == ("data_pattern", 1)
    assert (pattern.start, pattern.end) == (1024, 3071)
    assert pattern.height == pytest.approx(50, abs=1)
    assert str(pattern) == "watch data_pattern at 1024, period 50"


@pytest.mark.parametrize("period", [2, 7, 60, 200])
def test_period_is_found_and_noise_has_none(rng, period):
    noise = rng.normal(size=1024)
    wave = 2 * np.cos(2 * np.pi * np.arange(1024) / period)
    assert _period(noise) == 0
    assert _period(np.cumsum(noise)) == 0
    assert abs(_period(noise + wave) - period) <= 0.1 * period


def test_a_run_that_stands_still_is_a_plateau(rng):
    loss = falling(rng)
    loss[300:3000] = 1.9 * np.exp(0.03 * rng.normal(size=2700))
    (plateau,) = events(loss)
    assert plateau.kind == "plateau"
    assert abs(plateau.start - 300) < 200 and abs(plateau.end - 3000) < 200
    assert str(plateau).startswith("watch plateau at ")


def test_a_short_plateau_at_the_start_is_told(rng):
    loss = 5.5 * np.exp(0.01 * rng.normal(size=800))
    loss[150:] *= np.linspace(0.9, 0.3, 650)
    (plateau,) = events(loss)
    assert plateau.kind == "plateau"
    assert plateau.start < 32 and abs(plateau.end - 150) < 32


def test_slow_growth_of_the_norm_is_a_drift_and_a_jump_is_none(rng):
    norms = np.exp(0.1 * rng.normal(size=ROWS))
    grown, jumped = norms.copy(), norms.copy()
    grown[1500:3000] *= np.linspace(1, 2, 1500)
    grown[3000:] *= 2
    jumped[1500:] *= 2
    (drift,) = events(falling(rng), grown)
    assert (drift.kind, drift.severity) == ("drift", 1)
    assert 1000 < drift.start < 2000 < drift.end
    assert drift.height == pytest.approx(2, rel=0.15)
    assert events(falling(rng), jumped) == []


def test_memory_does_not_grow(rng):
    slow = Slow()
    for at in range(0, 400 * WINDOW, WINDOW):
        slow.take([(at + i, 2.0 + 0.01 * (i % 7), 1.0) for i in range(WINDOW)])
    assert len(slow._blocks) < 2 * 2048


def test_odd_values_are_no_trouble(rng):
    loss = falling(rng, 600)
    loss[100:300], loss[400] = np.nan, np.inf
    assert events(loss, [0.0] * 600) == []
    assert events(-loss) == []
    assert events([]) == [] and events([1.0]) == []
