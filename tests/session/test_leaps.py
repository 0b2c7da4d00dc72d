"""A parameter that no update has made, where the guard's few columns do not meet it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.checkpoints import Keeper
from stabil.policy import Ladder, Observation, observe
from stabil.session._leaps import LeapCheck
from stabil.vocabulary import Severity

pytestmark = pytest.mark.usefixtures("standard_promotion")
TX = stabil.guard(optax.adam(1e-2))
PARAMS = {
    "dense": {"bias": jnp.zeros([8]), "kernel": jnp.eye(12, 8) * 0.3},
    "scale": jnp.ones([8]),
}
SIGNALS = stabil.vitals(TX.init(PARAMS), params=PARAMS).signals


def spoilt(params, size=100.0):
    """One entry of the kernel, in a column that the guard does not read."""
    kernel = params["dense"]["kernel"].at[3, 5].set(size)
    return params | {"dense": params["dense"] | {"kernel": kernel}}


def state_of(params):
    return {"opt": TX.init(params), "params": params, "ema": {"of": params}}


def look(check, params, step, is_kept=True, **seen):
    return check(Observation(step, **seen), state_of(params), SIGNALS, is_kept)


def test_an_entry_beyond_all_others_is_told_with_its_leaf():
    check = LeapCheck()
    assert look(check, PARAMS, 10) == Observation(10)
    found = look(check, spoilt(PARAMS), 20)
    assert found.leapt == found.first == "params/dense/kernel"
    assert found.causes == ("parameter_leap",) and found.severity == Severity.WARN


def test_what_grows_a_second_time_is_believed():
    check = LeapCheck()
    look(check, PARAMS, 10)
    assert look(check, spoilt(PARAMS), 20).leapt
    assert not look(check, spoilt(PARAMS), 15).leapt
    assert not look(check, PARAMS, 1100).leapt
    # Its 100 were believed and are no more: the last look counts.
    assert look(check, spoilt(PARAMS), 1200).leapt


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p | {"scale": p["scale"].at[2].set(3.9)},
        lambda p: jax.tree.map(lambda x: 50 * x, p),
        lambda p: p | {"dense": p["dense"] | {"bias": jnp.full([8], 50.0)}},
        lambda p: spoilt(p, 3.9),
    ],
    ids=["below four times the largest", "all grow", "a whole leaf", "small"],
)
def test_growth_is_no_leap(change):
    check = LeapCheck()
    look(check, PARAMS, 10)
    assert look(check, change(PARAMS), 20) == Observation(20)


def test_the_first_look_and_a_state_without_the_names_tell_nothing():
    assert look(LeapCheck(), spoilt(PARAMS), 10) == Observation(10)
    check, nothing = LeapCheck(), {"other": jnp.ones(3)}
    for step in (10, 20):
        seen = Observation(step)
        assert check(seen, nothing, SIGNALS, True) == seen


def test_a_look_is_taken_before_saves_at_powers_of_two_and_on_symptoms():
    check, taken = LeapCheck(), []
    look(check, PARAMS, 0)
    symptom = dict(severity=Severity.WATCH, causes=("activation_shift",))
    for step in range(1, 70):
        odd = symptom if step in (41, 44, 52) else {}
        if look(check, spoilt(PARAMS), step, step == 25, **odd).leapt:
            taken.append(step)
            check._told.clear()
    assert taken == [4, 8, 16, 25, 32, 41, 52, 64]


@pytest.mark.parametrize("policy", [Ladder, observe])
def test_a_session_goes_back_before_the_damage(tmp_path, policy):
    """Nothing that a step computes tells of it: only the look before the save does."""

    @jax.jit
    def train_step(params, opt_state, batch, controls):
        def loss_of(p):
            # The damaged column is not used.
            y = batch @ p["dense"]["kernel"][:, :4] + p["dense"]["bias"][:4]
            return jnp.mean((y * p["scale"][:4] - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = TX.update(
            grads, opt_state, params, loss=loss, controls=controls
        )
        vitals = stabil.vitals(opt_state, params=params)
        return optax.apply_updates(params, updates), opt_state, vitals

    rng = np.random.default_rng(0)
    batches = rng.normal(size=(100, 4, 12)).astype(np.float32)
    keeper = Keeper(tmp_path / "checkpoints", save_every=20)
    spoil, state = True, (PARAMS, TX.init(PARAMS))
    with stabil.Session(
        tmp_path / "run",
        checkpoints=keeper,
        policy=policy(),
        total_steps=60,
        progress=False,
    ) as session:
        for step, batch in session.steps(state, lambda i: batches[i]):
            params, opt_state, vitals = train_step(*state, batch, session.controls)
            if step == 45 and spoil:
                params, spoil = spoilt(params), False
            state = session.end_step((params, opt_state), vitals)
    acts = policy is Ladder
    wanted = "rollback" if acts else "would_rollback"
    (back,) = [e for e in session.summary()["events"] if e["action"] == wanted]
    assert (back["step"], back["layer"]) == (59, "params/dense/kernel")
    assert back["cause"] == "parameter_leap" and "no update has" in back["text"]
    # The state of step 40 had not proved itself yet.
    assert back["numbers"].get("to_step") == (20 if acts else None)
    assert (float(jnp.max(state[0]["dense"]["kernel"])) < 5) == acts
