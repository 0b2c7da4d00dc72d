"""The guard on streams with events, and its promise to change nothing when idle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.vocabulary import Cause, Severity

pytestmark = pytest.mark.usefixtures("standard_promotion")
STEPS, EVENT, SEEDS = 1000, 400, 3


def streams(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A healthy run: gradients `[steps, 256]` and losses `[steps]`."""
    rng = np.random.default_rng(seed)
    norms = 0.5 * np.exp(0.15 * rng.normal(size=STEPS))
    directions = rng.normal(size=(STEPS, 256))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    decay = 3.0 * np.exp(-np.arange(STEPS) / 150)
    losses = 2.5 + decay + 0.04 * rng.normal(size=STEPS)
    return (norms[:, None] * directions).astype(np.float32), losses.astype(np.float32)


@functools.cache
def _run():
    tx = stabil.guard(optax.adam(1e-3))

    def step(carry, inputs):
        params, state = carry
        grads, loss = inputs
        updates, state = tx.update(grads, state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        v = stabil.vitals(state)
        row = (v.verdict, v.measures.clip_factor, jnp.all(jnp.isfinite(params)))
        return (params, state), row

    def run(grads, losses):
        params = jnp.zeros(256)
        (params, state), rows = jax.lax.scan(
            step, (params, tx.init(params)), (grads, losses)
        )
        return params, stabil.vitals(state).tally, rows

    return jax.jit(jax.vmap(run))


def run(edit):
    """Runs all seeds with `edit(grads, losses)` made to each stream in place."""
    pairs = [streams(seed) for seed in range(SEEDS)]
    for grads, losses in pairs:
        edit(grads, losses)
    grads, losses = (np.stack(x) for x in zip(*pairs, strict=True))
    return _run()(grads, losses)


def clean(grads, losses):
    pass


def nan_element(grads, losses):
    grads[EVENT, 7] = np.nan


def inf_element(grads, losses):
    grads[EVENT, 7] = np.inf


def nan_everywhere(grads, losses):
    grads[EVENT] = np.nan
    losses[EVENT] = np.nan


def inf_loss(grads, losses):
    losses[EVENT] = np.inf


def test_clean_steps_are_never_skipped_nor_clipped():
    _, tally, (verdict, factor, _) = run(clean)
    assert np.all(tally.judged_steps == STEPS)
    assert np.all(tally.blocked_steps == 0)
    assert np.all(factor == 1)
    assert np.all(verdict.severity < Severity.WARN)


@pytest.mark.parametrize(
    "edit, cause",
    [
        (nan_element, Cause.NONFINITE_GRADIENT),
        (inf_element, Cause.NONFINITE_GRADIENT),
        (nan_everywhere, Cause.NONFINITE_LOSS | Cause.NONFINITE_GRADIENT),
        (inf_loss, Cause.NONFINITE_LOSS),
    ],
)
def test_one_nonfinite_step_costs_exactly_that_step(edit, cause):
    params, tally, (verdict, _, finite) = run(edit)
    assert np.all(tally.blocked_steps == 1)
    assert np.all(verdict.severity[:, EVENT] == Severity.BLOCK)
    assert np.all(verdict.flags[:, EVENT] == int(cause))
    assert np.all(finite)


def test_second_spike_is_seen_after_the_first():
    def edit(grads, losses):
        for at, ratio, rise in ((EVENT, 100, 2), (EVENT + 30, 30, 2)):
            grads[at] *= ratio
            losses[at] += rise

    _, tally, (verdict, factor, _) = run(edit)
    both = int(Cause.LOSS_SPIKE | Cause.GRADIENT_SPIKE)
    for at in (EVENT, EVENT + 30):
        assert np.all(verdict.flags[:, at] & both == both)
        assert np.all(factor[:, at] < 0.2)
        assert np.all(verdict.severity[:, at] == Severity.WATCH)
    assert np.all(factor[:, :EVENT] == 1)
    # The loss rose as well, so that the largest of usual norms are held down from then.
    usual = np.delete(np.asarray(factor), (EVENT, EVENT + 30), axis=1)
    assert np.all(usual > 0.5) and np.all(tally.clipped_steps > 2)


LEAPS = {  # rise of the loss over 2.7, where; steps that are blocked
    "a burst": (6.0, slice(EVENT, EVENT + 8), range(EVENT, EVENT + 8)),
    "lower, so that it takes a WARN": (
        1.5,
        slice(EVENT, EVENT + 8),
        range(EVENT + 1, EVENT + 8),
    ),
    "one hard batch": (1.5, slice(EVENT, EVENT + 1), ()),
    "new data": (6.0, slice(EVENT, None), range(EVENT, EVENT + 16)),
    "a rise by a tenth": (0.3, slice(EVENT, None), ()),
}


@pytest.mark.parametrize("leap", LEAPS)
def test_a_loss_that_leaps_is_refused_for_a_while(leap):
    rise, where, blocked = LEAPS[leap]

    def edit(grads, losses):
        losses[where] += rise

    _, tally, (verdict, _, _) = run(edit)
    for flags, severity in zip(verdict.flags, verdict.severity, strict=True):
        found = np.flatnonzero(severity == Severity.BLOCK)
        np.testing.assert_array_equal(found, list(blocked))
        assert np.all(flags[found] & int(Cause.LOSS_SPIKE))


def test_batches_that_leap_again_and_again_are_learnt_in_the_end():
    def edit(grads, losses):
        losses[EVENT::10] += 6

    _, tally, (verdict, _, _) = run(edit)
    blocked = verdict.severity == Severity.BLOCK
    assert np.all(blocked[:, EVENT : EVENT + 300 : 10])
    assert np.all(blocked[:, EVENT + 350 :: 10].sum(axis=1) < 12)
    assert np.all(tally.blocked_steps < 50)


def test_the_clip_holds_norms_down_after_a_refused_leap():
    grads, losses = streams(0)
    losses[EVENT : EVENT + 3] += 6
    tx = stabil.guard(optax.sgd(1e-3))

    @jax.jit
    def play(state, rows):
        def step(state, row):
            _, state = tx.update(row[0], state, loss=row[1])
            return state, state.clip_state.held_steps

        return jax.lax.scan(step, state, rows)[1]

    held = play(tx.init(jnp.zeros(256)), (grads, losses))
    assert np.all(held[: EVENT + 3] == 0)
    np.testing.assert_array_equal(held[EVENT + 3 :][:4], [999, 998, 997, 996])


@pytest.mark.parametrize("ratio", [10, 60])
def test_lasting_change_of_the_norm_is_one_event(ratio):
    def edit(grads, losses):
        grads[EVENT:] *= ratio

    _, tally, (verdict, factor, _) = run(edit)
    assert np.all(factor[:, EVENT] < 1)
    assert np.all(factor[:, EVENT + 10 :] == 1)
    assert np.all(tally.blocked_steps == 0)
    shifts = (verdict.flags & int(Cause.LEVEL_SHIFT)) != 0
    assert np.all(shifts.sum(axis=1) == 1)


def test_large_norm_at_the_start_is_no_event():
    def edit(grads, losses):
        grads *= (1 + 100 * np.exp(-np.arange(STEPS) / 30))[:, None].astype(np.float32)

    _, tally, _ = run(edit)
    assert np.all(tally.blocked_steps == 0)
    assert np.all(tally.clipped_steps == 0)


def test_burst_does_not_blind_the_guard():
    def edit(grads, losses):
        grads[EVENT : EVENT + 8] *= 20
        grads[EVENT + 20] *= 20

    _, _, (verdict, factor, _) = run(edit)
    assert np.all(factor[:, EVENT + 20] < 0.3)
    assert np.all(factor[:, EVENT + 21 :] == 1)


OPTIMIZERS = {
    "adam": lambda: optax.adam(optax.linear_schedule(0.0, 1e-3, 10)),
    "adamw": lambda: optax.adamw(1e-3),
    "adamw, schedule and decay": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, 200), weight_decay=0.1
    ),
    "clip and adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
    "sgd": lambda: optax.sgd(0.05),
    "sgd with momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "nadam": lambda: optax.nadam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}
