"""Rows of readings against a plain loop: leaps, limits, and what changes slowly."""

import jax
import jax.numpy as jnp
import numpy as np

import stabil
from stabil.detectors import BaselineState, read_rows
from stabil.detectors._rows import KINDS, follow_rows

STATISTICS = ("absmax", "std", "kurtosis", "stable_rank")
NAMES = ("mlp", "attn/logits", "head")
MEMORY = dict(threshold=6.0, decay=0.98, warmup_steps=20, max_consecutive_steps=5)
FALLS, RISES = {1: np.log(100), 3: np.log(4)}, {2: np.log(100)}


@jax.jit
def play(tables):
    """What is found in tables `[steps, rows, statistics]`."""

    def step(state, table):
        rows = read_rows(stabil.Readings(table, NAMES, STATISTICS), len(NAMES))
        return follow_rows(
            state, rows, floor=jnp.float32(0.05), first=jnp.float32(0.5), **MEMORY
        )

    return jax.lax.scan(step, BaselineState.empty(KINDS * len(NAMES)), tables)[1]


def reference(values, kind, limit):
    """Steps of leaps, of limits, and of slow events, for one number of one row."""
    m = d = ref = 0.0
    n = streak = 0
    prior = np.inf
    leaps, limits, slow = [], [], []
    for t, value in enumerate(values):
        if not (np.isfinite(value) and value > 0):
            continue
        x = np.log(value)
        s = max(1.2533141373155003 * d, 0.05) * (1 + 4 / max(n, 1))
        armed, gap, old = n >= 20, x - m, m
        z = gap / s if armed else 0.0
        leap = z > 10 and gap > np.log(8)
        n += 1
        a = max(1 / n, 0.02)
        side, outlier = int(np.sign(gap)), abs(z) > 6
        streak = (streak + side if side == np.sign(streak) else side) * outlier
        past = armed and kind == 0 and x > ref + limit
        if n == 1:
            m, d = x, 0.5
        else:
            m += a * np.clip(gap, -3 * s, 3 * s)
            d += a * (min(abs(gap), 3 * s) - d)
        if abs(streak) >= 5:
            m, streak = x, 0
            prior = old if side > 0 else prior
        elif outlier and side < 0 and abs(x - prior) <= 3 * s:
            m, prior, streak = prior, np.inf, 0
        if n <= 20:
            ref = m
        away = m - ref if armed else 0.0
        event = past and not leap
        event |= away < -FALLS.get(kind, np.inf) or away > RISES.get(kind, np.inf)
        if event:
            ref = m
            slow.append(t)
        leaps += [t] * int(leap)
        limits += [t] * int(past)
    return leaps, limits, slow


def test_equals_the_loop(rng):
    tables = np.exp(0.1 * rng.normal(size=(600, 3, 4))) * [1.0, 0.3, 3.0, 50.0]
    ramp = np.linspace(0, 1, 500)[:, None]
    tables[100:, 0] *= 300 ** (ramp * [1, -1, 1.2, -0.5])
    tables[100:, 1] *= 40 ** (ramp * [1, 0, 0, 0])
    tables[300, 2] *= 20
    tables[320:330, 2] *= 150
    tables[400:420, 1] = np.nan
    tables = tables.astype(np.float32)
    tables[:, :, 2] -= 3  # as a probe tells it, over that of a Gaussian
    found = play(tables)
    seen = {0: found.slopes.limit, 1: found.slopes.collapsed}
    seen |= {2: found.slopes.tail, 3: found.slopes.rank}
    shapes = [set(), set(), set()]
    for row in range(3):
        limit = np.log(10) if row == 1 else np.log(100)
        for kind in range(KINDS):
            values = tables[:, row, kind].astype(float) + 3 * (kind == 2)
            leaps, limits, slow = reference(values, kind, limit)
            assert np.flatnonzero(seen[kind][:, row]).tolist() == slow
            if kind == 0:
                assert np.flatnonzero(found.jumps[:, row]).tolist() == leaps
                assert np.flatnonzero(found.limits[:, row]).tolist() == limits
            elif kind < 3:
                shapes[row] |= set(leaps)
    for row in range(3):
        assert np.flatnonzero(found.shapes[:, row]).tolist() == sorted(shapes[row])
    # The streams speak: growth past a limit, a collapse, a heavy tail, a lower rank.
    assert all(np.any(x[:, 0]) for x in seen.values())
    assert np.any(seen[0][:, 1]) and np.any(found.jumps[:, 2])


def test_only_what_was_read_is_read():
    table = jnp.array([[jnp.nan, 0.0, 2e-3, 0.2], [3.0, 2.0, 0.0, 0.7]])
    have = ("rms", "inf_count", "bfloat16_overflow", "float16_underflow")
    rows = read_rows(stabil.Readings(table, ("a", "b"), have), 4)
    np.testing.assert_array_equal(rows.magnitudes, [np.nan, 3.0, np.nan, np.nan])
    np.testing.assert_array_equal(rows.nonfinite, [False, True, False, False])
    np.testing.assert_array_equal(rows.crowded, [True, True, False, False])
    assert np.all(np.isnan(rows.shapes)) and rows.shards.shape == (0, 4)


def test_a_row_whose_branch_did_not_run_is_not_ill():
    have = ("nan_count", "inf_count", "absmax")
    table = jnp.stack([jnp.full([3], jnp.nan), jnp.array([1.0, 0.0, jnp.nan])])
    readings = stabil.Readings(table, ("a", "b"), have, table[None])
    rows = read_rows(readings, 2)
    np.testing.assert_array_equal(rows.nonfinite, [False, True])
    np.testing.assert_array_equal(rows.ill_shards, [[False, True]])
    assert np.all(np.isnan(rows.magnitudes))
