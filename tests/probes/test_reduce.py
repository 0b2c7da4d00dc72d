"""Statistics against NumPy in float64, on inputs that break naive sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabil.probes import _quick, _read, _reduce
from stabil.probes._statistics import STATISTICS, columns, register

ALL = columns("all")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
TINY = float(np.finfo(np.float32).tiny)


@functools.partial(jax.jit, static_argnums=1)
def measure(x, statistics=ALL):
    return _read.measure(x, statistics)


@jax.jit
def measure_in_rows(x):
    """What `measure` tells where no quick pass runs."""
    groups = _reduce.groups_of(ALL)
    packed = _reduce.settle(_reduce.accumulate(x, groups)[None], groups)
    return _reduce.finish(packed[0], ALL)


def reference(x):
    """The same numbers by NumPy in float64; denormals are zero, as XLA has them."""
    v = np.asarray(x).astype(np.float64).ravel()
    v = np.where(np.abs(v) < TINY, 0, v)
    ok = v[np.isfinite(v)]
    counts = [np.isnan(v).sum(), np.isinf(v).sum(), (ok == 0).sum()]
    if not ok.size:
        return np.array([*counts, *[np.nan] * 6], np.float64)
    rms = np.sqrt(np.mean(ok**2))
    rest = [ok.min(), ok.max(), np.abs(ok).max(), ok.mean(), ok.std(), rms]
    return np.array([*counts, *rest], np.float64)


def assert_close(got, want, rtol=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    absmax = np.nan_to_num(want[5])
    # Squares of the smallest floats, and a mean of cancelling ones, are right to a
    # part of the largest entry.
    np.testing.assert_allclose(got[:6], want[:6], rtol=1e-6, atol=0)
    np.testing.assert_allclose(got[6:], want[6:], rtol=rtol, atol=2e-6 * absmax + 1e-32)


def test_columns_come_in_the_registry_order():
    assert ALL == tuple(STATISTICS)[:9]
    assert ALL == (
        *("nan_count", "inf_count", "zero_count", "min", "max"),
        *("absmax", "mean", "std", "rms"),
    )
    assert columns(("rms", "finite", "rms")) == ("nan_count", "inf_count", "rms")


def _cases():
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(7, 300))
    bad = normal * 100 + 1000
    bad[rng.random(bad.shape) < 0.6] = np.nan
    bad[2, 3], bad[4, 5] = np.inf, -np.inf
    first_bad = normal.copy()
    first_bad[:, :9] = np.nan
    sign = np.where(rng.random((7, 300)) < 0.5, 3.4e38, -3.4e38)
    edges = np.array([[2.0**12, 4095.9, -1000, 1, 1e-3]]).repeat(20, 0)
    return {
        "normal": normal,
        "huge": normal * 8e37,
        "tiny": normal * 1e-30,
        "denormal": normal * 1e-40,
        "every scale": np.exp(normal * 20).clip(1e-37, 3e38),
        "equal": np.full((7, 300), 0.1),
        "largest": np.full((70, 30), np.finfo(np.float32).max),
        "largest of both signs": sign,
        "between the accumulators": edges,
        "bad entries": bad,
        "bad head": first_bad,
        "one good row": np.where(np.arange(7)[:, None] == 3, normal, np.nan),
        "all nan": np.full((7, 300), np.nan),
        "all inf": np.full((7, 300), -np.inf),
        "scalar": np.array(3.0),
        "one element": np.array([[-2.0]]),
        "empty": np.zeros((0, 3)),
        "zeros": np.zeros((7, 300)),
        "narrow": rng.normal(size=(10, 5, 8)),
        "long": rng.normal(size=70_001) + 3,
        "long and even": rng.normal(size=2**17) - 3,
        "vocabulary": rng.normal(size=(3, 50257)),
    }


@pytest.mark.parametrize("name", list(_cases()))
def test_matches_float64(name):
    x = _cases()[name].astype(np.float32)
    want = reference(x)
    assert_close(measure(x), want)
    got = measure_in_rows(x)
    if name == "largest":  # not shifted: the difference of two means of 3e38
        assert got[7] < 5e-4 * want[6]
        got, want = got[:7], want[:7]
    assert_close(got, want)


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_std_survives_a_large_mean(rng, ratio):
    x = (rng.normal(size=(64, 300)) + ratio).astype(np.float32)
    got, want = measure(x), reference(x)
    np.testing.assert_allclose(got[7], want[7], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64_in_every_width(rng, dtype):
    x = np.asarray(rng.normal(size=(7, 300)) * 20, np.float32)
    x[1, 2], x[0, 0] = np.nan, 0
    if dtype != jnp.float8_e4m3fn:  # which has no infinity
        x[3, 4] = np.inf
    x = jnp.asarray(x).astype(dtype)
    assert_close(measure(x), reference(x.astype(jnp.float32)))


_entries = st.one_of(
    st.floats(width=32),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, 1.0, 3.4e38, -3.4e38, 1e-38, 1e20, np.nan, np.inf]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_entries, min_size=96, max_size=96))
def test_matches_float64_on_adversarial_entries(entries):
    x = np.array(entries, np.float32).reshape(4, 24)
    assert_close(measure(x), reference(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_counts_nan_in_a_large_array(dtype):
    # From 4096 entries on, XLA's CPU maximum loses NaN: it must be counted.
    x = jnp.ones((64, 256)).at[63, 255].set(jnp.nan).astype(dtype)
    assert measure(x).tolist()[:3] == [1, 0, 0]
    assert float(measure(x)[5]) == 1.0


def test_counts_past_the_largest_exact_float():
    x = jnp.zeros((4100, 4100), jnp.bfloat16)
    assert float(measure(x, ("zero_count",))[0]) == pytest.approx(4100**2, rel=1e-6)


def _bytes(run, x):
    return jax.jit(run).lower(x).compile().cost_analysis()["bytes accessed"]


def test_each_pass_reads_the_tensor_once():
    x = jnp.ones((8, 64, 1024))
    groups = _reduce.groups_of(columns(("finite", "absmax", "rms")))
    assert _bytes(lambda x: _reduce.accumulate(x, groups), x) < 1.1 * x.nbytes
    # The quick one writes an eighth for each of two accumulators, and reads it again.
    assert _bytes(lambda x: _quick.run(x, groups).sums, x) < 1.6 * x.nbytes


def test_what_is_usual_needs_no_careful_pass(rng):
    groups = _reduce.groups_of(ALL)
    found = jax.jit(
        lambda x: _quick.settle(jnp.float32(x.size), _quick.run(x, groups), groups)
    )
    normal = rng.normal(size=(8, 300)).astype(np.float32)
    outlier = normal.copy()
    outlier[0, 5] = 4000
    bad = normal.copy()
    bad[1, 1] = np.nan
    cases = [normal, outlier, normal * 1e-12, np.zeros_like(normal), bad, normal * 1e15]
    usual = [bool(found(x)[1]) for x in cases]
    assert usual == [True, True, True, True, False, False]


def test_complex_counts_as_its_parts():
    x = jnp.array([3 + 4j, 0 + 0j], jnp.complex64)
    want = reference(np.array([3.0, 4, 0, 0]))
    assert_close(measure(x), want)
    assert_close(measure(x[0]), reference(np.array([3.0, 4.0])))


def test_merging_parts_is_exact(rng):
    x = rng.normal(size=(6, 40)).astype(np.float32) * 1e3 + 5e3
    x[2] = np.nan
    groups = _reduce.groups_of(ALL)

    @jax.jit
    def run(x):
        packed = _read.conclude([_read.read(r, groups) for r in x], groups)
        none = jnp.full([1, packed.shape[1]], jnp.nan)
        # A part that did not run, and one without entries, change nothing.
        more = jnp.concatenate([packed, none, _reduce.nothing(groups)[None]])
        return [_reduce.merge_packed(p, groups) for p in (packed, more, none)]

    whole, again, none = run(jnp.asarray(x))
    assert_close(_reduce.finish(whole, ALL), reference(x))
    np.testing.assert_array_equal(again, whole)
    assert np.isnan(none).all()


def test_works_under_vmap_and_has_no_gradient():
    x = jnp.arange(12.0).reshape(3, 4)
    rows = jax.vmap(measure)(x)
    np.testing.assert_array_equal(rows, jnp.stack([measure(r) for r in x]))
    grad = jax.grad(lambda v: jnp.sum(v) + jnp.sum(measure(v)))(x)
    np.testing.assert_array_equal(grad, jnp.ones_like(x))


@pytest.mark.parametrize(
    ("stats", "error", "text"),
    [
        (
            ("absmax", "l7"),
            ValueError,
            "needed the name of a statistic in `stats`, got 'l7'; there are "
            + ", ".join(n for n in STATISTICS if not re.match(r"q\d|above_", n))
            + ", with numbers of your own above_6_share, above_6_count and q99, and "
            "the groups finite, all, norms, formats: write for example "
            "stats=('finite', 'absmax', 'rms')",
        ),
        (
            (),
            ValueError,
            "needed at least one statistic in `stats`, got (); write for example "
            "stats=('finite', 'absmax', 'rms')",
        ),
        (
            3,
            TypeError,
            "needed `stats` as a name or a tuple of names, got 3; write for example "
            "stats=('finite', 'absmax', 'rms')",
        ),
    ],
)
def test_refuses_unknown_statistics(stats, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        columns(stats)


MORE = (
    *("posinf_count", "neginf_count", "l1", "l2", "least", "dynamic_range"),
    *(f"{f}_overflow" for f in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")),
    *(f"{f}_underflow" for f in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")),
)


def _lost(v, dtype):
    """What a cast loses, by the cast itself, counted over the finite entries."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = v.astype(dtype).astype(np.float64)
    return np.mean(~np.isfinite(cast)), np.mean((cast == 0) & (v != 0))


