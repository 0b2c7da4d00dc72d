"""The judge of the loss in the compiled step, against the one for rows in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.curves import Judge
from stabil.detectors import LevelState, LossState, follow, judge_loss

STEPS = 900


def play(losses, norm_scores, longest, every=1, norm_given=True, max_leaps=16):
    """Severities, scores and leaps `[steps]` of one stream."""

    def step(state, row):
        loss, norm = row
        state, found = judge_loss(
            state,
            loss,
            norm,
            steps=every,
            norm_given=norm_given,
            longest_steps=longest,
            max_leaps=max_leaps,
        )
        said = (found.severity, found.score, found.shifted, found.leap)
        return state, said

    return jax.lax.scan(step, LossState.empty(), (losses, norm_scores))


play_all = jax.jit(jax.vmap(play, in_axes=(0, 0, None, None, None)), static_argnums=2)
WARM_UP = 20


def reference(losses, norm_scores, longest, every=1, norm_given=True):
    """The same by `stabil.curves.Judge`, one Python float after the other."""
    judge, out = Judge(longest=longest), []
    for loss, norm in zip(losses.tolist(), norm_scores.tolist(), strict=True):
        judge.norm_score = norm
        if np.isfinite(loss) and (loss or judge.linear):
            sparse = every >= 3 and judge.loss.seen > 0
            severity = judge._loss(loss, sparse, norm_given)
            out.append((severity, judge.loss_score, judge.loss.accepted))
        else:
            out.append((0, 0.0, False))
    return np.array(out)


def streams(rng):
    """Runs of many kinds, float32 `[streams, STEPS]`."""
    t = np.arange(STEPS)
    noise = rng.normal(size=(12, STEPS))
    runs = 2 + 3 * np.exp(-t / 80) * np.exp(0.01 * noise)
    runs[0, 300] *= 1.2
    runs[1, 300:340] *= 1.5
    runs[2, 300:] *= 1.3
    runs[3, 300:520] *= np.linspace(1.1, 3, 220)
    runs[4, 3:12] *= 4
    runs[5] = np.exp(noise[5])
    runs[6] = np.repeat(np.exp(noise[6, :225]), 4)
    runs[7] = -5 + 0.05 * noise[7] + 3 * (t == 500) + 1.0 * (t > 700)
    runs[8] = np.linspace(1, -1, STEPS) + 0.02 * noise[8]
    runs[9, 200:230] = np.nan
    runs[9, 400::50] *= 4
    runs[10] = np.where(t < 100, 0.0, runs[10])
    runs[11] *= np.exp(0.03 * ((t // 30) % 2))
    return runs.astype(np.float32)


@pytest.mark.parametrize(
    "longest, every, norm_given", [(5, 1, True), (200, 1, True), (200, 100, False)]
)
def test_equals_the_judge_of_rows(rng, longest, every, norm_given):
    losses = streams(rng)
    norms = np.where(rng.random(losses.shape) < 0.1, 8.0, 0.0).astype(np.float32)
    rest = (longest, every, norm_given)
    state, (severity, score, shifted, _) = play_all(losses, norms, *rest)
    for i in range(len(losses)):
        expected = reference(losses[i], norms[i], *rest)
        np.testing.assert_array_equal(severity[i], expected[:, 0], err_msg=str(i))
        np.testing.assert_array_equal(shifted[i], expected[:, 2], err_msg=str(i))
        np.testing.assert_allclose(
            score[i], expected[:, 1], rtol=2e-2, atol=2e-2, err_msg=str(i)
        )
    assert all(np.all(np.isfinite(x)) for x in state.level._replace(prior=0.0))
    # The streams speak: most have a warning, and an alternating one has none (as rows
    # of 100 steps each, its two levels are more than a pattern).
    assert np.sum(np.max(severity, axis=1) == 2) >= 5
    assert every > 1 or np.all(severity[11] < 2)


@pytest.mark.parametrize("max_leaps", [0, 5, 16])
def test_leaps_are_warnings_or_huge_and_have_an_end(rng, max_leaps):
    losses = streams(rng)
    norms = np.zeros_like(losses)

    @jax.jit
    @jax.vmap
    def run(losses, norms):
        return play(losses, norms, 200, max_leaps=max_leaps)[1]

    severity, score, _, leap = map(np.asarray, run(losses, norms))
    assert np.all((severity[leap] == 2) | (score[leap] > 10))
    assert np.any(leap) == (max_leaps > 0)
    for row in leap[:, WARM_UP:]:
        ends = np.flatnonzero(np.diff(row.astype(int), prepend=0, append=0))
        assert np.all(np.diff(ends)[::2] <= max_leaps)
    # Rises by less than a fifth, noise and alternation are none.
    assert not np.any(leap[[0, 5, 6, 11]])
    if max_leaps:
        assert np.all(leap[4, 3:12]), "a blow-up in the warm-up"
        assert leap[9, 400::50].all()


@pytest.mark.parametrize("begin", [5, 300])
def test_the_first_loss_far_below_zero_is_refused_and_learnt_in_the_end(rng, begin):
    t = np.arange(STEPS)
    losses = ((1 + 2 * np.exp(-t / 80)) * np.exp(0.01 * rng.normal(size=STEPS))).astype(
        np.float32
    )
    burst, lasting, mild = losses.copy(), losses.copy(), losses.copy()
    burst[begin : begin + 8] = -1e4
    lasting[begin:] = -1e4
    mild[begin:] -= 2  # falls through zero
    rows = np.stack([losses, burst, lasting, mild])
    run = jax.jit(jax.vmap(lambda x: play(x, jnp.zeros_like(x), 200)[1]))
    severity, _, _, leap = map(np.asarray, run(rows))
    assert not np.any(leap[[0, 3]])
    np.testing.assert_array_equal(np.flatnonzero(leap[1]), begin + np.arange(8))
    assert np.all(severity[1][leap[1]] == 2) and np.all(severity[1][~leap[1]] == 0)
    refused = np.flatnonzero(leap[2])
    np.testing.assert_array_equal(refused, begin + np.arange(len(refused)))
    assert len(refused) in (16, 17)


def test_nonfinite_changes_nothing(rng):
    losses = streams(rng)[:, 3:]
    zeros = np.zeros((len(losses), STEPS), np.float32)
    bad = np.broadcast_to(np.array([np.nan, np.inf, -np.inf], np.float32), (12, 3))
    before, _ = play_all(np.concatenate([bad, losses], 1), zeros, 200, 1, True)
    after, (severity, *_) = play_all(
        np.concatenate([losses, bad], 1), zeros, 200, 1, True
    )
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(severity[:, -3:])


def test_signals_of_a_vector_do_not_see_each_other(rng):
    values = np.log(np.maximum(streams(rng)[[1, 2, 5, 11]].T, 1e-3))

    @jax.jit
    def run(values):
        def step(state, x):
            state, height = follow(state, x, floor=0.005, threshold=6.0)
            return state, height.score

        return jax.lax.scan(step, LevelState.empty(values.shape[1:]), values)[1]

    together = run(values)
    for order in ([3, 1, 0, 2], [0, 1, 2, 3]):
        np.testing.assert_array_equal(run(values[:, order]), together[:, order])


def test_the_update_norm_can_be_watched_and_is_first():
    signals = np.ones((900, 4), np.float32)
    signals[500:, 0] = 2.0  # norm of the update
    signals[502:, 1] = 5.0  # norm of the gradient

    @jax.jit
    def run(values):
        def step(state, x):
            state, height = follow(state, x, floor=0.05, threshold=6.0)
            return state, height.score

        return jax.lax.scan(step, LevelState.empty((4,)), values)[1]

    out = np.asarray(run(np.log(signals))) > 6
    assert [int(np.argmax(out[:, i])) for i in (0, 1)] == [500, 502]
    assert not np.any(out[:, 2:])


@given(st.integers(0, 2**32 - 1), st.floats(-20, 20))
@settings(max_examples=20, deadline=None)
def test_any_finite_past_is_overcome(seed, level):
    """300 steps of health after any 600 finite ones, nothing is judged high."""
    rng = np.random.default_rng(seed)
    past = np.exp(rng.normal(size=(12, 600)) * rng.integers(0, 8, size=(12, 1)))
    health = np.exp(level + 0.02 * rng.normal(size=(12, 300)))
    losses = np.concatenate([past, health], axis=1).astype(np.float32)
    _, (severity, score, _, leap) = play_all(losses, np.zeros_like(losses), 5, 1, True)
    assert np.all(np.isfinite(score))
    assert not np.any(severity[:, 880:]) and not np.any(leap[:, 880:])
    assert np.all(leap.sum(axis=1) <= 45)


@given(st.floats(-1e30, 1e30, allow_subnormal=False))
@settings(max_examples=20, deadline=None)
def test_constants_never_alarm(value):
    losses = np.full((12, STEPS), value, np.float32)
    _, (severity, *_) = play_all(losses, np.zeros_like(losses), 200, 1, True)
    assert not np.any(severity)


def test_state_is_a_fixed_point():
    state = LossState.empty()
    new, _ = jax.jit(judge_loss)(state, jnp.float32(2.0), jnp.float32(0.0))
    a, b = jax.tree.leaves_with_path(state), jax.tree.leaves_with_path(new)
    assert [(p, x.shape, x.dtype) for p, x in a] == [
        (p, x.shape, x.dtype) for p, x in b
    ]
