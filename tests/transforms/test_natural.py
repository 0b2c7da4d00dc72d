"""The pieces of `benchmarks/natural.py`: language, data, scores, a short run."""

import pathlib
import sys

import numpy as np
import optax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import natural  # noqa: E402
import natural_model as model  # noqa: E402
import natural_runs as runs  # noqa: E402

import stabil  # noqa: E402


def test_the_language_is_told_by_the_token_before():
    table = model.language(0)
    rows = model.text(table, 400, np.random.default_rng(0))
    assert rows.shape == (400, model.LENGTH + 1)
    share = np.mean(rows[:, 1:] == table[rows[:, :-1]])
    expected = model.CLEAR + (1 - model.CLEAR) / model.VOCABULARY
    np.testing.assert_allclose(share, expected, atol=0.02)


def test_data_of_every_kind():
    plain = runs.data_for("plain", 0, 130)[0]
    assert plain.shape == (130, model.BATCH, model.LENGTH + 1)
    repeats = runs.data_for("repeats", 0, 130)[0]
    assert all(len(np.unique(repeats[t])) == 1 for t in (49, 50, 51, 99))
    assert len(np.unique(repeats[52])) > 1
    shift = runs.data_for("shift", 0, 130)[0]
    told = model.language(0)

    def clear(batch):
        return np.mean(batch[:, 1:] == told[batch[:, :-1]])

    noise = runs.data_for("noise", 0, 130)[0]
    assert clear(noise[31]) > 0.6 > 0.2 > clear(noise[32]) and clear(noise[40]) > 0.6
    assert clear(shift[64]) > 0.6 > 0.2 > clear(shift[65])


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_learns_and_every_setting_is_of_known_data(monkeypatch):
    monkeypatch.setattr(runs, "CHUNK", 2)
    assert {s.data for s in runs.SETTINGS} <= {"plain", "shift", "repeats", "noise"}
    pairs = [(3e-2, 0), (0.0, 0), (3e-2, 1)]
    result = runs.play("nothing", "plain", pairs, steps=20)
    assert np.shape(result.losses) == (3, 20) and np.shape(result.final) == (3,)
    assert result.final[0] < result.final[1] - 0.2
    # A chunk that is not full gives its own rows only.
    assert result.losses[2][0] != result.losses[0][0]


def test_sensitivity_and_table():
    final = [1.0, 1.2, 2.0, 2.2, 9.0, np.inf]  # three rates, two seeds
    expected = np.mean([0.0, 1.0, natural.INITIAL - 1.1])
    np.testing.assert_allclose(natural.sensitivity(final, 3), expected)
    rows = {
        "a": {"final": [1.0, 1.2, 1.1], "scores": [0.0, 0.0, 0.0]},
        "b": {"final": [1.1, 1.2, 1.05], "scores": [0.0, 0.0, 0.1]},
        "c": {"final": [2.0, 2.2, float("inf")], "scores": [0.1, 0.1, 0.1]},
    }
    found = natural.table(rows)
    assert found["a"]["best"] and found["b"]["within_noise_of_best"]
    assert not found["c"]["within_noise_of_best"] and found["c"]["lost"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_held_norm_saves_runs_with_batches_of_one_token(monkeypatch):
    """Most of five are lost without; nothing is planted in their gradients."""

    def guarded(**clip):
        def make(rate):
            adamw = optax.adamw(rate, b2=runs.B2)
            return stabil.guard(adamw, clip=stabil.spike_aware(**clip))

        return make

    both = {"held": guarded(), "never held": guarded(hold_steps=0)}
    monkeypatch.setattr(runs, "methods", lambda: both)
    pairs = [(2.5e-2, seed) for seed in range(5)]
    assert np.all(runs.play("held", "repeats", pairs).final < 1.4)
    assert np.sum(runs.play("never held", "repeats", pairs).final > 3) >= 3
