"""A guard that knows the ranges of a healthy run, from its first step on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil import curves
from stabil.vocabulary import Severity

pytestmark = pytest.mark.usefixtures("standard_promotion")
NAMES = ("mlp", "attn")


def baseline(rng, steps=400):
    """Records of a healthy run, as a sink writes them."""
    noise = np.exp(np.array([0.02, 0.1, 0.05, 0.5]) * rng.normal(size=(steps, 4)))
    names = (
        "loss",
        "grads/global_norm",
        "activations/mlp/absmax",
        "activations/attn/absmax",
    )
    return [dict(zip(names, row, strict=True), step=i) for i, row in enumerate(noise)]


def play(calibration, losses, tables):
    """Verdicts `[steps]` and names of the signals, for rows `[steps, 2]`."""
    tx = stabil.guard(optax.sgd(0.1), max_readings=2, calibration=calibration)
    names = []

    @jax.jit
    def run(losses, tables):
        def step(state, row):
            loss, table = row
            readings = stabil.Readings(table[:, None], NAMES, ("absmax",))
            _, state = tx.update(
                {"w": jnp.ones(1)}, state, loss=loss, readings=readings
            )
            v = stabil.vitals(state, readings=readings)
            names[:] = v.signals
            return state, v.verdict

        return jax.lax.scan(step, tx.init({"w": jnp.ones(1)}), (losses, tables))[1]

    return run(jnp.float32(losses), jnp.asarray(tables, jnp.float32)), names


def test_limits_hold_from_the_first_step_and_noise_is_respected(tmp_path, rng):
    ranges = curves.calibrate_records(baseline(rng))
    curves.save_calibration(ranges, tmp_path / "ranges.json")
    steps = 120
    losses, tables = np.ones(steps), np.exp(0.02 * rng.normal(size=(steps, 2)))
    # Past the limit of 100 times at step 5, within the warm-up, without a leap.
    tables[:, 0] *= np.minimum(3.0 ** np.arange(steps), 300)
    tables[90, 1] *= 18  # far for what this run has seen, not for the baseline
    losses[110] = 500.0
    verdict, names = play(tmp_path / "ranges.json", losses, tables)
    severity = np.asarray(verdict.severity)
    assert np.flatnonzero(severity >= Severity.WARN).tolist() == [5, 110]
    assert [names[i] for i in verdict.first[np.array([5, 110])]] == [
        "activations/mlp",
        "loss",
    ]
    assert severity[90] == Severity.OK
    plain, _ = play(None, losses, tables)
    assert plain.severity[5] == Severity.OK and plain.severity[90] == Severity.WATCH


@pytest.mark.parametrize("wrong, error", [("", ValueError), (3, TypeError)])
def test_what_is_no_calibration_is_explained(tmp_path, wrong, error):
    if wrong == "":
        wrong = tmp_path / "file.json"
        wrong.write_text("{}")
    text = "guard: needed the file that stabil calibrate wrote"
    with pytest.raises(error, match=text):
        stabil.guard(optax.sgd(0.1), calibration=wrong)
