"""Vitals are found wherever the guard or the clip sits, and name what they saw."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.vocabulary import Severity

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"a": jnp.ones([3, 2]), "b": jnp.ones([2])}
GRADS = {"a": jnp.full([3, 2], 0.1), "b": jnp.full([2], 0.2)}
BAD = {"a": GRADS["a"], "b": jnp.array([0.2, jnp.nan])}


def guarded():
    return stabil.guard(optax.adam(1e-3))


NESTINGS = {
    "guard": guarded,
    "link": lambda: optax.chain(stabil.spike_aware(), optax.adamw(1e-3)),
    "chain": lambda: optax.chain(optax.identity(), guarded()),
    "masked": lambda: optax.masked(guarded(), {"a": True, "b": True}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: stabil.guard(optax.adam(learning_rate))
    )(learning_rate=1e-3),
    "partition": lambda: optax.partition(
        {"x": guarded(), "y": guarded()}, {"a": "x", "b": "y"}
    ),
    "conditional": lambda: optax.conditionally_mask(guarded(), lambda step: step >= 0),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_found_through(name):
    tx = NESTINGS[name]()
    state = tx.init(PARAMS)
    assert stabil.vitals(state, params=PARAMS).severity == Severity.OK
    updates, state = tx.update(GRADS, state, PARAMS)
    assert np.all(np.isfinite(updates["b"]))
    updates, state = tx.update(BAD, state, PARAMS)
    v = stabil.vitals(state)
    assert v.severity == Severity.BLOCK
    assert v.causes == ("nonfinite_gradient",)
    assert v.first == "grads/b"
    assert int(v.tally.judged_steps) == 2
    if name == "link":
        # The link zeroes the gradient; the optimizer after it still moves.
        assert np.all(np.isfinite(updates["a"]))
    elif name == "partition":
        assert np.any(updates["a"]) and not np.any(updates["b"])
    else:
        assert not np.any(updates["a"]) and not np.any(updates["b"])


def test_found_through_multi_steps():
    tx = optax.MultiSteps(guarded(), every_k_schedule=2)
    state = tx.init(PARAMS)
    for grads in (GRADS, GRADS, GRADS, BAD):
        updates, state = tx.update(grads, state, PARAMS)
    v = stabil.vitals(state)
    assert (v.severity, int(v.tally.judged_steps)) == (Severity.BLOCK, 2)
    assert not np.any(updates["a"])


def test_several_guards_join_their_counts_and_norms():
    tx = NESTINGS["partition"]()
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    norm = np.sqrt(6 * 0.1**2 + 2 * 0.2**2)
    np.testing.assert_allclose(stabil.vitals(state).measures.grad_norm, norm, rtol=1e-6)


def test_names_come_from_params_or_a_mirror_or_numbers():
    tx = stabil.guard(optax.sgd(1e-3))
    _, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
    assert stabil.vitals(state).first == "grads/leaf_1"
    assert stabil.vitals(state, params=PARAMS).first == "grads/b"
    assert stabil.vitals(state, params=PARAMS).signals == (
        "loss",
        "grads/global_norm",
        "grads/a",
        "grads/b",
        "moments/a",
        "moments/b",
        "updates/rms",
        "activations",
        "params/a",
        "params/b",
    )


def test_crosses_jit_and_vmap():
    tx = guarded()

    def step(grads):
        _, state = tx.update(grads, tx.init(PARAMS), PARAMS, loss=jnp.float32(2.5))
        return stabil.vitals(state, params=PARAMS)

    v = jax.jit(step)(BAD)
    assert v.first == "grads/b"
    scalars = v.scalars()
    shadow = {name: n for name, n in scalars.items() if name.startswith("shadow/")}
    assert len(shadow) == 15 and not any(shadow.values())
    assert {n: x for n, x in scalars.items() if n not in shadow} == {
        "loss": 2.5,
        "grads/global_norm": pytest.approx(np.nan, nan_ok=True),
        "grads/clip_factor": 0.0,
        "updates/rms": pytest.approx(np.nan, nan_ok=True),
        "verdict/severity": 3,
        "verdict/score": 0.0,
        "tally/judged_steps": 1,
        "tally/blocked_steps": 1,
        "tally/blocked_in_a_row": 1,
        "tally/clipped_steps": 0,
        "tally/resets": 0,
    }
    both = jax.tree.map(lambda *x: jnp.stack(x), GRADS, BAD)
    assert jax.vmap(step)(both).verdict.severity.tolist() == [0, 3]


def test_select_keeps_other_state_of_a_blocked_step():
    tx = guarded()
    _, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
    old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.full(2, jnp.nan)}
    v = stabil.vitals(state)
    np.testing.assert_array_equal(stabil.select(v, new, old)["mean"], old["mean"])
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    kept = stabil.select(stabil.vitals(state), old, new)
    np.testing.assert_array_equal(kept["mean"], old["mean"])
