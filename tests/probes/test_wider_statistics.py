"""Kurtosis, quantiles, thresholds and places against NumPy in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stabil.probes import _read, _reduce, collect, register, tap
from stabil.probes._quantiles import stride
from stabil.probes._statistics import columns

WIDER = columns(
    ("kurtosis", "absmax_index", "first_bad_index")
    + ("q50", "q99", "q999", "above_6_count", "above_0.5_share")
)
SHAPE = (6, 80)
TINY = float(np.finfo(np.float32).tiny)
RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=SHAPE)


@functools.partial(jax.jit, static_argnums=1)
def _measure(x, statistics):
    return _read.measure(x, statistics)


def told(x):
    return dict(zip(WIDER, np.asarray(_measure(x, WIDER), np.float64), strict=True))


def check(x):
    """Compares every statistic of `x` with what NumPy makes of it in float64."""
    got = told(x)
    v = np.asarray(x).astype(np.float32).astype(np.float64).ravel()
    v = np.where(np.abs(v) < TINY, 0, v)
    finite = np.isfinite(v)
    a = np.abs(v[finite])
    bad = np.flatnonzero(~finite)
    np.testing.assert_equal(got["first_bad_index"], bad[0] if bad.size else np.nan)
    assert got["above_6_count"] == (a > 6).sum()
    if not a.size:
        assert all(np.isnan(got[n]) for n in WIDER if n[:2] not in ("fi", "ab"))
        assert np.isnan(got["above_0.5_share"]) and np.isnan(got["absmax_index"])
        return
    np.testing.assert_allclose(got["above_0.5_share"], np.mean(a > 0.5), rtol=1e-6)
    for name, level in (("q50", 0.5), ("q99", 0.99), ("q999", 0.999)):
        # The smallest magnitude with at least this share at or below it; float32
        # shares may step over an entry that lies on the level.
        near = [np.quantile(a, level + d, method="inverted_cdf") for d in (-1e-6, 1e-6)]
        floor = a.max() * 2.0**-20
        low, high = near[0] * (1 - 2.0**-5), near[1] * (1 + 2.0**-5)
        assert low - floor - 1e-37 <= got[name] <= high + 1e-37, (name, near)
        assert got[name] <= a.max() * (1 + 1e-6)
    if a.max() == 0:
        assert np.isnan(got["absmax_index"])
    else:
        index = int(got["absmax_index"])
        assert abs(v[index]) >= a.max() * (1 - 2.0**-7)
    check_kurtosis(got["kurtosis"], v[finite])


def check_kurtosis(got, v):
    d = (v - v.mean()) / max(np.abs(v).max(), TINY)
    variance, mean = np.mean(d**2), v.mean() / max(np.abs(v).max(), TINY)
    resolution = 2.0**-8 if np.abs(v.mean()) > 2.0**99 else 2.0**-18
    if variance == 0 or np.abs(v).max() < 1e-30:
        assert not np.isinf(got)
    elif np.sqrt(variance) > resolution * abs(mean):
        want = np.mean(d**4) / variance**2
        np.testing.assert_allclose(got + 3, want, rtol=2e-3)


CASES = {
    "normal": NORMAL,
    "huge": NORMAL * 8e37,
    "tiny": NORMAL * 1e-30,
    "denormal": NORMAL * 1e-40,
    "every scale": np.exp(NORMAL * 20).clip(1e-37, 3e38),
    "every scale, both signs": NORMAL * np.exp(RNG.normal(size=SHAPE) * 20),
    "equal": np.full(SHAPE, 0.1),
    "largest": np.full(SHAPE, np.finfo(np.float32).max),
    "largest of both signs": np.where(NORMAL > 0, 3.4e38, -3.4e38),
    "large mean": NORMAL + 1000,
    "one outlier": np.where(np.arange(480).reshape(SHAPE) == 77, 22500, NORMAL),
    "outlier at the head": np.where(np.arange(80) == 0, 1e6, NORMAL),
    "rows apart": NORMAL + 1e4 * np.arange(6)[:, None],
    "rows at every scale": NORMAL * 10.0 ** np.arange(-30, 30, 10)[:, None],
    "bad entries": np.where(np.abs(NORMAL) < 0.8, np.nan, NORMAL * 100),
    "bad rows": np.where(np.arange(6)[:, None] < 4, -np.inf, NORMAL),
    "last is bad": np.where(np.arange(480).reshape(SHAPE) == 479, np.inf, NORMAL),
    "all bad": np.full(SHAPE, np.nan),
    "zeros": np.zeros(SHAPE),
    "mostly zeros": np.where(NORMAL > 2, NORMAL, 0),
}


@pytest.mark.parametrize("name", list(CASES))
def test_matches_float64(name):
    check(jnp.asarray(CASES[name], jnp.float32))


def test_kurtosis_of_what_float32_can_tell():
    for name in ("equal", "largest", "zeros", "all bad"):
        assert np.isnan(told(jnp.asarray(CASES[name], jnp.float32))["kurtosis"])
    for name in ("normal", "huge", "tiny", "large mean", "rows at every scale"):
        got = told(jnp.asarray(CASES[name], jnp.float32))["kurtosis"]
        v = CASES[name].ravel() / np.abs(CASES[name]).max()
        d = v - v.mean()
        want = np.mean(d**4) / np.mean(d**2) ** 2 - 3
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=3e-4)


_entries = st.one_of(
    st.floats(width=32),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, 1.0, 3.4e38, -3.4e38, 1e-38, 1e20, np.nan, np.inf]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_entries, min_size=1, max_size=24), st.integers(0, 2**16))
def test_matches_float64_on_adversarial_entries(entries, seed):
    x = np.random.default_rng(seed).choice(np.array(entries, np.float32), SHAPE)
    check(jnp.asarray(x))


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int32]
)
def test_matches_float64_in_every_width(dtype):
    x = jnp.asarray(CASES["one outlier"] * 20, jnp.float32).astype(dtype)
    check(x.astype(jnp.float32))
    names = columns(("absmax_index", "q99"))  # quick to compile
    got, want = _measure(x, names), told(x.astype(jnp.float32))
    np.testing.assert_array_equal(got, [want[n] for n in names])


@pytest.mark.parametrize("shape", [(0, 3), ()])
def test_nothing_and_one_element(shape):
    got = told(jnp.full(shape, 2.0))
    value = np.nan if 0 in shape else 2.0
    np.testing.assert_equal([got[n] for n in ("q50", "q99", "q999")], [value] * 3)
    np.testing.assert_equal(got["absmax_index"], value * 0)
    assert np.isnan(got["kurtosis"]) and got["above_6_count"] == 0


def test_parts_merge_to_the_whole():
    x = np.where(np.abs(NORMAL) < 0.3, np.nan, NORMAL * np.arange(1, 7)[:, None])
    x[0], x[2], x[5] = 5.0, np.nan, 1e-20
    x[1, :] = np.abs(x[4])
    groups = _reduce.groups_of(WIDER)

    @jax.jit
    def run(x):
        rows = jax.vmap(lambda row: _reduce.accumulate(row, groups))(x)
        packed = _reduce.settle(rows, groups)
        none, empty = jnp.full_like(packed, jnp.nan), _reduce.nothing(groups)[None]
        parts = (packed, none), (packed, none.at[3:].set(empty)), (none, none)
        stacked = jnp.stack([jnp.concatenate(p) for p in parts], axis=1)
        return _reduce.finish(_reduce.merge_packed(stacked, groups), WIDER)

    whole, again, none = run(jnp.asarray(x, jnp.float32))
    want = list(told(jnp.asarray(x, jnp.float32)).values())
    np.testing.assert_allclose(whole, want, rtol=1e-5)
    np.testing.assert_array_equal(again, whole)
    assert np.isnan(none).all()


def test_places_in_rows_that_are_cut_in_two():
    x = np.zeros((3, 100_277), np.float32)
    x[1, 100_000], x[1, 5], x[2, 7] = 99, np.nan, np.inf
    got = _measure(jnp.asarray(x), columns(("absmax_index", "first_bad_index")))
    assert got.tolist() == [100_277 + 100_000, 100_277 + 5]


def test_quantiles_of_a_sample(rng):
    x = rng.normal(size=(256, 1024)).astype(np.float32)
    x[:, 3::256] *= 50  # channels that a stride of 16 would never visit
    names = columns(("q50", "q99", "q999"))
    got = np.asarray(_measure(jnp.asarray(x), names))
    want = np.quantile(np.abs(x), [0.5, 0.99, 0.999])
    np.testing.assert_allclose(got, want, rtol=0.12)
    assert got[2] > 20
    steps = [(stride(n), n) for n in (1, 2**14, 2**21, 19200, 30030 * 16, 50257 * 512)]
    assert all(np.gcd(k, n) == 1 and n / k <= 2**17 for k, n in steps)
    assert all(k == 1 or n / k >= 2**13 for k, n in steps)


def test_sharded_tensors_are_told_whole(rng):
    # Where shardings are part of the type, each device takes its own sample.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = rng.normal(size=(8, 4, 96)).astype(np.float32)
    x[6, 1, 7], x[3, 2, 1] = np.inf, 1e3
    names = columns(("first_bad_index", "absmax_index", "q99"))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, P("data"))
        got = np.asarray(_measure(jax.device_put(x, sharding), names))
    want = [(3 * 4 + 2) * 96 + 1, (6 * 4 + 1) * 96 + 7]
    assert got[:2].tolist() == want
    want = np.quantile(np.abs(x), 0.99, method="inverted_cdf")
    np.testing.assert_allclose(got[2], want, rtol=2.0**-5)


def test_a_long_scan_is_one_row_with_places_in_the_stack():
    def turn(carry, x):
        return carry, tap(x, "v")

    x = np.zeros((150, 70), np.float32)
    x[140, 3], x[149, 2] = np.nan, 4
    run = collect(
        lambda x: jax.lax.scan(turn, 0, x)[1], stats=("absmax_index", "first_bad_index")
    )
    _, readings = jax.jit(run)(x)
    assert readings.values.tolist() == [[149 * 70 + 2, 140 * 70 + 3]]


@pytest.mark.parametrize("name", ["q95", "above_3_share"])
def test_names_with_numbers_are_taken(name):
    text = (
        f"needed a name that is not in use for a statistic, got {name!r}; write for "
        "example stabil.probes.register('negatives', lambda e: e.value < 0)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        register(name, jnp.abs)
