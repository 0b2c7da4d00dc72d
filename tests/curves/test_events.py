"""Events from rows: kind, place, height, recovery and lead."""

import math

import numpy as np

from stabil.curves import KINDS, Event, Tracker, find_events


def curve(rng, rows=600, noise=0.01):
    losses = 2.0 * np.exp(noise * rng.normal(size=rows))
    norms = 0.3 * np.exp(0.1 * rng.normal(size=rows))
    return losses, norms


def events(losses, norms=None, every=1):
    norms = [None] * len(losses) if norms is None else norms
    steps = range(0, every * len(losses), every)
    found = find_events(zip(steps, losses, norms, strict=True))
    assert all(e.kind in KINDS for e in found)
    # These curves stand still but for their events, which is a plateau to `test_slow`.
    return [e for e in found if e.kind != "plateau"]


def test_healthy_run_has_none(rng):
    assert events(*curve(rng)) == []


def test_spike_with_place_height_recovery_and_lead(rng):
    losses, norms = curve(rng)
    norms[296:302] *= 10
    losses[300:320] *= np.linspace(3.0, 1.2, 20)
    (event,) = events(losses, norms)
    assert (event.kind, event.severity, event.start) == ("spike", 2, 300)
    assert event.peak == 300 and 315 <= event.end <= 320
    assert math.isclose(event.height, 3.0, rel_tol=0.05)
    assert math.isclose(event.level, 2.0, rel_tol=0.05)
    assert event.recovery == event.end - event.peak
    assert event.lead == 4


def test_level_shift_is_one_event(rng):
    losses, norms = curve(rng)
    losses[300:] *= 1.3
    (event,) = events(losses, norms)
    assert (event.kind, event.severity, event.start) == ("level_shift", 2, 300)
    assert event.end < 400 and math.isnan(event.recovery)


def test_shift_that_is_undone_later_is_a_long_spike(rng):
    losses, norms = curve(rng)
    losses[300:500] *= 1.3
    (event,) = events(losses, norms)
    assert event.kind == "spike"
    assert 500 <= event.end <= 505


def test_divergence_lasts_to_the_end(rng):
    losses, norms = curve(rng)
    losses[590:] *= np.linspace(1.5, 4, 10)
    (event,) = events(losses, norms)
    assert (event.kind, event.end) == ("diverge", 599)
    assert math.isnan(event.recovery)


def test_divergence_in_steps_is_one_event(rng):
    losses, norms = curve(rng)
    losses[200:] *= 1.5
    losses[400:] *= 1.5
    (event,) = events(losses, norms)
    assert (event.kind, event.start, event.end) == ("diverge", 200, 599)
    assert math.isclose(event.height, 2.25, rel_tol=0.1)


def test_divergence_too_slow_for_any_row(rng):
    losses, norms = curve(rng, rows=3000)
    losses[1000:] *= np.linspace(1, 1.5, 2000)
    (event,) = events(losses, norms)
    assert (event.kind, event.severity, event.end) == ("diverge", 2, 2999)
    assert event.start < 1200
    assert 1.4 < event.height < 1.6


def test_nonfinite_spans(rng):
    losses, norms = curve(rng)
    norms[100:140] = np.inf
    losses[595:] = np.nan
    first, second = events(losses, norms)
    assert (first.kind, first.severity, first.start, first.end) == (
        "nonfinite",
        3,
        100,
        139,
    )
    assert (second.start, second.end) == (595, 599)
    assert first.recovery == 39 and math.isnan(second.recovery)


def test_hard_batch_and_gradient_blip(rng):
    losses, norms = curve(rng)
    losses[300] *= 1.2
    norms[400:402] *= 20
    found = events(losses, norms)
    assert [(e.kind, e.severity, e.start, e.end) for e in found] == [
        ("hard_batch", 1, 300, 300),
        ("gradient_blip", 1, 400, 401),
    ]


def test_run_that_begins_again(rng):
    one = 1 + 9 * np.exp(-np.arange(400) / 40)
    losses = np.concatenate([one, one]) * np.exp(0.01 * rng.normal(size=800))
    found = events(losses, every=100)
    assert [e.start for e in found if e.severity >= 2] == [40000]


def test_step_counter_that_goes_back_is_a_restart(rng):
    losses, _ = curve(rng)
    steps = [*range(300), *range(250, 550)]
    found = find_events((s, x, None) for s, x in zip(steps, losses, strict=True))
    (event,) = (e for e in found if e.kind != "plateau")
    assert (event.kind, event.severity, event.start) == ("restart", 1, 250)


def test_events_are_handed_out_as_they_end(rng):
    losses, _ = curve(rng)
    losses[300:305] *= 2
    tracker, at = Tracker(), []
    for step, loss in enumerate(losses):
        at += [step for _ in tracker.row(step, loss)]
    assert at == [315]
    assert tracker.finish() == []


def test_text_and_plain_values():
    event = Event("nonfinite", 3, 5.0, 5.0, 9.0, math.nan, math.nan, math.nan)
    assert str(event) == "block nonfinite at 5 to 9"
    assert event.as_dict()["height"] is None
    assert event.as_dict()["start"] == 5
    blip = Event("gradient_blip", 1, 7.0, 7.0, 7.0, 0.3, 12.0, 0.0)
    assert str(blip) == "watch gradient_blip at 7, peak 12x at 7"
