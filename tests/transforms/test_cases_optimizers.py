"""Public bug reports about momentum, learning rates and schedules, as tests."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_reset_moments import at, play

import stabil
from stabil.transforms import (
    backoff,
    lost_updates,
    reset_moments,
    scale_by_adaclip,
    scale_by_adafn,
    scale_by_spam,
    scale_by_stable_spam,
    stable_spam,
)
from stabil.vocabulary import Cause, Controls, Verdict

pytestmark = pytest.mark.usefixtures("standard_promotion")
SPIKE = Verdict.clear()._replace(flags=jnp.int32(int(Cause.LOSS_SPIKE)))

# Lowering the learning rate must have an effect. ------------------------------------


def test_the_fault_itself():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda step: 1.0)
    state = tx.init(jnp.ones(1))
    state.hyperparams["learning_rate"] = jnp.float32(0.1)
    update, _ = tx.update(jnp.ones(1), state)
    assert update[0] == -1.0  # the schedule overwrote the intervention


SCHEDULES = {
    "injected": lambda s: optax.inject_hyperparams(optax.sgd)(learning_rate=s),
    "scheduled": optax.sgd,
    "warm restarts": lambda s: optax.chain(optax.identity(), optax.sgd(s)),
    "nested": lambda s: optax.MultiSteps(optax.sgd(s), 1).gradient_transformation(),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_undoes_a_cut(name):
    """Every later update is the schedule's times the cut's own factor."""
    schedule = optax.linear_schedule(1.0, 0.5, 40)
    inner = SCHEDULES[name](schedule)
    tx = backoff(inner, factor=0.5, incident_steps=10, return_steps=20)
    grads = jnp.ones([40, 1])
    plain, _ = play(inner, grads)
    cut, state = play(tx, grads, {"verdict": at(5, 40, SPIKE)})
    ratio = np.asarray(cut / plain)[:, 0]
    np.testing.assert_allclose(ratio, state.scale, rtol=1e-6)
    assert np.all(ratio[5:16] == 0.5) and np.all(np.diff(ratio[15:35]) > 0)
    assert np.all(ratio[35:] == 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_undoes_the_hosts_request(name):
    inner = SCHEDULES[name](lambda step: 1.0)
    wish = jax.tree.map(lambda a: jnp.broadcast_to(a, (6,)), Controls.untouched())
    wish = wish._replace(learning_rate_scale=jnp.array([1, 1, 0.1, 0.1, 1, 1.0]))
    updates, _ = play(backoff(inner), jnp.ones([6, 1]), {"controls": wish})
    np.testing.assert_allclose(-updates[:, 0], wish.learning_rate_scale, rtol=1e-6)


def test_around_a_guard_its_verdict_cuts_and_resets():
    """The guard's own verdict counts, not that of the clip inside it."""
    loss = jnp.full([60], 2.0).at[::2].add(0.05).at[50].set(40.0)
    grads = jnp.ones([60, 2]).at[::2].add(0.1).at[55, 0].set(jnp.nan)
    guarded = stabil.guard(optax.adam(1.0))
    tx = backoff(
        reset_moments(guarded, on=Cause.LOSS_SPIKE, warmup_steps=1),
        on=Cause.NONFINITE_GRADIENT,
    )
    updates, state = play(tx, grads, {"loss": loss})
    assert np.all(np.asarray(updates[55]) == 0) and np.all(np.isfinite(updates))
    assert state.cuts[55] == 0 and state.cuts[56] == 1
    resets = np.asarray(state.inner_state.resets)[:, 0]
    assert resets[50] == 0 and resets[51] == 1 and resets[-1] == 1
    assert state.inner_state.inner_state.tally.blocked_steps[-1] >= 1


# A reset must not be followed by a large step. ---------------------------------------


@pytest.mark.parametrize("what", ["first", "both", "one leaf"])
def test_adam_after_a_thousand_steps(rng, what):
    steps, when = 1060, 1000
    grads = {
        "a": jnp.asarray(rng.standard_normal([steps, 200]), jnp.float32),
        "b": jnp.asarray(rng.standard_normal([steps, 200]), jnp.float32),
    }
    names = {"nu": "kept"} if what == "first" else None
    chosen = "b" if what == "one leaf" else "*"
    inner = optax.adam(1.0)
    tx = reset_moments(inner, names=names, where=chosen, warmup_steps=10)
    reset = jnp.stack([at(when, steps)] * 2, axis=1)
    updates, state = play(tx, grads, {"reset_leaves": reset})
    plain, _ = play(inner, grads)
    for leaf in ("a", "b"):
        size = np.sqrt(np.mean(np.square(updates[leaf]), axis=1))
        assert size[when:].max() < 1.15 * size[900:when].mean()
        same = np.allclose(updates[leaf][when:], plain[leaf][when:], rtol=1e-3)
        assert same == (what == "one leaf" and leaf == "a")
    assert state.inner_state[0].count[-1] == steps


