"""Finite damage to parameters: seen by their size, whatever the activations say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.testing import inject

pytestmark = pytest.mark.usefixtures("standard_promotion")
PARAMS = {
    "bias": jnp.zeros([6]),
    "crosses": jnp.full([1], -0.155),
    "gate": jnp.zeros([]),
    "kernel": jnp.ones([8, 6]),
}
NAMES = inject.names_in("parameters", PARAMS)
TX = stabil.guard(optax.adam(1e-2))


@jax.jit
def run(dial, rates, params, state):
    """Verdicts and parameters of as many steps as there are learning-rate scales."""

    def body(carry, step_and_rate):
        (params, state), (step, rate) = carry, step_and_rate
        params = inject.parameters(dial, step, params)
        key = jax.random.fold_in(jax.random.key(0), step)
        # Gradients that are sound whatever the parameters are.
        grads = jax.tree.map(
            lambda p: 1 + 0.3 * jax.random.normal(key, p.shape), params
        )
        controls = stabil.Controls.untouched()._replace(learning_rate_scale=rate)
        updates, state = TX.update(grads, state, params, controls=controls)
        vitals = stabil.vitals(state, params=params)
        params = optax.apply_updates(params, updates)
        return (params, state), (vitals, params)

    steps = jnp.arange(len(rates))
    return jax.lax.scan(body, (params, state), (steps, rates))[1]


def outcome(planted=None, rates=None, before=PARAMS, after=PARAMS):
    """Severities, causes and first signals of 40 steps, and the parameters after.

    The guard's state begins with the parameters `before`, the run with those `after`.
    """
    rates = np.ones(40) if rates is None else rates
    dial = inject.Dial.of(planted, NAMES)
    vitals, params = run(dial, jnp.float32(rates), after, TX.init(before))
    flags, firsts = np.asarray(vitals.verdict.flags), np.asarray(vitals.verdict.first)
    causes = [stabil.Cause.names(int(f)) for f in flags]
    named = [vitals.signals[i] if i >= 0 else None for i in firsts]
    return np.asarray(vitals.verdict.severity).tolist(), causes, named, params


def fault(where, kind, size=None, step=12):
    return inject.Fault(
        kind=kind, place="parameters", step=step, where=where, size=size
    )


@pytest.mark.parametrize("where", ["kernel", "bias", "gate"])
@pytest.mark.parametrize(
    "how",
    [
        ("scale", 4.0),
        ("scale", -1e6),
        ("scale", 1e30),
        ("garbage", 50.0),
        ("bit_flip",),
    ],
    ids=str,
)
def test_damage_is_blocked_at_once_and_named(where, how):
    severities, causes, named, params = outcome(fault(where, *how))
    assert severities[:16] == [0] * 12 + [3] * 4
    assert causes[12:16] == [("parameter_leap",)] * 4
    assert named[12:16] == [f"params/{where}"] * 4
    # Nothing is learnt on top of the damage while it is refused.
    clean = outcome()[3]
    for name in set(PARAMS) - {where}:
        np.testing.assert_array_equal(params[name][15], clean[name][11])


@pytest.mark.parametrize("how", [("scale", 0.01), ("garbage", 0.1)], ids=str)
def test_a_leaf_that_falls_to_nothing_is_blocked_once_its_changes_are_known(how):
    severities, causes, named, _ = outcome(fault("kernel", *how, step=25))
    assert severities == [0] * 25 + [3] * 4 + [0] * 11
    assert causes[25] == ("parameter_leap",) and named[25] == "params/kernel"
    assert outcome(fault("kernel", *how, step=12))[0] == [0] * 40
    # A leaf of one entry passes through zero, as training goes.
    severities, _, _, params = outcome(after=PARAMS | {"crosses": jnp.full([1], 0.253)})
    assert severities == [0] * 40
    assert np.abs(params["crosses"])[24:27].min() < 0.006


def test_damage_at_the_second_step_is_blocked_by_the_sizes_of_all_leaves():
    severities, causes, named, _ = outcome(fault("kernel", "scale", 100.0, step=1))
    assert severities == [0] + [3] * 4 + [0] * 35
    assert causes[1] == ("parameter_leap",) and named[1] == "params/kernel"
    # A small leaf may grow so, as a rate rises from nothing.
    rates = np.float32([1e-6, 1.0, 1.0, 1.0] + [1.0] * 36)
    assert outcome(rates=rates)[0] == [0] * 40


def test_refusal_of_finite_sizes_comes_to_an_end():
    severities, _, _, params = outcome(fault("bias", "scale", 100.0))
    assert severities == [0] * 12 + [3] * 4 + [0] * 24
    assert not np.array_equal(params["kernel"][-1], params["kernel"][12])


def test_what_is_not_finite_is_refused_for_good_and_named():
    severities, causes, named, _ = outcome(fault("kernel", "nan"))
    assert severities == [0] * 12 + [3] * 28
    assert all("nonfinite_parameter" in c for c in causes[12:])
    assert named[12:] == ["params/kernel"] * 28


def test_growth_from_nothing_and_faster_steps_are_no_damage():
    """A bias that starts at 0, one that crosses it, a rate that is raised tenfold."""
    severities, _, _, params = outcome(rates=np.where(np.arange(40) < 20, 0.1, 1.0))
    assert severities == [0] * 40
    assert params["crosses"][0] < 0 and params["bias"][-1][0] < -0.1
    severities, _, _, params = outcome()
    assert severities == [0] * 40


def test_without_parameters_nothing_is_judged():
    tx = stabil.guard(optax.sgd(1e-2))
    before = tx.init(PARAMS)
    _, state = jax.jit(lambda s: tx.update(PARAMS, s))(before)
    for a, b in zip(before.parameter_sizes, state.parameter_sizes, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(stabil.vitals(state).severity) == 0


def test_of_several_guards_the_right_leaf_is_named():
    labels = {"kernel": "x", "bias": "y", "gate": "y", "crosses": "x"}
    tx = optax.partition({n: stabil.guard(optax.sgd(1e-3)) for n in "xy"}, labels)

    @jax.jit
    def step_fn(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda p: p + 1, PARAMS)
    state, planted = tx.init(params), fault("bias", "scale", 9.0)
    for step in range(14):
        params = inject.parameters((planted,), step, params)
        params, state = step_fn(params, state)
    vitals = stabil.vitals(state)
    assert vitals.causes == ("parameter_leap",)
    assert vitals.first == "params/leaf_0"


def test_damage_is_seen_from_the_third_step_on():
    severities, causes, named, _ = outcome(fault("kernel", "scale", 100.0, step=2))
    assert severities[:3] == [0, 0, 3] and causes[2] == ("parameter_leap",)
    assert named[2] == "params/kernel"


def test_damage_between_init_and_the_first_step_is_blocked_and_named():
    damaged = PARAMS | {"kernel": PARAMS["kernel"].at[3].set(100.0)}
    severities, causes, named, _ = outcome(after=damaged)
    assert severities[:6] == [3] * 4 + [0] * 2  # bounded as at any step
    assert causes[:4] == [("parameter_leap",)] * 4
    assert named[:4] == ["params/kernel"] * 4


@pytest.mark.parametrize(
    "loaded",
    [
        {n: 50 * jnp.ones_like(x) for n, x in PARAMS.items()},
        {"kernel": 15 * PARAMS["kernel"]},
        {"kernel": 50 * PARAMS["kernel"], "crosses": jnp.full([1], -0.156)},
        {"kernel": 50 * PARAMS["kernel"], "bias": jnp.full([6], 1e-3, jnp.float32)},
        {"bias": jnp.full([6], 50.0, jnp.float32)},
    ],
    ids=["all", "one", "with a small one", "with a bias", "one that was 0"],
)
def test_parameters_that_are_put_in_after_init_are_no_damage(loaded):
    for before in (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)):
        assert outcome(before=before, after=PARAMS | loaded)[0] == [0] * 40


def test_init_without_values_knows_no_sizes():
    shapes = jax.eval_shape(lambda: PARAMS)
    state = stabil.guard(optax.sgd(0.1)).init(shapes)
    assert np.isnan(state.parameter_sizes.size).all()
    shaped = jax.eval_shape(TX.init, shapes)
    assert shaped == jax.eval_shape(lambda: TX.init(PARAMS))
