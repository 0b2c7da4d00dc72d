"""A loss that rises slowly, at each step within its own noise, is a divergence too."""

import json

import numpy as np
import pytest

from stabil.policy import Ladder, Observation, careful
from stabil.policy._level import NORMAL, LossLevel

START = 200


def diverging(rng, steps=400, noise=0.1):
    """Losses around 1.5; from step 200 on they grow by 0.2 % a step, noise and all."""
    growth = np.exp(0.002 * np.maximum(np.arange(steps) - START, 0))
    return growth * (1.5 + noise * rng.normal(size=steps))


def decide(ladder, losses, first=0):
    """Interventions as pairs of step and kind, reports as such."""
    found = []
    for step, loss in enumerate(losses, first):
        for action in ladder.decide(Observation(step, loss=float(loss))):
            found.append((step, "report " * action.report_only + action.kind))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_divergence_cuts_the_rate_though_no_loss_is_high(seed):
    losses = diverging(np.random.default_rng(seed))
    level = LossLevel()
    assert {level.observe(float(x)) for x in losses} == {NORMAL}
    ladder = Ladder()
    step, kind = decide(ladder, losses)[0]
    assert kind == "cut" and START + 40 <= step <= START + 100
    assert ladder.learning_rate_scale <= 0.5
    assert ladder.in_trouble
    assert decide(careful(), losses)[0] == (step, "report cut")


def test_the_cut_lasts_and_the_rate_comes_back_by_degrees(rng):
    ladder = Ladder()
    assert decide(ladder, diverging(rng, 300))[-1][1] == "cut"
    scale, calm = ladder.learning_rate_scale, 1.4 + 0.1 * rng.normal(size=2300)
    assert decide(ladder, calm[:150], 300) == []
    assert not ladder.in_trouble and ladder.learning_rate_scale == scale
    (back,) = decide(ladder, calm[150:], 450)
    assert back[1] == "return" and 2200 < back[0] < 2600


@pytest.mark.parametrize("seed", range(5))
def test_healthy_losses_do_not_drift(seed):
    rng = np.random.default_rng(seed)
    falling = 1.5 + 2.5 * np.exp(-np.arange(4000) / 400)
    noisy = falling * np.exp(0.1 * rng.standard_t(4, size=4000))
    assert decide(Ladder(), noisy) == []
    # Two kinds of batches by chance: the median leaps from one heap to the other.
    heaps = np.where(rng.random(4000) < 0.5, 0.2, 1.0) * np.exp(
        rng.normal(size=4000) / 9
    )
    assert "cut" not in {kind for _, kind in decide(Ladder(), heaps)}


def test_a_loss_that_jumps_and_comes_back_does_not_drift(rng):
    """New data: the losses are learnt down from far above, and end a little higher."""
    losses = 1.5 + 0.05 * rng.normal(size=400)
    losses[START:] += 0.1 + 2.0 * np.exp(-np.arange(400 - START) / 15)
    level = LossLevel()
    flags = []
    for loss in losses:
        level.observe(float(loss))
        flags.append(level.drift.up)
    assert not any(flags)


@pytest.mark.parametrize("low", [0.0, -1e3, -1e30])
@pytest.mark.parametrize("where", [slice(12, 20), slice(80, 81)])
def test_losses_that_are_wildly_low_are_no_rise_when_they_are_over(rng, where, low):
    losses = 1.5 + 2 * np.exp(-np.arange(400) / 60) + 0.1 * rng.normal(size=400)
    assert decide(Ladder(), losses) == []
    losses[where] = low
    assert decide(Ladder(), losses) == []


def test_a_rise_that_lasts_becomes_the_level():
    level = LossLevel()
    rng = np.random.default_rng(0)
    risen = diverging(rng, 300)
    flags = []
    for loss in [*risen, *(risen[-1] + 0.1 * rng.normal(size=4000))]:
        level.observe(float(loss))
        flags.append(level.drift.up)
    assert any(flags) and not any(flags[-1000:])


def fall(ladder, losses, target):
    """Feeds losses, then the rollback of the last step to `target`."""
    decide(ladder, losses)
    seen = Observation(len(losses) - 1, loss=float(losses[-1]))
    ladder.rolled_back(seen, target, (0, 0))


def test_a_rollback_from_a_slow_rise_slows_down_and_one_from_a_blow_does_not(rng):
    risen = diverging(rng, START + 40)  # by 8 %: not yet enough for a cut of its own
    ladder = Ladder()
    fall(ladder, [*risen, *[4.0] * 5], START)
    assert ladder.learning_rate_scale == 0.5
    ladder = Ladder()
    fall(ladder, [*risen[:START], *[4.0] * 5], START - 20)
    assert ladder.learning_rate_scale == 1.0


def test_a_rollback_takes_the_losses_of_its_steps_out_of_the_level(rng):
    risen = diverging(rng, 300)
    ladder, reference = Ladder(), LossLevel()
    for loss in risen[:START]:
        reference.observe(float(loss))
    fall(ladder, risen[: START + 60], START)
    assert ladder.get_state()["level"] == reference.get_state()[60:]
    assert not ladder.in_trouble


def test_memory_of_the_lowest_level_survives_json(rng):
    losses = diverging(rng)
    first, second = Ladder(), Ladder()
    decide(first, losses[:232])
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert decide(second, losses[232:], 232) == decide(first, losses[232:], 232) != []