# The others: `pytest -m slow tests/transforms/test_guard.py`.
QUICK = ("clip and adamw", "sgd with momentum", "lion", "adafactor", "muon")


def _problem():
    rng = np.random.default_rng(5)
    params = {
        "a": {"kernel": rng.normal(size=(24, 48)) / 5, "bias": np.zeros(48)},
        "b": {"kernel": rng.normal(size=(48, 8)) / 7, "bias": np.zeros(8)},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    xs = jnp.asarray(rng.normal(size=(200, 32, 24)), jnp.float32)

    def loss_fn(params, x):
        hidden = jax.nn.gelu(x @ params["a"]["kernel"] + params["a"]["bias"])
        out = hidden @ params["b"]["kernel"] + params["b"]["bias"]
        return jnp.mean((out - jnp.sin(x[:, :8])) ** 2)

    return params, xs, loss_fn


def _assert_idle(state, plain, guarded):
    tally = stabil.vitals(state).tally
    assert int(tally.judged_steps) == 200
    assert int(tally.blocked_steps) == 0 and int(tally.clipped_steps) == 0
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(guarded), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.bits
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_idle_guard_is_bit_equal_over_200_steps(name):
    """The optimizer alone in its program, as XLA sees it behind a model's products."""
    params, _, _ = _problem()
    rng = np.random.default_rng(11)

    def train(tx, **extra):
        update = jax.jit(lambda g, s, p: tx.update(g, s, p, **extra))
        state = tx.init(params)
        for g in stream:
            updates, state = update(g, state, params)
        return updates, state

    stream = [
        jax.tree.map(lambda p: np.float32(0.1 * rng.normal(size=p.shape)), params)
        for _ in range(200)
    ]
    plain = train(OPTIMIZERS[name]())
    extra = dict(loss=jnp.float32(1.0), controls=stabil.Controls.untouched())
    updates, state = train(stabil.guard(OPTIMIZERS[name]()), **extra)
    _assert_idle(state, plain, (updates, state.inner_state))


@pytest.mark.bits
@pytest.mark.parametrize("with_controls", [True, False])
@pytest.mark.parametrize("name", ["adam", "adamw", "lion"])
def test_idle_guard_is_bit_equal_in_a_whole_train_step(name, with_controls):
    params, xs, loss_fn = _problem()

    def train(tx, **extra_of):
        @jax.jit
        def step(params, state, x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            extra = {k: v(loss) for k, v in extra_of.items()}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        p, s = params, tx.init(params)
        for x in xs:
            p, s = step(p, s, x)
        return p, s

    plain = train(OPTIMIZERS[name]())
    extra = {"loss": lambda loss: loss}
    if with_controls:
        extra["controls"] = lambda loss: stabil.Controls.untouched()
    guarded, state = train(stabil.guard(OPTIMIZERS[name]()), **extra)
    _assert_idle(state, plain, (guarded, state.inner_state))


def test_blocked_step_leaves_everything_bit_identical():
    schedule = optax.linear_schedule(1e-2, 1e-3, 50)
    tx = stabil.guard(optax.adamw(schedule, weight_decay=0.1))
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}
    update = jax.jit(tx.update)
    state = tx.init(params)
    for i in range(10):
        grads = {"w": params["w"] + i}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    bad = {"w": params["w"].at[0, 0].set(jnp.nan)}
    updates, blocked = update(bad, state, params)
    assert not np.any(updates["w"])
    for a, b in zip(
        jax.tree.leaves((state.inner_state, state.clip_state)),
        jax.tree.leaves((blocked.inner_state, blocked.clip_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_garbage_in_a_moment_is_blocked_reset_and_named():
    params, xs, loss_fn = _problem()
    tx = stabil.guard(optax.adamw(1e-3))

    @jax.jit
    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for x in xs[:60]:
        params, state, loss = step(params, state, x)
    adam = state.inner_state[0]
    noise = jax.random.normal(jax.random.key(0), adam.mu["a"]["kernel"].shape)
    mu = adam.mu | {"a": adam.mu["a"] | {"kernel": 10.0 * noise}}
    broken = (adam._replace(mu=mu), *state.inner_state[1:])
    before = params
    params, state, _ = step(params, state._replace(inner_state=broken), xs[60])
    v = stabil.vitals(state)
    assert v.causes == ("moment_spike",)
    assert v.first == "moments/a/kernel"
    assert int(v.tally.resets) == 1
    np.testing.assert_array_equal(params["a"]["kernel"], before["a"]["kernel"])
    assert not np.any(state.inner_state[0].mu["a"]["kernel"])
    for x in xs[61:100]:
        params, state, after = step(params, state, x)
    assert int(stabil.vitals(state).tally.blocked_steps) == 1
    assert float(after) < 1.1 * float(loss)


def _young(optimizer, steps, scale):
    """A guard's update and state after a few steps, with gradients of any scale."""
    params = {"bias": jnp.zeros(6), "kernel": jnp.ones([8, 6]), "one": jnp.zeros([])}
    tx, rng = stabil.guard(optimizer, clip=None), np.random.default_rng(0)
    update, state, causes = jax.jit(tx.update), tx.init(params), []
    for _ in range(steps):
        grads = jax.tree.map(
            lambda p: jnp.float32(scale(rng) * rng.normal(size=p.shape)), params
        )
        state = update(grads, state, params)[1]
        causes.append(stabil.vitals(state).causes)
    return update, state, grads, params, causes


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_moments_that_adam_cannot_make_are_restarted_in_the_warmup(steps):
    update, state, grads, params, _ = _young(optax.adam(1e-3), steps, lambda _: 0.1)
    adam = state.inner_state[0]
    mu = adam.mu | {"bias": jnp.full(6, 200.0)}
    broken = state._replace(inner_state=(adam._replace(mu=mu), *state.inner_state[1:]))
    updates, state = update(grads, broken, params)
    v = stabil.vitals(state, params=params)
    assert (v.causes, v.first) == (("moment_spike",), "moments/bias")
    assert not np.any(updates["bias"]) and int(v.tally.resets) == 1
    assert not np.any(state.inner_state[0].mu["bias"])
    assert int(stabil.vitals(update(grads, state, params)[1]).severity) == Severity.OK


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3, b1=0.95, b2=0.9999),
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16, weight_decay=10.0),
        optax.chain(optax.normalize_by_update_norm(1e6), optax.adam(1e-3)),
        optax.adabelief(1e-3),
        optax.adamax(1e-3),
        optax.yogi(1e-3),
        optax.contrib.adopt(1e-3),
    ],
    ids=["adam", "adamw", "normalised", "adabelief", "adamax", "yogi", "adopt"],
)
def test_no_gradients_make_moments_that_look_damaged_in_the_warmup(optimizer):
    for lowest, highest in ((-6, 4), (-5, -5)):
        scale = lambda rng: 10.0 ** rng.uniform(lowest, highest)  # noqa: B023, E731
        *_, causes = _young(optimizer, 19, scale)
        assert not any("moment_spike" in found for found in causes)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_in_the_moment_of_a_small_noisy_leaf_is_blocked(seed):
    """Its level is so noisy that not even a leap to a thousand times scores high."""
    rng = np.random.default_rng(seed)
    names = ("a", "b", "c")
    params = {n: jnp.zeros([16, 16]) for n in names} | {"small": jnp.zeros(4)}
    tx = stabil.guard(optax.adam(1e-3), clip=None)
    small = np.exp(2.5 * rng.normal(size=(80, 1))) * rng.normal(size=(80, 4))
    grads = {n: rng.normal(size=(80, 16, 16)) for n in names} | {"small": small}
    grads = {n: g.astype(np.float32) for n, g in grads.items()}

    @jax.jit
    def play(state, grads):
        def step(state, g):
            state = tx.update(g, state, params)[1]
            return state, state.verdict.severity

        return jax.lax.scan(step, state, grads)

    state, severity = play(tx.init(params), grads)
    assert np.all(severity < Severity.BLOCK)
    adam = state.inner_state[0]
    size = jnp.sqrt(adam.nu["small"]) * 1e3
    mu = adam.mu | {"small": size * jnp.array([1.0, -1.0, 1.0, -1.0])}
    broken = state._replace(inner_state=(adam._replace(mu=mu), *state.inner_state[1:]))
    last = jax.tree.map(lambda g: g[-1], grads)
    last["small"] = jnp.ones(4)
    updates, state = tx.update(last, broken, params)
    v = stabil.vitals(state)
    assert (v.causes, v.first) == (("moment_spike",), "moments/small")
    assert not np.any(updates["small"]) and int(v.tally.resets) == 1


