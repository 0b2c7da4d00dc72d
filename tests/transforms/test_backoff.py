"""Backoff: one bounded cut for one incident, a gradual return, nothing undoes it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_reset_moments import at, check_idle, idle_pair, play

from stabil.transforms import backoff
from stabil.vocabulary import Cause, Controls, Severity, Verdict

pytestmark = pytest.mark.usefixtures("standard_promotion")
SPIKE = Verdict.clear()._replace(flags=jnp.int32(int(Cause.LOSS_SPIKE)))
STEPS = 120


def spikes(*steps):
    found = jnp.zeros([STEPS], bool).at[jnp.asarray(steps)].set(True)
    return jax.tree.map(lambda a, b: jnp.where(found, a, b), SPIKE, Verdict.clear())


def scales(extra, inner=None, **options):
    config = dict(factor=0.5, floor=0.1, incident_steps=10, return_steps=20) | options
    tx = backoff(inner or optax.sgd(1.0), **config)
    updates, state = play(tx, jnp.ones([STEPS, 2]), extra)
    return -np.asarray(updates)[:, 0], state


@pytest.mark.bits
@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-2), optax.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
def test_idle_is_bit_identical(inner):
    check_idle(idle_pair(inner, backoff, controls=Controls.untouched()))


def test_cut_hold_and_return():
    scale, state = scales({"verdict": spikes(5)})
    assert np.all(scale[:5] == 1) and np.all(scale[5:16] == 0.5)
    assert np.all(np.diff(scale[15:35]) > 0) and np.all(scale[35:] == 1)
    np.testing.assert_allclose(scale[25], 0.5**0.5, rtol=1e-5)
    assert state.cuts[-1] == 1


def test_one_cut_for_one_incident():
    scale, state = scales({"verdict": spikes(5, 6, 7, 9, 14)})
    assert state.cuts[-1] == 1 and scale.min() == 0.5


def test_a_lasting_fault_stays_above_the_floor_and_is_given_back():
    scale, state = scales({"verdict": spikes(*range(5, 80))}, return_steps=30)
    assert state.cuts[-1] == 8
    np.testing.assert_allclose(scale.min(), 0.1, rtol=1e-6)
    assert scale[-1] == 1.0


def test_no_compounding_while_the_loss_improves():
    verdict = spikes(5, 20, 35)
    falling = jnp.linspace(5.0, 1.0, STEPS)
    rising = jnp.linspace(1.0, 5.0, STEPS)
    _, state = scales({"verdict": verdict, "loss": falling}, return_steps=1000)
    assert state.cuts[-1] == 1
    _, state = scales({"verdict": verdict, "loss": rising}, return_steps=1000)
    assert state.cuts[-1] == 3
    # Back at full rate, the next incident is cut whatever the loss does.
    _, state = scales({"verdict": spikes(5, 60), "loss": falling})
    assert state.cuts[-1] == 2


def test_a_loss_that_is_not_finite_changes_nothing():
    loss = jnp.ones(STEPS).at[7].set(jnp.nan).at[8].set(jnp.inf)
    _, state = scales({"loss": loss})
    assert np.all(np.isfinite(state.loss)) and state.losses[-1] == STEPS - 2


def test_a_level_instead_of_causes():
    severe = SPIKE._replace(severity=jnp.int32(int(Severity.WARN)))
    verdict = at(5, STEPS, severe)
    for on, cuts in ((Severity.WARN, 1), (Severity.BLOCK, 0), (None, 0)):
        _, state = scales({"verdict": verdict}, on=on)
        assert state.cuts[-1] == cuts


def test_controls_multiply_and_are_applied_once():
    controls = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (STEPS,)), Controls.untouched()
    )
    wish = controls.learning_rate_scale.at[20:].set(0.25)
    controls = controls._replace(learning_rate_scale=wish)
    inner = backoff(optax.sgd(1.0))
    extra = {"controls": controls, "verdict": spikes(5)}
    scale, state = scales(extra, inner=inner, return_steps=1000)
    np.testing.assert_allclose(scale[30], 0.25 * 0.5 * 0.5 ** (990 / 1000), rtol=1e-2)
    assert np.all(np.asarray(state.inner_state.scale[20:]) >= 0.5)


def test_the_state_survives_a_restore():
    tx = backoff(optax.sgd(1.0), factor=0.5)
    _, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), verdict=SPIKE)
    state = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state))
    update, _ = tx.update(jnp.ones(1), state)
    assert update.tolist() == [-0.5]


ERRORS = [
    (ValueError, dict(factor=1.0), "backoff: needed 0 <= factor < 1, got 1.0"),
    (ValueError, dict(factor=0.0), "backoff: needed factor > 0, got 0.0"),
    (ValueError, dict(floor=2.0), "backoff: needed 0 < floor <= 1, got 2.0"),
    (
        ValueError,
        dict(return_steps=0.5),
        "backoff: needed a whole number return_steps >= 1, got 0.5",
    ),
]


@pytest.mark.parametrize("kind, options, text", ERRORS)
def test_errors(kind, options, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        backoff(optax.sgd(1.0), **options)


def test_a_loss_must_be_scalar():
    tx = backoff(optax.sgd(1.0))
    text = (
        "backoff: needed a scalar loss, got one of shape (2,); write "
        "tx.update(grads, opt_state, params, loss=loss.mean())"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)), loss=jnp.ones(2))
