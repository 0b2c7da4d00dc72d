"""Damage is found in what the user trains, and not in what stabil measures."""

import jax
import jax.numpy as jnp
import optax
import pytest

import stabil
from stabil.policy import Observation
from stabil.session._flight import DamageCheck, first_nonfinite
from stabil.vocabulary import Measures, Severity

PARAMS = {"w": jnp.ones(3), "b": jnp.ones([])}


@pytest.mark.parametrize(
    "tx",
    [
        stabil.guard(optax.adam(1e-3)),
        optax.chain(stabil.spike_aware(), optax.adam(1e-3)),
        optax.MultiSteps(stabil.guard(optax.adam(1e-3)), 2),
    ],
    ids=["guard", "link", "accumulation"],
)
def test_a_fresh_state_is_sound_though_nothing_was_measured(tx):
    state = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
    leaves = jax.tree.leaves(state)
    assert any(not bool(jnp.all(jnp.isfinite(x))) for x in leaves)
    assert first_nonfinite(state) is None


def test_moments_inside_a_guard_are_looked_at():
    opt_state = stabil.guard(optax.adam(1e-3)).init(PARAMS)
    adam = opt_state.inner_state[0]
    adam = adam._replace(nu=adam.nu | {"w": jnp.full(3, jnp.inf)})
    opt_state = opt_state._replace(inner_state=(adam, *opt_state.inner_state[1:]))
    state = {"opt_state": opt_state, "params": PARAMS}
    assert first_nonfinite(state) == "opt_state/inner_state/0/nu/w"
    assert first_nonfinite(opt_state) == "inner_state/0/nu/w"


def test_parameters_are_named_first():
    bad = {"w": jnp.full(3, jnp.nan)}
    assert first_nonfinite({"mu": bad, "params": bad}) == "params/w"
    assert first_nonfinite((bad, Measures.unmeasured())) == "0/w"


def test_a_state_without_floats_is_sound():
    assert first_nonfinite({"step": jnp.int32(3), "key": jax.random.key(0)}) is None
    assert first_nonfinite(Measures.unmeasured()) is None


def test_a_state_is_looked_at_whole_before_it_is_kept():
    """The guard samples the parameters; a leaf may be spoilt where it does not look."""
    seen, good = Observation(7), {"best": jnp.float32(jnp.inf), "params": PARAMS}
    check = DamageCheck()
    check.begin(good)
    spoilt = good | {"params": PARAMS | {"w": jnp.float32([1, jnp.nan, 1])}}
    assert check(seen, good, True) == seen
    assert check(seen, spoilt, False) == seen
    found = check(seen, spoilt, True)
    assert found.damaged == found.first == "params/w"
    assert found.causes == ("nonfinite_parameter",) and found.severity == Severity.WARN