def test_activation_jump_with_a_loss_spike_blocks_and_names_the_row():
    tx = stabil.guard(optax.sgd(1e-2), max_readings=4, max_loss_steps=0)
    params = jnp.ones(3)
    names = ("block_0", "block_1", "block_2")

    @jax.jit
    def step(state, loss, absmax):
        readings = stabil.Readings(absmax[:, None], names, ("absmax",))
        _, state = tx.update(params, state, params, loss=loss, readings=readings)
        return state, stabil.vitals(state, readings=readings)

    rng = np.random.default_rng(0)
    state = tx.init(params)
    for _ in range(40):
        noise = jnp.asarray(np.exp(0.05 * rng.normal(size=3)), jnp.float32)
        state, v = step(state, jnp.float32(2 + 0.02 * rng.normal()), noise)
        assert v.severity == Severity.OK
    jumped = jnp.array([1.0, 60.0, 60.0])
    _, alone = step(state, jnp.float32(2.0), jumped)
    assert (alone.severity, alone.first) == (Severity.WATCH, "activations/block_1")
    # The rows are re-learnt after five steps, the loss when it has been flat for 32.
    for i in range(36):
        state, v = step(state, jnp.float32(6.0), jumped)
        expected = Severity.BLOCK if i < 5 else Severity.WARN
        assert (i, v.severity) == (i, expected if i < 32 else Severity.OK)
        assert v.first == (
            "activations/block_1" if i < 5 else "loss" * (i < 32) or None
        )