@pytest.mark.parametrize("name", ["every scale", "bad entries", "huge", "all nan"])
def test_the_larger_set_matches_float64(name):
    x = _cases()[name].astype(np.float32)
    if name == "every scale":
        edges = [65519.9, 65520, 448, 464, 464.1, 61439.9, 61440, 3.394e38, 3.3963e38]
        edges += [2.0**-p for p in (9, 10, 11, 16, 17, 18, 24, 25, 26)] + [0.0, 57344]
        x = np.concatenate([x.ravel(), np.array(edges, np.float32)])
    got = dict(zip(MORE, np.asarray(measure(x, MORE)), strict=True))
    v = x.astype(np.float64).ravel()
    ok = v[np.isfinite(v)]
    assert got["posinf_count"] == (v == np.inf).sum()
    assert got["neginf_count"] == (v == -np.inf).sum()
    if not ok.size:
        assert all(np.isnan(got[n]) for n in MORE[2:])
        return
    top, least = np.abs(ok).max(), np.abs(ok[ok != 0]).min()
    largest = np.finfo(np.float32).max
    for name, want in {
        "l1": min(np.abs(ok).sum(), largest),
        "l2": min(np.sqrt((ok**2).sum()), largest),
        "least": least,
        "dynamic_range": np.log2(top / least),
    }.items():
        np.testing.assert_allclose(got[name], want, rtol=2e-6, err_msg=name)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2):
        name = jnp.dtype(dtype).name.removesuffix("fn")
        over, under = _lost(ok.astype(np.float32), dtype)
        np.testing.assert_allclose(got[f"{name}_overflow"], over, rtol=1e-6)
        np.testing.assert_allclose(got[f"{name}_underflow"], under, rtol=1e-6)


def test_a_registered_statistic_is_one_more_column(rng):
    name = "share_above_one"
    if name not in STATISTICS:
        register(name, lambda e: jnp.abs(e.value) > 1, finish=lambda n, s: s / n)
    x = rng.normal(size=(5, 70)).astype(np.float32)
    got = measure(x, columns(("absmax", name)))
    np.testing.assert_allclose(got, [np.abs(x).max(), np.mean(np.abs(x) > 1)])
    assert columns("all") == ALL


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        (
            ("absmax", jnp.abs),
            {},
            ValueError,
            "needed a name that is not in use for a statistic, got 'absmax'; write for "
            "example stabil.probes.register('negatives', lambda e: e.value < 0)",
        ),
        (
            ("mine", 3),
            {},
            TypeError,
            "needed functions for `of` and `finish`, got 3 and None; write for example "
            "stabil.probes.register('negatives', lambda e: e.value < 0)",
        ),
        (
            ("mine", abs),
            {"combine": "mean"},
            ValueError,
            "needed `combine` as 'add', 'min' or 'max', got 'mean'; write for example "
            "stabil.probes.register('negatives', lambda e: e.value < 0)",
        ),
    ],
)
def test_refuses_to_register(args, kwargs, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        register(*args, **kwargs)
