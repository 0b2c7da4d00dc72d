"""A rollback is weighed against the chance that the loss comes back by itself."""

import json
import math
import os
import pathlib
import re
import sys

import numpy as np
import pytest

from stabil.policy import Case, Ladder, Observation, Recovery
from stabil.policy._recovery import PRECISION, START, _inputs, fit

ROOT = pathlib.Path(__file__).parents[2]


def calm(steps, first=0):
    noise = np.random.default_rng(0).normal(0, 0.02, steps)
    return [
        Observation(first + i, loss=2.0 + noise[i], grad_norm=0.5) for i in range(steps)
    ]


def high(steps, first=100, loss=2.3, grad_norm=1.0):
    """A rise that was warned of and then lasts."""
    warned = Observation(first, 2, ("loss_spike",), "loss", loss, grad_norm)
    rest = [
        Observation(first + i, loss=loss, grad_norm=grad_norm) for i in range(1, steps)
    ]
    return [warned, *rest]


def price(load=600.0, redone=100, step=1.0, asked=None):
    def ask(question):
        if asked is not None:
            asked.append(question)
        numbers = dict(load_seconds=load, step_seconds=step)
        return question | numbers | dict(redone_steps=redone + question["high_steps"])

    return ask


def choices(ladder, stream, costs):
    wanted = ("wait", "rollback", "recovered")
    return [
        (o.step, a)
        for o in stream
        for a in ladder.decide(o, costs)
        if a.kind in wanted and not a.report_only
    ]


def test_a_dear_rollback_waits_by_doubling_until_the_limit():
    found = choices(Ladder(longest_wait_steps=150), calm(100) + high(400), price())
    steps = [(step, a.kind) for step, a in found]
    # High for 60 steps: wait 60 more; then the 90 that are left; then no more.
    assert steps[:3] == [(159, "wait"), (219, "wait"), (309, "rollback")]
    numbers = found[0][1].numbers
    p = numbers["recovery_probability"]
    assert numbers["wait_steps"] == numbers["high_steps"] == 60
    assert numbers["rollback_seconds"] == 700.0  # load, and 100 steps of a second
    assert numbers["saving_seconds"] == p * 700 - (1 - p / 2) * 60 > 60
    assert math.isclose(numbers["height"], math.log(2.3 / 2.0), abs_tol=0.01)
    assert math.isclose(numbers["gradient"], math.log(2.0), abs_tol=0.001)
    assert found[0][1].reason == (
        "the loss stayed high for 60 steps; a rollback costs 700 seconds, and with "
        f"probability {p:.2f} the loss is back within 60 steps"
    )
    assert json.loads(json.dumps(numbers)) == numbers


def test_a_cheap_rollback_comes_at_once_and_says_what_was_weighed():
    costs = price(load=10.0)
    ((step, action), *_) = choices(Ladder(), calm(100) + high(70), costs)
    assert (step, action.kind) == (159, "rollback")
    assert action.numbers["saving_seconds"] < 60 and action.numbers["before"] == 101
    assert action.numbers["rollback_seconds"] == 110.0


@pytest.mark.parametrize("costs", [None, price()])
def test_without_costs_or_with_an_infinite_least_saving_nothing_waits(costs):
    ladder = Ladder(least_saving_seconds=math.inf) if costs else Ladder()
    found = choices(ladder, calm(100) + high(70), costs)
    assert [(s, a.kind) for s, a in found][:1] == [(159, "rollback")]


def test_blocked_steps_and_damage_never_wait():
    asked, bad = [], dict(severity=3, causes=("nonfinite_gradient",))
    stream = calm(50) + [Observation(50 + i, **bad) for i in range(3)]
    found = choices(Ladder(), stream, price(load=1e9, asked=asked))
    assert [(s, a.kind) for s, a in found] == [(52, "rollback")]
    seen = Observation(50, damaged="params/w", **bad)
    assert Ladder().decide(seen, price(load=1e9, asked=asked))[-1].kind == "rollback"
    assert asked == []


def test_gentle_measures_go_on_while_the_loss_is_waited_for():
    ladder = Ladder()
    kinds = [
        (o.step, a.kind)
        for o in calm(100) + high(130)
        for a in ladder.decide(o, price())
        if a.kind in ("reset", "cut", "wait", "rollback")
    ]
    waited = [k for s, k in kinds if s > 159]
    assert (159, "wait") in kinds and "cut" in waited and "rollback" not in waited