def test_nonfinite_activation_is_named_before_the_loss():
    tx = stabil.guard(optax.sgd(1e-2))
    names, statistics = ("embed", "mlp"), ("nan_count", "inf_count", "absmax")
    table = jnp.array([[0.0, 0.0, 1.0], [3.0, 0.0, 1.0]])
    readings = stabil.Readings(table, names, statistics)
    grads = {"w": jnp.full(2, jnp.nan)}
    _, state = tx.update(grads, tx.init(grads), loss=jnp.nan, readings=readings)
    v = stabil.vitals(state, readings=readings)
    assert v.first == "activations/mlp"
    assert v.causes == ("nonfinite_loss", "nonfinite_gradient", "nonfinite_activation")


def test_controls_scale_the_update_and_restart_the_moments():
    tx = stabil.guard(optax.adam(1e-2))
    params = jnp.array([1.0, -2.0])
    _, state = tx.update(params, tx.init(params), params)
    plain, _ = tx.update(params, state, params)
    controls = stabil.Controls.untouched()._replace(
        learning_rate_scale=jnp.float32(0.25), reset_moments=jnp.bool_(True)
    )
    slowed, _ = tx.update(
        params,
        state,
        params,
        controls=controls._replace(reset_moments=jnp.bool_(False)),
    )
    np.testing.assert_allclose(slowed, 0.25 * plain, rtol=1e-6)
    held, state = tx.update(params, state, params, controls=controls)
    assert not np.any(held)
    assert not np.any(state.inner_state[0].mu)
    np.testing.assert_allclose(state.inner_state[0].nu, 2.5, rtol=1e-6)
    v = stabil.vitals(state)
    assert (int(v.tally.resets), int(v.tally.blocked_steps)) == (1, 0)