def test_restarting_every_leaf_for_one_is_not_periodic_spikes(rng):
    """Resets over and over, each warmed up: no update ever exceeds the usual one."""
    grads = jnp.asarray(rng.standard_normal([700, 300]), jnp.float32)
    for inner in (optax.adam(1.0), optax.lion(1.0), optax.sgd(1.0, momentum=0.9)):
        plain, _ = play(inner, grads)
        usual = np.sqrt(np.mean(np.square(plain), axis=1))[300:].max()
        updates, _ = play(reset_moments(inner, every_steps=70, warmup_steps=30), grads)
        size = np.sqrt(np.mean(np.square(updates), axis=1))
        assert size[69:].max() < 1.1 * usual  # Adam's own first steps are large


# Variants must be finite from the first update, and say what they do. ----------------


@pytest.mark.parametrize(
    "make", [scale_by_spam, scale_by_stable_spam, scale_by_adaclip, scale_by_adafn]
)
def test_empty_statistics_and_zero_gradients(rng, make):
    """Zeros at first, rows that stay zero, then normal gradients; empty leaves too."""
    grads = rng.standard_normal([6, 4, 3]) * 1e-4
    grads[0] = 0
    grads[:, 2] = 0  # an unused row of an embedding
    dtypes = ("bfloat16", "float16", "float32")
    tree = {dtype: jnp.asarray(grads, dtype) for dtype in dtypes}
    tree["unused"] = jnp.zeros([6, 3], jnp.float16)
    tree["empty"] = jnp.zeros([6, 0, 2])
    updates, state = play(make(), tree)
    for leaf in jax.tree.leaves((updates, state)):
        assert np.all(np.isfinite(np.asarray(leaf, np.float64)))
    assert np.all(np.asarray(updates["unused"], np.float32) == 0)
    for dtype in dtypes:
        assert updates[dtype].dtype == dtype
        assert np.all(np.asarray(updates[dtype], np.float32)[:, 2] == 0)
        assert np.any(np.asarray(updates[dtype], np.float32)[-1] != 0)


def test_the_fault_of_half_precision_zeros():
    zero = jnp.zeros(2, jnp.float16)
    tx = optax.scale_by_adam()
    update, _ = tx.update(zero, tx.init(zero))
    assert np.all(np.isnan(np.asarray(update, np.float32)))


@pytest.mark.parametrize(
    "make", [scale_by_spam, scale_by_stable_spam, scale_by_adaclip, scale_by_adafn]
)
def test_defaults_equal_the_documents(make):
    """Where a docstring quotes the paper's or the code's value, it is the default."""
    own = {k: p.default for k, p in inspect.signature(make).parameters.items()}
    entries = re.split(r"^      (?=\w+: )", make.__doc__, flags=re.M)
    checked = 0
    for entry in entries:
        found = re.search(r"(?:Paper|Released code): ([\d.]+(?:e-?\d+)?)", entry)
        name = entry.split(":")[0]
        if found and name in own:
            assert float(found[1].rstrip(".")) == own[name], name
            checked += 1
    assert checked >= 1


def test_unknown_names_are_refused():
    for option in ("theta", "total_T", "update_proj_gap", "beta1"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            stable_spam(1e-3, **{option: 1})


# Updates that rounding swallows must be seen. ----------------------------------------


def test_lost_updates_are_counted_and_warned_of():
    params = {"half": jnp.ones(4, jnp.bfloat16), "wide": jnp.ones(4)}
    tx = optax.chain(optax.sgd(1e-3), lost_updates(limit=0.5, decay=0.5))
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(params, state, params)
    assert np.all(optax.apply_updates(params, updates)["half"] == 1.0)  # the fault
    assert state[-1].share.tolist() == [1.0, 0.0]
    assert bool(state[-1].warn)
    large = {"half": params["half"] * 10, "wide": params["wide"]}
    for _ in range(3):
        updates, state = update(large, state, params)
    assert state[-1].share.tolist() == [0.0, 0.0] and not bool(state[-1].warn)


def test_zero_updates_are_not_lost_and_partial_loss_is_a_share():
    params = jnp.array([1.0, 1.0, 100.0, 0.0], jnp.bfloat16)
    tx = lost_updates()
    for update, share in (
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([1e-3, 1e-1, 1e-1, 1e-9], 0.5),
        ([1e-3, np.nan, 0.0, 0.0], 1.0),
    ):
        given = jnp.array(update, jnp.bfloat16)
        out, state = tx.update(given, tx.init(params), params)
        assert state.share.tolist() == [share]
        np.testing.assert_array_equal(out, jnp.nan_to_num(given))


def test_lost_updates_errors():
    with pytest.raises(
        ValueError, match=r"^lost_updates: needed 0 < limit <= 1, got 2\.0$"
    ):
        lost_updates(limit=2.0)
    text = (
        "lost_updates: needed params, whose rounding it measures, got None; write "
        "tx.update(grads, opt_state, params)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        lost_updates().update(jnp.ones(1), lost_updates().init(jnp.ones(1)))
