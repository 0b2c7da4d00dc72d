"""Momentum reset: idle, on request, by period, on a verdict; always warmed up."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stabil.transforms import reset_moments
from stabil.vocabulary import Cause, Controls, Severity, Verdict

pytestmark = pytest.mark.usefixtures("standard_promotion")
SPIKE = Verdict.clear()._replace(flags=jnp.int32(int(Cause.MOMENT_SPIKE)))


def play(tx, grads, extra=None, params=None):
    """Updates and states of every step, stacked."""
    params = jax.tree.map(lambda g: g[0], grads) if params is None else params

    def step(state, inputs):
        g, more = inputs
        updates, state = tx.update(g, state, params, **more)
        return state, (updates, state)

    return jax.jit(lambda s, x: jax.lax.scan(step, s, x)[1])(
        tx.init(params), (grads, extra or {})
    )


def at(step, steps, value=True):
    """Extra argument that is `value` on one step and False or clear on the others."""
    if isinstance(value, Verdict):
        return jax.tree.map(
            lambda a, b: jnp.stack([b if t == step else a for t in range(steps)]),
            Verdict.clear(),
            value,
        )
    return jnp.zeros([steps], bool).at[step].set(value)


@pytest.fixture
def grads(rng):
    return {
        "a": jnp.asarray(rng.standard_normal([60, 4, 3]), jnp.float32),
        "b": jnp.asarray(rng.standard_normal([60, 3]), jnp.float32),
    }


STEPS_IDLE = 40


def idle_pair(inner, wrap, **extra):
    """Parameters after a training run without and with a wrapper that has no cause."""
    r = np.random.default_rng(5)
    params = {
        "a": {"kernel": r.normal(size=(24, 48)) / 5, "bias": np.zeros(48)},
        "b": {"kernel": r.normal(size=(48, 24)) / 7, "bias": np.zeros(24)},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    xs = jnp.asarray(r.normal(size=(STEPS_IDLE, 32, 24)), jnp.float32)

    def loss_fn(p, x):
        h = jnp.tanh(x @ p["a"]["kernel"] + p["a"]["bias"])
        out = h @ p["b"]["kernel"] + p["b"]["bias"]
        return jnp.mean(jnp.square(out - jnp.sin(x)))

    def train(tx):
        @jax.jit
        def step(p, s, x):
            loss, grads = jax.value_and_grad(loss_fn)(p, x)
            updates, s = tx.update(grads, s, p, loss=loss, **extra)
            return optax.apply_updates(p, updates), s

        p, s = params, tx.init(params)
        for x in xs:
            p, s = step(p, s, x)
        return p, s

    plain = train(optax.with_extra_args_support(inner))
    wrapped, state = train(wrap(inner))
    return plain, (wrapped, state.inner_state)


def check_idle(pair):
    plain, wrapped = map(jax.tree.leaves, pair)
    for x, y in zip(plain, wrapped, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.bits
@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(optax.linear_schedule(0.0, 1e-2, 20)),
        optax.sgd(0.1, momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
def test_idle_is_bit_identical(inner):
    check_idle(idle_pair(inner, reset_moments))


def test_no_kick_and_a_warm_up(rng):
    """Adam at b2 = 0.999 long after its start: zeroed moments would kick 13.8 times."""
    grads = jnp.asarray(rng.standard_normal([1300, 500]), jnp.float32)
    tx = reset_moments(optax.adam(1.0), warmup_steps=20)
    updates, state = play(tx, grads, {"reset_leaves": at(1000, 1300)})
    size = np.sqrt(np.mean(np.square(updates), axis=1))
    steady = size[900:1000].mean()
    assert size[1000] < 0.01 * steady  # s(0) = 0.01
    assert np.all(np.diff(size[1000:1015]) > 0)
    assert size[1000:].max() < 1.1 * steady
    assert size[1100:].mean() > 0.9 * steady
    assert state.inner_state[0].count[-1] == 1300
    np.testing.assert_allclose(
        state.inner_state[0].mu[1000], 0.1 * grads[1000], rtol=1e-5
    )


def test_the_level_leaves_a_fresh_spike_out(rng):
    grads = rng.standard_normal([210, 50]).astype(np.float32)
    grads[200] *= 1000
    tx = reset_moments(optax.adam(1.0))
    _, state = play(tx, jnp.asarray(grads), {"reset_leaves": at(202, 210)})
    nu = np.asarray(state.inner_state[0].nu).mean(1)
    assert nu[201] > 500 * nu[199]
    np.testing.assert_allclose(nu[202], nu[199], rtol=0.1)


def test_chosen_leaves_only(grads):
    inner = optax.adamw(1e-2)
    plain, _ = play(inner, grads)
    tx = reset_moments(inner, every_steps=20, warmup_steps=5, where="b")
    updates, state = play(tx, grads)
    np.testing.assert_allclose(plain["a"], updates["a"], rtol=1e-4, atol=1e-7)
    assert not np.allclose(plain["b"], updates["b"], rtol=0.1)
    assert state.resets[-1].tolist() == [0, 3]


def test_damping(grads):
    tx = reset_moments(optax.sgd(1.0, momentum=0.9), every_steps=30, keep=0.5)
    _, state = play(tx, grads)
    trace = state.inner_state[0].trace["b"]
    np.testing.assert_allclose(
        trace[29], 0.9 * 0.5 * trace[28] + grads["b"][29], rtol=1e-5, atol=1e-6
    )


def test_first_moments_alone(grads):
    tx = reset_moments(optax.adam(1.0), every_steps=30, names={"nu": "kept"})
    _, state = play(tx, grads)
    _, plain = play(optax.adam(1.0), grads)
    np.testing.assert_allclose(state.inner_state[0].nu["a"], plain[0].nu["a"], 1e-5)
    np.testing.assert_allclose(
        state.inner_state[0].mu["b"][29], 0.1 * grads["b"][29], rtol=1e-5
    )


def test_one_reset_for_one_incident(grads):
    lasting = jax.tree.map(lambda a: jnp.broadcast_to(a, (60, *a.shape)), SPIKE)
    tx = reset_moments(optax.adam(1.0), warmup_steps=25)
    _, state = play(tx, grads, {"verdict": lasting})
    assert state.resets[-1].tolist() == [3, 3]  # on steps 0, 25 and 50
    tx = reset_moments(optax.adam(1.0), on=Severity.BLOCK)
    severe = jnp.zeros([60], jnp.int32).at[7].set(int(Severity.BLOCK))
    _, state = play(tx, grads, {"verdict": lasting._replace(severity=severe)})
    assert state.age[-1].tolist() == [52, 52] and state.resets[-1].tolist() == [1, 1]


def test_a_verdict_inside_is_read_a_step_later(grads):
    def judged(params):
        return (optax.adam(1.0).init(params), Verdict.clear())

    def judge(g, state, params=None, **extra):
        updates, inner = optax.adam(1.0).update(g, state[0], params)
        flags = jnp.where(extra["loss"] > 5, SPIKE.flags, 0)
        return updates, (inner, Verdict.clear()._replace(flags=flags))

    inner = optax.GradientTransformationExtraArgs(judged, judge)
    loss = jnp.ones(60).at[20].set(9.0)
    _, state = play(reset_moments(inner), grads, {"loss": loss})
    assert state.resets[20].tolist() == [0, 0] and state.age[21].tolist() == [0, 0]


def test_the_request_is_answered_once(grads):
    asked = jax.tree.map(lambda a: jnp.broadcast_to(a, (60,)), Controls.untouched())
    asked = asked._replace(reset_moments=at(10, 60))
    tx = reset_moments(reset_moments(optax.adam(1.0)))
    _, state = play(tx, grads, {"controls": asked})
    assert state.resets[-1].tolist() == [1, 1]
    assert state.inner_state.resets[-1].tolist() == [0, 0]


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.muon(1e-2),
        optax.contrib.schedule_free_adamw(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.partition(
            {"x": optax.adam(1e-2), "y": optax.lion(1e-3)}, {"a": "x", "b": "y"}
        ),
    ],
    ids=["muon", "schedule_free", "multi_steps", "partition"],
)
def test_any_optimizer(grads, inner):
    updates, state = play(reset_moments(inner, every_steps=15, warmup_steps=5), grads)
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))
    assert state.resets[-1].tolist() == [4, 4]
    size = np.abs(np.asarray(updates["a"])).mean((1, 2))
    size = size[size > 0]  # steps that MultiSteps only accumulates have none
    assert np.median(size) > 2 * size.min()  # the warm-up after a reset


def test_what_is_not_found_is_said():
    tx = reset_moments(optax.flatten(optax.adam(1.0)))
    text = (
        "reset_moments: needed to know what 0/mu, 0/nu of the optimizer's state hold, "
        'and leaves them alone; write names={"field": "first"}, or "second", or "kept"'
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        tx.init({"a": jnp.ones(2), "b": jnp.ones(3)})


ERRORS = [
    (ValueError, dict(keep=1.0), "reset_moments: needed 0 <= keep < 1, got 1.0"),
    (
        ValueError,
        dict(warmup_steps=0),
        "reset_moments: needed a whole number warmup_steps >= 1, got 0",
    ),
    (
        ValueError,
        dict(every_steps=0),
        "reset_moments: needed a whole number every_steps >= 1, got 0",
    ),
    (
        TypeError,
        dict(on="spike"),
        "reset_moments: needed a Severity, Causes or None for on, got 'spike'; write "
        "on=Severity.BLOCK or on=Cause.LOSS_SPIKE",
    ),
]


@pytest.mark.parametrize("kind, options, text", ERRORS)
def test_errors(kind, options, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        reset_moments(optax.sgd(1.0), **options)


def test_more_errors():
    text = (
        "reset_moments: needed an optax.GradientTransformation for inner, got 3; write "
        "reset_moments(optax.adamw(3e-4))"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        reset_moments(3)
    tx = reset_moments(optax.sgd(1.0, momentum=0.9))
    state = tx.init({"a": jnp.ones(1), "b": jnp.ones(1)})
    text = (
        "reset_moments: needed params, as some gradients are None or float0; write "
        "tx.update(grads, opt_state, params)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tx.update({"a": jnp.ones(1), "b": None}, state)