def test_controls_are_obeyed_once():
    params = jnp.array([1.0, -2.0])
    controls = stabil.Controls.untouched()._replace(
        learning_rate_scale=jnp.float32(0.5)
    )
    tx = stabil.guard(stabil.transforms.backoff(optax.sgd(1.0)))
    updates, _ = tx.update(params, tx.init(params), params, controls=controls)
    np.testing.assert_allclose(updates, -0.5 * params)


def test_wrong_arguments_are_explained():
    def check(error, text, call):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == text

    adam = optax.adam(1e-3)
    check(
        ValueError,
        "guard: needed threshold > 0, got 0",
        lambda: stabil.guard(adam, threshold=0),
    )
    check(
        ValueError,
        "guard: needed a whole number warmup_steps >= 1, got 0",
        lambda: stabil.guard(adam, warmup_steps=0),
    )
    check(
        TypeError,
        "guard: needed an optax.GradientTransformation for inner, got 0.001; write "
        "stabil.guard(optax.adamw(3e-4), clip=stabil.spike_aware())",
        lambda: stabil.guard(1e-3),
    )
    check(
        ValueError,
        "spike_aware: needed 0 <= decay < 1, got 1.0",
        lambda: stabil.spike_aware(decay=1.0),
    )
    check(
        TypeError,
        "spike_aware: needed a Python number for threshold, got '6' of type str; "
        "hyperparameters are fixed when the transformation is built: write "
        "spike_aware(threshold=1.0)",
        lambda: stabil.spike_aware(threshold="6"),
    )
    tx = stabil.guard(adam, max_readings=1)
    params = jnp.ones(2)
    state = tx.init(params)
    check(
        ValueError,
        "guard: needed a scalar loss, got one of shape (2,); write "
        "tx.update(grads, opt_state, params, loss=loss.mean())",
        lambda: tx.update(params, state, params, loss=params),
    )
    decayed = stabil.guard(optax.adamw(1e-3))
    check(
        ValueError,
        "guard: needed the parameters, which the guarded optimizer uses, got "
        "params=None; write tx.update(grads, opt_state, params)",
        lambda: decayed.update(params, decayed.init(params)),
    )
    two = stabil.Readings(jnp.ones((2, 1)), ("a", "b"), ("absmax",))
    check(
        ValueError,
        "guard: needed at most 1 rows of readings, got 2; write "
        "stabil.guard(..., max_readings=2) or a narrower "
        "stabil.probe(model, where=...)",
        lambda: tx.update(params, state, params, readings=two),
    )
    check(
        ValueError,
        "guard: needed stabil.Readings with values [rows, statistics], got ArrayImpl "
        "of shape (2,); write logits, readings = probed.apply(...) and hand readings= "
        "on as they are",
        lambda: tx.update(params, state, params, readings=params),
    )
    check(
        ValueError,
        "vitals: needed the state of a stabil transformation, got tuple without one; "
        "write tx = stabil.guard(optax.adamw(3e-4)) or "
        "optax.chain(stabil.spike_aware(), ...) and hand over the state that tx.update "
        "returned",
        lambda: stabil.vitals(adam.init(params)),
    )
