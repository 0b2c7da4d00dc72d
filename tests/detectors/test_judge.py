"""Promises of the whole verdict: unit, order, non-finite input, constants, recovery."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stabil
from stabil.detectors import Evidence, JudgeState, groups_of, judge, read_rows
from stabil.vocabulary import Severity

LEAVES, ROWS, STEPS = 6, 5, 360
NAMES = tuple(f"block_{i}/mlp" for i in range(ROWS))
STATISTICS = ("absmax", "std", "kurtosis", "stable_rank")
GROUPS = groups_of([*(f"grads/{i}" for i in range(LEAVES)), *NAMES])


def one_step(state, inputs):
    loss, sums, table, update = inputs
    evidence = Evidence(
        loss=loss,
        loss_given=jnp.asarray(True),
        gradient_sums=sums,
        moment_levels=jnp.sqrt(sums),
        bad_moments=jnp.zeros(LEAVES, bool),
        impossible_moments=jnp.zeros(LEAVES, bool),
        update_rms=update,
        rows=read_rows(stabil.Readings(table, NAMES, STATISTICS), ROWS),
    )
    found = judge(
        state,
        evidence,
        threshold=6.0,
        warmup_steps=20,
        max_consecutive_steps=5,
        rows_fingerprint=jnp.uint32(7),
        groups=GROUPS,
        names=ROWS,
    )
    return found.state, found.verdict


@jax.jit
def scan(state, *inputs):
    return jax.lax.scan(one_step, state, inputs)


def go_on(state, losses, sums, tables, updates=None):
    updates = np.sqrt(sums[:, 0]) if updates is None else updates
    return scan(state, losses, sums, tables, updates)


def play(*inputs):
    return go_on(JudgeState.empty(LEAVES, ROWS), *inputs)


def healthy(rng):
    """A run without events: losses, sums of squares, readings."""
    losses = 2 + 3 * np.exp(-np.arange(STEPS) / 60)
    sums = np.exp(0.2 * rng.normal(size=(STEPS, LEAVES)) + rng.normal(size=LEAVES))
    tables = np.exp(
        0.05 * rng.normal(size=(STEPS, ROWS, 4)) + rng.normal(size=(ROWS, 4))
    )
    losses = losses * np.exp(0.01 * rng.normal(size=STEPS))
    return [x.astype(np.float32) for x in (losses, sums, tables)]


def eventful(rng):
    """The same with spikes, a shift, a layer that goes away and a dead one."""
    losses, sums, tables = healthy(rng)
    losses[150:156] *= 3
    sums[150:153] *= 1e4
    sums[200:, 4] *= np.geomspace(1, 1e5, STEPS - 200)
    sums[250:, 2] = 0
    tables[220, 3, 0] *= 50
    tables[280:, 1, 1] *= 1e-4
    return [losses, sums, tables]


def test_healthy_run_is_silent_and_events_are_not(rng):
    _, verdict = play(*healthy(rng))
    assert np.all(verdict.severity < Severity.WARN)
    _, verdict = play(*eventful(rng))
    assert np.all(verdict.severity[:150] < Severity.WARN)
    assert np.all(verdict.severity[150:156] == Severity.BLOCK)


def test_the_update_departs_before_gradient_and_loss():
    losses, sums = np.full(STEPS, 2.0), np.ones((STEPS, LEAVES))
    updates, tables = np.ones(STEPS), np.ones((STEPS, ROWS, 4))
    updates[300:] = 2.0
    losses[301], sums[301] = 3.0, 25.0
    given = [x.astype(np.float32) for x in (losses, sums, tables, updates)]
    _, verdict = play(*given)
    found = np.flatnonzero(verdict.flags)
    assert found[0] == 300
    assert stabil.Cause.names(int(verdict.flags[300])) == ("update_spike",)
    assert verdict.first[300] == 2 + 2 * LEAVES
    assert "loss_spike" in stabil.Cause.names(int(verdict.flags[301]))


@given(st.integers(-20, 20), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_the_unit_is_indifferent(power, seed):
    losses, sums, tables = eventful(np.random.default_rng(seed))
    c = np.float32(2.0**power)
    _, one = play(losses, sums, tables)
    # The kurtosis has no unit.
    _, other = play(c * losses, c * c * sums, tables * np.array([c, c, 1, c]))
    np.testing.assert_array_equal(one.severity, other.severity)
    np.testing.assert_array_equal(one.flags, other.flags)
    np.testing.assert_array_equal(one.first, other.first)


@given(st.permutations(range(LEAVES)), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_the_order_of_leaves_is_indifferent(order, seed):
    losses, sums, tables = eventful(np.random.default_rng(seed))
    sums[:, 0] = 1.0  # also read as the size of the update
    order = [0, *(i for i in order if i)]
    _, one = play(losses, sums, tables)
    _, other = play(losses, sums[:, order], tables)
    np.testing.assert_array_equal(one.severity, other.severity)
    np.testing.assert_array_equal(one.flags, other.flags)


def test_nonfinite_input_changes_no_level(rng):
    losses, sums, tables = eventful(rng)
    before, _ = play(losses, sums, tables)
    bad = [np.array(x[:STEPS]) for x in (losses, sums, tables)]
    bad[0][:120] = np.inf
    bad[1][120:240] = np.nan
    bad[2][240:, 0] = 1.0
    bad[0][240:] = np.nan
    after, verdict = go_on(before, *bad)
    assert np.all(verdict.severity == Severity.BLOCK)
    assert np.all(np.isfinite(verdict.score))
    counted = dict(shadow=before.shadow)
    for a, b in zip(
        jax.tree.leaves(before._replace(**counted)),
        jax.tree.leaves(after._replace(**counted)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=8, deadline=None)
def test_constants_never_alarm(loss, size):
    shapes = (STEPS, LEAVES), (STEPS, ROWS, 4)
    sums, tables = (np.full(s, size, np.float32) for s in shapes)
    _, verdict = play(np.full(STEPS, loss, np.float32), sums, tables)
    assert not np.any(verdict.severity) and not np.any(verdict.flags)


@given(st.integers(0, 2**32 - 1))
@example(256)  # levels of siblings that are still on their way
@settings(max_examples=8, deadline=None)
def test_any_finite_past_is_overcome_within_a_hundred_steps(seed):
    rng = np.random.default_rng(seed)
    past = healthy(rng)
    wild = [np.exp(rng.normal(size=x[:200].shape) * rng.integers(1, 6)) for x in past]
    for x, w in zip(past, wild, strict=True):
        x[:200] = w
    state, verdict = play(*past)
    assert np.all(verdict.severity[300:] < Severity.BLOCK)
    assert np.all(verdict.severity[300:] < Severity.WARN)
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))


def test_a_huge_leap_is_told_in_the_warm_up_and_ends_by_itself(rng):
    for edit, cause in ((1, "gradient_spike"), (2, "activation_shift")):
        given = healthy(rng)
        given[edit][8:] *= 1e9 if edit == 1 else 1e4
        _, verdict = play(*given)
        blocked = np.flatnonzero(verdict.severity == Severity.BLOCK)
        assert blocked[0] == 8 and blocked[-1] < 30
        assert cause in stabil.Cause.names(int(verdict.flags[8]))
        # Sixty times in one step, and growth with the third power, are left alone.
        given = healthy(rng)
        given[edit][8:] *= 3600 if edit == 1 else 60
        assert not np.any(play(*given)[1].severity[:20] == Severity.BLOCK)
        given = healthy(rng)
        growth = np.arange(1, 21).reshape(-1, *[1] * (given[edit].ndim - 1)) ** 3
        growth = growth**2 if edit == 1 else growth
        given[edit][:20] *= growth
        assert not np.any(play(*given)[1].severity[:20] == Severity.BLOCK)
