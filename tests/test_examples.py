"""The examples run, and do what they say."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax is not clean under strict promotion, and examples are what users write."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_step_survives_its_broken_batch(capsys):
    losses = load("train_step").main(120)
    assert losses[60] > 1e6 and np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < 0.2 * losses[0]
    said = capsys.readouterr().out
    assert said.count("gradient_spike") == 1


def test_train_step_fits_on_a_screen_and_a_half():
    assert len((EXAMPLES / "train_step.py").read_text().splitlines()) < 80


def test_restore_continues_bit_for_bit(tmp_path, capsys):
    load("restore").main(tmp_path / "run")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "restored step 60",
        "the continued run equals the uninterrupted one bit for bit",
    ]
