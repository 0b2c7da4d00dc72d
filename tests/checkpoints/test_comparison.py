"""Several processes compare clocks and signals seldom, and at the same steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from stabil.checkpoints import Keeper, _processes
from stabil.checkpoints._comparison import Comparison


class Clock:
    """Seconds that pass with the steps."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def table(monkeypatch):
    """Rows that the first process handed in; its own is all that there is."""
    rows = []

    def gathered(values):
        rows.append(values)
        return np.array([values])

    monkeypatch.setattr(_processes, "gathered", gathered)
    return rows


def ask(comparison, clock, steps, asked=lambda step: False):
    answers = []
    for step in steps:
        clock.now += clock.seconds
        answers.append(comparison.anywhere(step, asked(step), False))
    return answers


@pytest.mark.parametrize(
    ("seconds", "least", "most"), [(0.001, 2, 20), (0.1, 20, 30), (30.0, 1000, 1000)]
)
def test_about_one_in_five_seconds(table, seconds, least, most):
    clock = Clock(seconds)
    ask(Comparison(clock), clock, range(1000))
    assert least <= len(table) <= most


def test_steps_that_get_slower_are_compared_soon_again(table):
    clock = Clock(0.01)
    comparison = Comparison(clock)
    ask(comparison, clock, range(2000))
    before, clock.seconds = len(table), 20.0
    ask(comparison, clock, range(2000, 2600))
    assert len(table) - before >= 100


def test_a_signal_is_heard_at_the_next_comparison(table):
    clock = Clock(0.1)
    comparison = Comparison(clock)
    ask(comparison, clock, range(500))
    answers = ask(comparison, clock, range(500, 600), lambda step: step >= 510)
    assert not any(answers[:10]) and any(answers[10:61])


def test_another_clock_compares_at_the_same_steps(table, monkeypatch):
    fast, slow = Clock(0.01), Clock(3.0)
    steps = [*range(300), *range(100, 400)]  # a rollback in between
    ask(Comparison(fast), fast, steps, lambda step: step == 7)
    rows = iter(list(table))
    monkeypatch.setattr(
        _processes, "gathered", lambda values: np.array([next(rows), values])
    )
    second = Comparison(slow)
    ask(second, slow, steps)
    assert next(rows, None) is None


def test_to_ask_twice_about_one_step_costs_nothing(table):
    clock = Clock(1.0)
    comparison = Comparison(clock)
    assert comparison.anywhere(3, True, False)
    assert comparison.anywhere(3, False, False)
    comparison.saved()
    assert not comparison.anywhere(3, False, False)
    assert len(table) == 1


def test_a_keeper_of_several_with_a_small_cadence(tmp_path, table, monkeypatch):
    with Keeper(tmp_path, save_every=1000) as keeper:
        keeper.save(0, {"w": jnp.zeros(2)})
        with monkeypatch.context() as m:
            m.setattr(_processes, "alone", lambda: False)
            due = [keeper.due(step) for step in range(1, 1001)]
    assert due == [False] * 999 + [True] and len(table) < 30
