"""Public reports about clipping, non-finite gradients and skipping, as tests."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vectors_tools import replay

from stabil.transforms import (
    accumulate,
    adagc,
    adaptive_gradient_clip,
    autoclip,
    clip_by_global_norm,
    clip_update_norm,
    clip_update_rms,
    clippy,
    leaf_name,
    skip_bad_micro_batches,
    skip_nonfinite,
    skip_spikes,
    stable_adamw,
    was_skipped,
    zclip,
)
from stabil.vocabulary import Cause

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Every rule that bounds a gradient or an update.
BOUNDS = {
    "clip_by_global_norm": clip_by_global_norm(1.0),
    "adaptive_gradient_clip": adaptive_gradient_clip(),
    "zclip": zclip(),
    "adagc": adagc(stacked="a"),
    "autoclip": autoclip(scope="tensor", window=8),
    "clippy": clippy(),
    "clip_update_norm": clip_update_norm(),
    "clip_update_rms": clip_update_rms(),
    "stable_adamw": stable_adamw(),
}


def first(tx, grads, params=None, **extra):
    """One compiled update from a fresh state."""
    params = grads if params is None else params

    def step(grads, params, extra):
        return tx.update(grads, tx.init(params), params, **extra)

    return jax.jit(step)(grads, params, extra)


# A. Clipping and norms ------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDS)
def test_a1_a2_a_nonfinite_entry_stays_where_it_is_and_is_counted(name):
    """One NaN or infinite entry: zeros for the step, a count, and a clean state."""
    tx = BOUNDS[name]
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def one(bad):
        # So small that no rule has another reason to act.
        grads = {"a": jnp.stack([jnp.float32(1e-5), bad]), "b": jnp.full(2, 1e-5)}
        return tx.update(grads, tx.init(params), params)

    bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    updates, state = jax.jit(jax.vmap(one))(bad)
    for leaf in jax.tree.leaves(updates):
        assert not np.any(np.asarray(leaf))
    for leaf in jax.tree.leaves(state):
        assert np.all(np.isfinite(np.asarray(leaf)))
    own = state[0] if name == "stable_adamw" else state
    assert list(own.nonfinite_steps) == [1, 1, 1]
    assert list(own.clip_factor) == [0, 0, 0]


def test_a3_a_finite_gradient_has_a_finite_norm():
    tx = clip_by_global_norm(1.0)
    half = jnp.full((3, 3), 100, jnp.float16)
    huge = jnp.array([1e20, 1.0])
    limit = jnp.array([3e38, 1e38])
    step = jax.jit(lambda gs: [tx.update(g, tx.init(g)) for g in gs])
    (u, s), (v, t), (w, _) = step([half, huge, limit])
    assert s.norm == 300.0 and t.norm == np.float32(1e20)
    np.testing.assert_allclose(np.asarray(u, np.float32), 1 / 3, rtol=1e-3)
    np.testing.assert_allclose(v, [1.0, 1e-20], rtol=1e-6)
    np.testing.assert_allclose(w, np.array([3, 1]) / np.sqrt(10), rtol=1e-6)
    assert s.nonfinite_steps == t.nonfinite_steps == 0 and t.clipped_steps == 1


@pytest.mark.parametrize("largest", [2.0**60, 1e36])
def test_a3_norms_of_leaves_layers_and_units_do_not_overflow(largest):
    grads = {"a": jnp.array([[largest, 1.0], [1.0, 1.0]]), "b": jnp.ones(2)}
    params = jax.tree.map(jnp.ones_like, grads)

    def rates(grads):
        both = (adagc(warmup_steps=0), adagc(warmup_steps=0, stacked="a"))
        both += (adaptive_gradient_clip(), clip_update_rms(), zclip())
        return [tx.update(grads, tx.init(params), params) for tx in both]

    for updates, state in jax.jit(rates)(grads):
        assert np.all(np.isfinite(np.concatenate([*map(np.ravel, updates.values())])))
        assert np.any(np.asarray(updates["a"])) and state.nonfinite_steps == 0
        wanted = largest / 2 if "Rms" in type(state).__name__ else largest
        np.testing.assert_allclose(state.norm, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", BOUNDS)
def test_a4_zeros_stay_zeros(name):
    grads = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
    tx = BOUNDS[name]
    if name == "clip_by_global_norm":
        tx = clip_by_global_norm(0.0)
    # Zero parameters, so that no weight decay hides a NaN.
    updates, state, _ = replay(
        tx, jax.tree.map(lambda g: g[None].repeat(5, 0), grads), grads
    )
    for leaf in jax.tree.leaves((updates, state)):
        assert np.all(np.isfinite(leaf))
    assert not np.any(updates["a"]) and not np.any(updates["b"])


def test_a4_a_zero_limit_takes_everything_without_a_nan():
    updates, state = first(clip_by_global_norm(0.0), jnp.ones(3))
    np.testing.assert_array_equal(updates, np.zeros(3))
    assert state.clipped_steps == 1 and state.clip_factor == 0


def test_a5_two_groups_have_two_statistics_that_advance_once_a_step():
    params = {"backbone": jnp.ones(1), "head": jnp.ones(1)}
    tx = optax.chain(
        optax.masked(zclip(warmup_steps=2), {"backbone": True, "head": False}),
        optax.masked(zclip(warmup_steps=2), {"backbone": False, "head": True}),
    )
    grads = {"backbone": jnp.full([4, 1], 2.0), "head": jnp.full([4, 1], 5.0)}
    _, state, _ = replay(tx, grads, params)
    one, two = (s.inner_state for s in state)
    assert list(one.collected_steps) == list(two.collected_steps) == [1, 2, 2, 2]
    assert one.mean[-1] == 2.0 and two.mean[-1] == 5.0


def test_a6_statistics_are_those_of_the_unscaled_gradient():
    scale = 2.0**15 * jnp.array([1, 1, 1, 2, 2, 2, 1, 1] * 4, jnp.float32)
    grads = scale[:, None] * jnp.array([1.0])
    loss = jnp.ones_like(scale)
    for tx, level in (
        (zclip(warmup_steps=3), lambda s: s.mean[-1]),
        (adagc(warmup_steps=3, lambda_abs=10.0), lambda s: s.gamma[-1, 0]),
        (autoclip(window=8, percentile=50.0), lambda s: s.threshold[-1]),
    ):
        updates, state, _ = replay(tx, grads, scale=scale)
        assert level(state) == pytest.approx(1.0, rel=1e-5)
        assert state.clipped_steps[-1] == 0
        np.testing.assert_array_equal(updates, grads)
    tx = skip_spikes(optax.sgd(1.0), window=4)
    _, state, _ = replay(tx, grads, jnp.ones(1), scale=scale, loss=loss)
    assert not np.any(state.record.skipped)


def test_a7_the_global_norm_is_that_of_all_groups():
    grads = {"x": jnp.array([3.0]), "y": jnp.array([4.0])}
    updates, _ = first(clip_by_global_norm(1.0), grads)
    np.testing.assert_allclose([updates["x"][0], updates["y"][0]], [0.6, 0.8])
    grouped = optax.multi_transform(
        {"x": clip_by_global_norm(1.0), "y": optax.identity()}, {"x": "x", "y": "y"}
    )
    text = (
        "needed the whole tree, got one with 1 of 2 leaves masked: the norm is that of "
        "a group, and groups clipped one by one exceed the limit together; put "
        "clip_by_global_norm outside of masked and multi_transform, or write "
        'clip_by_global_norm(..., within="group")'
    )
    with pytest.warns(UserWarning) as seen:
        grouped.init(grads)
    assert [str(w.message) for w in seen] == [text]
    meant = optax.masked(
        clip_by_global_norm(1.0, within="group"), {"x": True, "y": False}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = meant.init(grads)
    updates, _ = meant.update(grads, state)
    np.testing.assert_allclose([updates["x"][0], updates["y"][0]], [1.0, 4.0])


def odd_leaves():
    return {
        "c": jnp.array([3 + 4j], jnp.complex64),
        "e": {},
        "i": jnp.array([100, 100], jnp.int8),
        "k": jax.random.key(0),
        "n": None,
        "s": 4.0,
        "z": np.zeros(2, jax.dtypes.float0),
    }


@pytest.mark.parametrize("name", ["clip_by_global_norm", "adagc", "clippy"])
def test_a8_leaves_without_a_norm_pass_through(name):
    grads = odd_leaves()
    params = {**grads, "z": jnp.array([1, 2], jnp.int32)}
    tx = BOUNDS[name]
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["e"] == {} and updates["n"] is None
    np.testing.assert_array_equal(updates["i"], grads["i"])
    assert updates["z"].dtype == jax.dtypes.float0
    assert jax.random.key_data(updates["k"]).tolist() == [0, 0]
    assert updates["c"].dtype == jnp.complex64 and np.all(np.isfinite(updates["c"]))
    assert np.shape(updates["s"]) == ()
    # |3 + 4i| = 5, beside 4.
    assert state.norm == pytest.approx(np.sqrt(41.0))
    empty = {"n": None}
    updates, state = tx.update(empty, tx.init(empty), empty)
    assert updates == empty and state.clip_factor == 1.0


def test_a8_complex_gradients_shrink_without_turning():
    updates, _ = first(clip_by_global_norm(1.0), jnp.array([3 + 4j], jnp.complex64))
    np.testing.assert_allclose(updates, [0.6 + 0.8j], rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["adaptive_gradient_clip", "clippy", "stable_adamw", "zclip"]
)
def test_a9_zero_parameters_and_an_idle_leaf(name):
    """Zero-initialised weights, and a leaf whose gradient is always zero."""
    tx = optax.chain(BOUNDS[name], optax.scale(0.0))
    params = {"idle": jnp.ones(2), "zero": jnp.zeros((2, 2))}
    grads = {"idle": jnp.zeros([150, 2]), "zero": jnp.ones([150, 2, 2])}
    updates, state, params = replay(tx, grads, params)
    for leaf in jax.tree.leaves((updates, state, params)):
        assert np.all(np.isfinite(leaf))
    np.testing.assert_array_equal(params["zero"][-1], np.zeros((2, 2)))
    if name == "zclip":
        _, state, _ = replay(zclip(), {"idle": jnp.zeros([60, 2])})
        assert not np.any(state.z_score) and state.clipped_steps[-1] == 0


def test_a10_the_variance_is_centred():
    norms = jnp.float32(1000) + jnp.float32(0.001) * jnp.arange(8, dtype=jnp.float32)
    _, state, _ = replay(zclip(warmup_steps=8), norms[:, None])
    true = np.var(np.asarray(norms, np.float64))
    assert state.variance[-1] == pytest.approx(true, rel=0.05)
    assert np.all(np.asarray(state.variance) >= 0)


# B. Non-finite handling -----------------------------------------------------------


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_b1_the_inner_state_never_sees_a_nonfinite_value(bad):
    grads = jnp.array([bad, bad, bad, 1, 1, 1], jnp.float32)[:, None]
    tx = skip_nonfinite(optax.adam(0.1), max_consecutive_steps=1)
    updates, state, params = replay(tx, grads, jnp.zeros(1))
    assert list(state.record.bad_in_a_row) == [1, 2, 3, 0, 0, 0]
    assert list(state.record.escalation) == [1, 1, 1, 0, 0, 0]
    assert list(state.record.accepted_steps) == [0, 0, 0, 1, 2, 3]
    plain = replay(optax.adam(0.1), grads[3:], jnp.zeros(1))
    np.testing.assert_array_equal(updates[3:], plain[0])


def test_b2_skipping_is_useless_once_a_parameter_is_lost():
    params = {"a": jnp.ones(2), "mlp": {"kernel": jnp.array([1.0, jnp.nan])}}
    tx = skip_nonfinite(optax.sgd(0.1))
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    _, state = first(tx, grads, params)
    assert state.record.escalation == 2
    assert leaf_name(params, state.record.first_bad_parameter) == "mlp/kernel"
    _, state = first(tx, grads, {**params, "mlp": {"kernel": jnp.ones(2)}})
    assert state.record.escalation == 0
    assert leaf_name(params, state.record.first_bad_parameter) is None


@pytest.mark.parametrize("wrap", [skip_nonfinite, skip_spikes])
def test_b3_b4_loss_and_gradient_are_tested_each_by_itself(wrap):
    tx = wrap(optax.sgd(0.1))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def one(loss, entry):
        grads = {"a": jnp.ones(2), "b": jnp.stack([entry, entry])}
        return tx.update(grads, tx.init(params), params, loss=loss)

    loss = jnp.array([jnp.nan, 1.0, jnp.inf, 1.0])
    entry = jnp.array([1.0, jnp.nan, jnp.inf, 1.0])
    updates, state = jax.jit(jax.vmap(one))(loss, entry)
    record = state.record
    both = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRADIENT)
    assert list(record.reason) == [
        int(Cause.NONFINITE_LOSS),
        int(Cause.NONFINITE_GRADIENT),
        both,
        0,
    ]
    assert list(record.skipped_steps) == [1, 1, 1, 0]
    assert list(record.bad_steps) == [1, 1, 1, 0]
    assert list(record.first_bad_gradient) == [-1, 1, 1, -1]
    assert not np.any(updates["a"][:3]) and np.all(updates["a"][3])


def test_b4_a_nan_that_is_born_in_the_backward_pass():
    tx = skip_nonfinite(optax.sgd(0.1))
    w = {"w": jnp.zeros(3)}
    loss, grads = jax.value_and_grad(lambda p: jnp.sqrt(jnp.sum(p["w"] ** 2)))(w)
    assert loss == 0 and np.all(np.isnan(grads["w"]))
    updates, state = tx.update(grads, tx.init(w), w, loss=loss)
    assert not np.any(updates["w"])
    assert state.record.reason == int(Cause.NONFINITE_GRADIENT)
    assert leaf_name(w, state.record.first_bad_gradient) == "w"


def test_b5_what_else_the_batch_changed_is_held_back():
    tx = optax.chain(skip_nonfinite(optax.sgd(0.1)))
    params = jnp.ones(1)
    state, stats = tx.init(params), jnp.zeros(1)
    for grad in (1.0, jnp.nan, 1.0):
        new_stats = 0.9 * stats + grad
        updates, state = tx.update(jnp.array([grad]), state, params)
        stats = jnp.where(was_skipped(state), stats, new_stats)
    np.testing.assert_allclose(stats, [1.9])
    text = (
        "needed the state of skip_nonfinite or skip_spikes, got none in this optimizer "
        "state: wrap the optimizer, optax.chain(skip_nonfinite(adamw))"
    )
    with pytest.raises(ValueError) as error:
        was_skipped(optax.sgd(0.1).init(params))
    assert str(error.value) == text


@pytest.mark.parametrize("wrap", [skip_nonfinite, skip_spikes])
def test_b6_an_empty_batch_is_no_failure(wrap):
    tx = wrap(optax.sgd(0.1))
    nan, one = jnp.nan, 1.0
    loss = jnp.array([nan, one, nan, nan])
    tokens = jnp.array([8, 0, 0, 8], jnp.int32)
    grads = jnp.array([nan, 0.0, nan, nan])[:, None]
    _, state, _ = replay(tx, grads, jnp.ones(1), loss=loss, tokens=tokens)
    empty = int(Cause.EMPTY_BATCH)
    assert list(state.record.reason)[1:3] == [empty, empty]
    assert list(state.record.bad_in_a_row) == [1, 1, 1, 2]
    assert list(state.record.skipped_steps) == [1, 2, 3, 4]


def test_b6_an_empty_micro_batch_has_no_weight():
    loss = jnp.array([2.0, jnp.nan, 4.0, 6.0])
    tokens = jnp.array([10.0, 0.0, 10.0, 20.0])
    grads = jnp.array([1.0, jnp.nan, 2.0, 3.0])[:, None]
    tx = accumulate(skip_nonfinite(optax.sgd(1.0)), 4)
    updates, state, _ = replay(tx, grads, jnp.zeros(1), loss=loss, tokens=tokens)
    np.testing.assert_allclose(updates[:, 0], [0, 0, 0, -2.25])
    assert not np.any(state.bad_micro_batches)
    assert state.inner_state.record.reason[-1] == 0


# D. Skip and accumulation ---------------------------------------------------------


def test_d1_a_skipped_step_is_bit_identical_to_none():
    """A bad loss or gradient, finite or not, at step 10 of 12."""
    inner = optax.adamw(optax.linear_schedule(0.1, 0.0, 20), weight_decay=0.1)
    tx = skip_spikes(inner, window=8)
    grads = np.random.default_rng(0).normal(size=(4, 12, 3)).astype(np.float32)
    loss = np.full([4, 12], 2.0, np.float32)
    loss[:2, 10], grads[2, 10], grads[3, 10] = [np.nan, 50.0], np.nan, 1e6

    def run(grads, loss):
        def step(carry, x):
            params, state = carry
            updates, state = tx.update(x[0], state, params, loss=x[1])
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, state, params)

        start = (jnp.ones(3), tx.init(jnp.ones(3)))
        return jax.lax.scan(step, start, (grads, loss))[1]

    updates, state, params = jax.jit(jax.vmap(run))(grads, loss)
    assert np.all(state.record.skipped[:, 10]) and not np.any(updates[:, 10])
    for x in jax.tree.leaves((params, state.inner_state)):
        np.testing.assert_array_equal(x[:, 10], x[:, 9])
    assert np.all(updates[:, 11]) and not np.any(state.record.skipped[:, 11])


def test_d2_counters_inside_count_accepted_steps_and_outside_data_steps():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = skip_nonfinite(optax.sgd(schedule))
    grads = jnp.ones([10, 1]).at[jnp.array([3, 4])].set(jnp.nan)
    updates, state, _ = replay(tx, grads, jnp.zeros(1))
    assert state.record.accepted_steps[-1] == 8 and state.record.skipped_steps[-1] == 2
    assert list(np.nonzero(np.asarray(state.record.skipped))[0]) == [3, 4]
    assert optax.tree.get(state.inner_state, "count")[-1] == 8
    np.testing.assert_allclose(updates[5], -schedule(3))


WINDOWS = [
    # Micro-gradients of two windows of four, what each rule makes of the first.
    ([1, np.nan, 2, 3], -2.0, 0.0),
    ([np.inf, 1, 2, 3], -2.0, 0.0),
    ([1, 2, 3, np.nan], -2.0, 0.0),
    ([np.nan] * 4, 0.0, 0.0),
    ([1, 2, 3, 6], -3.0, -3.0),
]


@pytest.mark.parametrize("on_bad", ["renormalise", "drop"])
def test_d3_d4_a_bad_micro_batch_neither_stays_nor_dilutes(on_bad):
    tx = accumulate(optax.sgd(1.0), 4, on_bad=on_bad)
    micro = jnp.array([w[0] + [1, 1, 1, 1] for w in WINDOWS], jnp.float32)

    def run(grads):
        def step(state, g):
            updates, state = tx.update(g, state)
            return state, (updates, state)

        return jax.lax.scan(step, tx.init(jnp.zeros(1)), grads[:, None])[1]

    updates, state = jax.jit(jax.vmap(run))(micro)
    wanted = [w[1 if on_bad == "renormalise" else 2] for w in WINDOWS]
    np.testing.assert_allclose(updates[:, 3, 0], wanted, rtol=1e-6)
    np.testing.assert_array_equal(updates[:, 7, 0], -np.ones(len(WINDOWS)))
    assert not np.any(updates[:, [0, 1, 2, 4, 5, 6]])
    emitted = np.asarray(state.emitted[:, 3])
    np.testing.assert_array_equal(emitted, np.array(wanted) != 0)
    np.testing.assert_array_equal(state.accepted_steps[:, 7], 1 + emitted)
    np.testing.assert_array_equal(state.dropped_windows[:, 7], ~emitted)


def test_d3_d4_multi_steps_takes_one_more_micro_batch():
    grads = jnp.array([1, jnp.nan, 2, 3, 6, 1, 1, 1, 1])[:, None]
    fn = skip_bad_micro_batches()
    tx = optax.MultiSteps(optax.sgd(1.0), 4, should_skip_update_fn=fn)
    updates, state, _ = replay(tx, grads, jnp.zeros(1))
    np.testing.assert_allclose(updates[:, 0], [0, 0, 0, 0, -3, 0, 0, 0, -1])
    assert list(state.skip_state.skipped) == [False, True] + [False] * 7
    plain, _, _ = replay(optax.MultiSteps(optax.sgd(1.0), 4), grads, jnp.zeros(1))
    assert np.all(np.isnan(plain[4:, 0]))


def test_d3_large_micro_batches_are_left_out_by_a_limit():
    fn = skip_bad_micro_batches(max_norm=10.0)
    tx = optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=fn)
    updates, _, _ = replay(tx, jnp.array([1.0, 1e6, 3.0])[:, None], jnp.zeros(1))
    np.testing.assert_allclose(updates[:, 0], [0, 0, -2])


def test_d5_updates_keep_their_dtype_and_limits_do_not_retrace():
    dtypes = {"a": jnp.bfloat16, "b": jnp.float16, "c": jnp.float32}
    params = {k: jnp.ones((2, 2), d) for k, d in dtypes.items()}
    traces = []

    @jax.jit
    def step(params, limit, loss):
        traces.append(1)
        tx = clip_by_global_norm(limit)
        wrapped = accumulate(skip_spikes(skip_nonfinite(tx)), 1)
        return wrapped.update(params, wrapped.init(params), params, loss=loss)

    for limit in (np.float32(1.0), np.float32(2.0)):
        updates, state = step(params, limit, np.float32(1))
        assert {k: u.dtype for k, u in updates.items()} == dtypes
        inner = state.inner_state.inner_state.inner_state
        assert inner.norm.dtype == jnp.float32 and inner.threshold == limit
    assert len(traces) == 1


# Refusals --------------------------------------------------------------------------

REFUSED = {
    "clip_by_global_norm: needed max_norm >= 0, got -1.0": lambda: clip_by_global_norm(
        -1.0
    ),
    "clip_by_global_norm: needed within to be 'tree' or 'group', got 'leaf'": lambda: (
        clip_by_global_norm(1.0, within="leaf")
    ),
    "zclip: needed mode to be 'reciprocal', 'mean' or 'max', got 'min'": lambda: zclip(
        mode="min"
    ),
    "zclip: needed z_threshold > 0, got 0.0": lambda: zclip(z_threshold=0.0),
    "adagc: needed 0 <= decay < 1, got 1.0": lambda: adagc(decay=1.0),
    "autoclip: needed 0 <= percentile <= 100, got 101": lambda: autoclip(
        percentile=101
    ),
    "clippy: needed lambda_rel >= 0, got -0.1": lambda: clippy(lambda_rel=-0.1),
    "accumulate: needed a whole number every_steps >= 1, got 0": lambda: accumulate(
        optax.sgd(1.0), 0
    ),
    "skip_spikes: needed rule to be 'robust', 'olmo', 'maxtext', 'levanter' or "
    "'llmc', got 'mean'": lambda: skip_spikes(optax.sgd(1.0), rule="mean"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_hyperparameter_out_of_range_is_refused_in_words(text):
    with pytest.raises(ValueError) as error:
        REFUSED[text]()
    assert str(error.value) == text


@pytest.mark.parametrize("tx", [adaptive_gradient_clip(), clippy()])
def test_rules_that_need_parameters_say_so(tx):
    text = "needed the parameters, got None: write tx.update(grads, state, params)"
    with pytest.raises(ValueError) as error:
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
    assert str(error.value) == text