def test_a_loss_that_comes_back_is_told_and_learnt_from():
    ladder = Ladder()
    stream = calm(100) + high(20) + calm(60, 120)
    ((step, action),) = choices(ladder, stream, price())
    assert (step, action.kind) == (120, "recovered")
    # High for 4, 8 and 16 steps: not back at 8 and 16, but before 32.
    lessons = action.numbers["lessons"]
    assert [(row[0], row[3]) for row in lessons] == [(4, 0.0), (8, 0.0), (16, 1.0)]


def test_lessons_move_the_probability_and_survive_json():
    first, chances = Ladder(), []
    for n in range(6):
        choices(first, calm(100, 400 * n), price())
        choices(first, high(20, 400 * n + 100), price())
        found = choices(first, calm(280, 400 * n + 120), price())
        assert [a.kind for _, a in found] == ["recovered"]
        chances.append(first._choice.recovery.probability(Case(16, 0.14, 0.7)))
    assert chances == sorted(chances) and chances[-1] > chances[0] + 0.01
    second = Ladder()
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second._choice.recovery.weights == first._choice.recovery.weights


def test_a_rollback_cuts_lessons_short_and_they_do_not_count():
    ladder = Ladder()
    stream = calm(100) + high(60)
    found = choices(ladder, stream, None)
    assert found[-1][1].kind == "rollback"
    before = len(ladder._choice.recovery.lessons)  # not back at 8, 16 and 32
    ladder.rolled_back(stream[-1], 90, (90, 160))
    choices(ladder, calm(60, 90), None)
    assert before == len(ladder._choice.recovery.lessons) == 3


def test_the_fit_is_the_most_likely_one(rng):
    """Against plain gradient ascent in float64."""
    x = np.stack([np.ones(40), *rng.normal(size=(3, 40))], axis=1)
    y = (rng.uniform(size=40) < 0.6).astype(float)
    w, mean, prior = np.array(START), np.array(START), np.array(PRECISION)
    for _ in range(20_000):
        p = 1 / (1 + np.exp(-x @ w))
        w = w + 0.01 * (x.T @ (y - p) - prior * (w - mean))
    np.testing.assert_allclose(fit(x, y, START, PRECISION), w, atol=1e-6)


def test_odd_cases_keep_the_probability_finite():
    recovery = Recovery()
    for case in (Case(1, 0.0, 1e9), Case(10**9, 1e9, -1e9), Case(4, 0.0, math.inf)):
        recovery.learn(case, True)
        recovery.learn(case, False)
        assert 0 < recovery.probability(case) < 1
    assert np.all(np.isfinite(recovery.weights))


def test_a_loss_around_zero_has_a_height_and_an_unknown_gradient_none():
    ladder = Ladder(longest_wait_steps=100)
    rng, asked = np.random.default_rng(0), []
    stream = [Observation(i, loss=rng.normal(0, 0.02)) for i in range(100)]
    stream += high(61, loss=-0.0 + 0.5, grad_norm=math.nan)
    choices(ladder, stream, price(asked=asked))
    assert asked[0]["height"] > 1 and asked[0]["gradient"] == 0.0


def test_a_decision_between_the_two_is_the_same_with_the_same_numbers():
    stream = calm(100) + high(300)
    found = [choices(Ladder(), stream, price()) for _ in range(2)]
    assert found[0] == found[1]


def test_the_start_is_what_the_labelled_curves_say():
    default = ROOT.parent / "shared" / "curves"
    folder = pathlib.Path(os.environ.get("STABIL_CURVES", default))
    if not (folder / "labels.csv").is_file():
        pytest.skip(f"no labelled curves in {folder}")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import recovery
    finally:
        sys.path.pop(0)
    told = recovery.weights(recovery.read(folder))
    np.testing.assert_allclose(told, START, atol=0.006)
    assert len(_inputs(Case(5, 0.1, 0.0))) == len(START)


@pytest.mark.parametrize("name", ["least_saving_seconds", "longest_wait_steps"])
def test_errors_say_what_to_write(name):
    text = (
        f"Ladder: needed {name} >= 0, got -1; least_saving_seconds=math.inf never waits"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Ladder(**{name: -1})
