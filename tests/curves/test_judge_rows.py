"""The judge of rows: what it must find, what it must leave alone, what it promises."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stabil.vocabulary
from stabil.curves import Judge, Signal, _judge

OK, WATCH, WARN, BLOCK = range(4)


def severities(losses, norms=None, every=1, judge=None):
    judge = Judge() if judge is None else judge
    norms = [None] * len(losses) if norms is None else norms
    pairs = zip(losses, norms, strict=True)
    return [judge.row(every * i, loss, norm) for i, (loss, norm) in enumerate(pairs)]


def noisy(rng, rows=400, level=3.0, noise=0.01):
    return level * np.exp(noise * rng.normal(size=rows))


def test_severities_are_those_of_the_vocabulary():
    names = ("OK", "WATCH", "WARN", "BLOCK")
    words = {s.name: int(s) for s in stabil.vocabulary.Severity}
    assert {n: getattr(_judge, n) for n in names} == words


def test_threshold_is_counted_from_the_mean(rng):
    losses = 3 + rng.uniform(-0.05, 0.05, size=300)
    assert not any(severities(losses))
    judge = Judge()
    severities(losses, judge=judge)
    noise = float(np.std(np.log(losses)))
    judge.row(300, 3 * math.exp(5 * noise))
    assert 3 < judge.loss_score < 6
    judge.row(301, 3 * math.exp(12 * noise))
    assert 6 < judge.loss_score < 14


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_an_event_and_enters_nothing(rng, bad):
    before = noisy(rng, 60)
    marked, plain = Judge(), Judge()
    severities(before, judge=marked)
    severities(before, judge=plain)
    assert marked.row(60, bad) == BLOCK
    for name in Signal.__slots__:
        assert getattr(marked.loss, name) == getattr(plain.loss, name)
    assert (marked.row(61, 9.0), marked.row(62, 9.0)) == (WATCH, WARN)


def test_only_nonfinite_values_block_even_when_there_is_nothing_else():
    assert severities([math.nan] * 50) == [BLOCK] * 50
    judge = Judge()
    severities([2.0] * 50, [math.inf] * 50, judge=judge)
    assert judge.nonfinite == 2


def test_a_nan_in_a_short_history_hides_nothing():
    assert severities([3.0, 3.0, 3.0, math.nan, 3.0, 3.0, 9.0]) == [0, 0, 0, 3, 0, 0, 2]


def test_a_huge_spike_does_not_hide_the_next():
    losses = [2.0] * 100 + [1e6] + [2.0] * 20 + [9.0] + [2.0] * 20
    found = severities(losses)
    assert (found[100], found[121]) == (WATCH, WATCH)
    assert sum(map(bool, found)) == 2


def test_start_of_a_run_is_left_alone(rng):
    falling = 3 + 8 * np.exp(-np.arange(500) / 60)
    assert not any(severities(falling * np.exp(0.01 * rng.normal(size=500))))


def test_blow_up_within_the_warm_up_is_found():
    losses = [12.4, 12.4, 44.0, 48.0, 47.0, 40.0, 30.0, 20.0, 12.0, 11.6]
    assert severities(losses) == [OK] * 2 + [WARN] * 4 + [OK] * 4


@pytest.mark.parametrize("every", [1, 100])
def test_lasting_shift_is_one_event_and_then_normal(rng, every):
    losses = np.concatenate([noisy(rng, 300, 2.1), noisy(rng, 300, 2.9)])
    found = np.array(severities(losses, every=every))
    at = np.flatnonzero(found >= WARN)
    assert 300 <= at[0] <= 303
    assert np.all(np.diff(at) == 1) and at[-1] < 300 + 200
    assert not np.any(found[at[-1] + 1 :])


def test_announced_change_is_no_event(rng):
    judge = Judge()
    assert not any(severities(noisy(rng, 300, 2.1), judge=judge))
    judge.announce()
    assert not any(severities(noisy(rng, 300, 2.9), judge=judge))


def test_losses_below_zero(rng):
    losses = -5 + 0.05 * rng.normal(size=200)
    judge = Judge()
    assert not any(severities(losses, judge=judge))
    assert judge.row(200, -2.0) >= WATCH
    assert judge.loss_score > 20
    assert judge.row(201, -5.0) == OK
    assert judge.row(202, -8.0) == OK


def test_a_constant_below_zero_and_one_worse_value():
    found = severities([-5.0] * 200 + [-2.0] + [-5.0] * 100)
    assert found[200] >= WATCH and sum(map(bool, found)) == 1


def test_a_run_that_turns_negative_keeps_its_level(rng):
    losses = np.linspace(1.0, -1.0, 400) + 0.02 * rng.normal(size=400)
    found = severities(losses)
    assert max(found) <= WATCH
    assert severities([*losses, 3.0])[-1] >= WATCH


def test_single_hard_batch_is_at_most_watch(rng):
    losses = noisy(rng)
    losses[200] *= 1.12
    found = severities(losses)
    assert found[200] == WATCH
    assert max(found) == WATCH


def test_blips_of_the_gradient_norm_are_at_most_watch(rng):
    losses, norms = noisy(rng), noisy(rng, level=0.3, noise=0.1)
    norms[200:202] *= 14
    norms[240] *= 20
    found = severities(losses, norms)
    assert [found[i] for i in (200, 201, 240)] == [WATCH] * 3
    assert max(found) == WATCH


@pytest.mark.parametrize("kind", ["laplace", "student", "gamma", "mixture"])
def test_noise_that_is_heavy_by_nature_raises_no_warning(rng, kind):
    draws = {
        "laplace": lambda n: np.exp(0.2 * rng.laplace(size=n)),
        "student": lambda n: np.exp(0.1 * rng.standard_t(3, size=n)),
        "gamma": lambda n: rng.gamma(2.0, size=n),
        "mixture": lambda n: np.exp(
            rng.choice([0.02, 0.3], size=n) * rng.normal(size=n)
        ),
    }
    for _ in range(5):
        found = severities(draws[kind](1000), draws[kind](1000))
        assert max(found[20:]) <= WATCH  # of fewer rows the noise is not known


def test_alternating_shards_are_left_alone(rng):
    shard = np.repeat(rng.integers(0, 2, size=40), 30)
    losses = noisy(rng, 1200) * np.exp(0.03 * shard)
    assert max(severities(losses)) <= WATCH


def test_a_row_that_stands_for_many_steps_is_evidence_by_itself(rng):
    losses, norms = noisy(rng), noisy(rng, level=0.3, noise=0.1)
    losses[200] *= 1.3
    norms[200] *= 10
    assert severities(losses, norms)[200] == WATCH
    assert severities(losses, norms, every=100)[200] == WARN
    assert severities(losses, every=100)[200] == WARN
    norms[200] = 0.3
    losses[200] = losses[199] * 1.1
    assert severities(losses, norms, every=100)[200] == WATCH


def test_values_held_over_several_rows_are_one_observation(rng):
    losses = np.repeat(np.exp(0.3 * rng.normal(size=400)), 4)
    losses[800:804] = 12.0
    found = severities(losses)
    assert max(found[20:]) == WATCH
    losses[800:804] = [12.0, 13.0, 12.5, 13.5]
    assert max(severities(losses)[800:804]) == WARN


def test_spikes_that_return_are_each_found(rng):
    losses = noisy(rng, 3000, noise=0.02)
    at = range(200, 3000, 200)
    for i in at:
        losses[i : i + 8] *= 2
    found = np.array(severities(losses))
    for i in at:
        assert np.max(found[i : i + 3]) >= WARN
    quiet = np.ones(3000, bool)
    for i in at:
        quiet[i : i + 8] = False
    assert not np.any(found[quiet] >= WARN)


@given(st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_scores_do_not_change_with_the_unit(unit, seed):
    rng = np.random.default_rng(seed)
    losses = noisy(rng, 120)
    losses[80:90] *= 1.5
    one, other = Judge(), Judge()
    for i, loss in enumerate(losses):
        assert one.row(i, loss, loss) == other.row(i, unit * loss, unit * loss)
        assert math.isclose(
            one.loss_score, other.loss_score, rel_tol=1e-6, abs_tol=1e-6
        )


@given(st.floats(-1e30, 1e30), st.integers(30, 300))
@settings(max_examples=50, deadline=None)
def test_constants_never_alarm(value, rows):
    assert not any(severities([value] * rows, [abs(value)] * rows))


@given(
    st.lists(st.floats(1e-30, 1e30), max_size=120),
    st.floats(1e-12, 1e12),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=50, deadline=None)
def test_any_finite_past_is_overcome(past, level, seed):
    """Within 300 rows of health, whatever came before, nothing is judged high."""
    judge = Judge()
    severities(past, past, judge=judge)
    rng = np.random.default_rng(seed)
    healthy = noisy(rng, 340, level)
    found = severities(healthy, healthy, judge=judge)
    assert not any(found[300:])


@given(st.lists(st.floats(width=64), max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_input_leaves_finite_state(values):
    judge = Judge()
    severities(values, values, judge=judge)
    for signal in (judge.loss, judge.norm):
        for name in ("level", "spread", "rise", "dips", "candidate", "wobble"):
            assert math.isfinite(getattr(signal, name))
