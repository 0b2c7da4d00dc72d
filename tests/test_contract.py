"""The contract that every public transformation keeps, found by walking `__all__`.

In float16, and for some of it in bfloat16: `pytest -m slow tests/test_contract.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_factories import FACTORIES, build, wraps

pytestmark = pytest.mark.usefixtures("standard_promotion")

SLOW = pytest.mark.slow
DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=SLOW))
QUIET, BAD, SHIFT, STEPS = 150, 150, 180, 300
INNER = optax.sgd(1.0, momentum=0.5)
# What a docstring says of a gradient in which nothing happens.
IDENTITY = "Quiet gradients pass unchanged."
NOT_IDENTITY = "Quiet gradients do not pass unchanged:"


def params_of(dtype: str) -> dict:
    rng = np.random.default_rng(0)
    shapes = {"kernel": (6, 4), "bias": (4,), "layers": (2, 4, 4)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def stream(dtype: str, kind: str) -> dict:
    """Gradients over `STEPS`: a healthy run with one NaN, or with a lasting shift."""
    rng = np.random.default_rng(1)
    level = 1e-3 * np.exp(0.1 * rng.normal(size=STEPS))
    if kind == "shift":
        level[SHIFT:] *= 30
    out = {}
    for name, p in params_of(dtype).items():
        g = rng.normal(size=(STEPS, *p.shape))
        g *= level.reshape(-1, *[1] * p.ndim)
        out[name] = g.astype(np.float32)
    if kind == "nan":
        out["kernel"][BAD, 0, 0] = np.nan
    return {k: jnp.asarray(v, dtype) for k, v in out.items()}


@functools.cache
def played(name: str, dtype: str):
    """Both streams through the transformation in one `vmap` of one `scan`."""
    tx = build(name, INNER)
    params = params_of(dtype)
    grads = jax.tree.map(
        lambda *x: jnp.stack(x), *(stream(dtype, kind) for kind in ("nan", "shift"))
    )

    def run(grads):
        def step(state, g):
            updates, state = tx.update(g, state, params, loss=jnp.float32(1.0))
            return state, updates

        return jax.lax.scan(step, tx.init(params), grads)

    with jax.numpy_dtype_promotion("standard"):
        state, updates = jax.jit(jax.vmap(run))(grads)
    return grads, updates, state


def norms(tree) -> np.ndarray:
    """L2 norm over all leaves, per stream and step."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.sqrt(sum((x**2).reshape(*x.shape[:2], -1).sum(-1) for x in leaves))


def finite(tree) -> bool:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return all(bool(np.all(np.isfinite(np.asarray(x, np.float64)))) for x in floats)


def described(tree) -> list:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(p), jnp.shape(x), x.dtype) for p, x in leaves]


def test_there_are_factories_to_test():
    assert {"guard", "spike_aware"} <= FACTORIES.keys()


@pytest.mark.parametrize("name", FACTORIES)
def test_is_a_transformation_and_says_what_quiet_gradients_become(name):
    assert isinstance(build(name, INNER), optax.GradientTransformationExtraArgs)
    doc = " ".join(FACTORIES[name].__doc__.split())
    assert (IDENTITY in doc) != (NOT_IDENTITY in doc)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FACTORIES)
def test_nan_neither_leaks_nor_sticks(name, dtype):
    grads, updates, state = played(name, dtype)
    assert finite(jax.tree.map(lambda u: u[0], updates))
    out = norms(updates)[0]
    assert out[BAD + 5 : SHIFT].mean() > 0.5 * out[100:QUIET].mean()
    kept = jax.tree.map(
        lambda x: x[0] if jnp.issubdtype(x.dtype, jnp.inexact) else x, state
    )
    nans = [p for p, x in _floats(kept) if np.any(np.isnan(np.asarray(x, np.float64)))]
    # Measures of a step say NaN where nothing was measured; nothing else may.
    assert [p for p in nans if "measures" not in p] == []


def _floats(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (jax.tree_util.keystr(p), x)
        for p, x in leaves
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FACTORIES)
def test_lasting_shift_recovers(name, dtype):
    _, updates, _ = played(name, dtype)
    assert finite(jax.tree.map(lambda u: u[1], updates))
    out = norms(updates)[1]
    assert out[-20:].mean() > 0.5 * out[100:QUIET].mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FACTORIES)
def test_quiet_gradients_are_the_identity(name, dtype):
    if NOT_IDENTITY in " ".join(FACTORIES[name].__doc__.split()):
        pytest.skip("its docstring says what quiet gradients become")
    grads, updates, _ = played(name, dtype)
    if wraps(name):
        first = jax.tree.map(lambda g: g[1, :QUIET], grads)
        params = params_of(dtype)

        def step(state, g):
            updates, state = INNER.update(g, state, params)
            return state, updates

        _, expected = jax.lax.scan(step, INNER.init(params), first)
    else:
        expected = jax.tree.map(lambda g: g[1, :QUIET], grads)
    for key, value in expected.items():
        np.testing.assert_array_equal(
            np.asarray(updates[key][1, :QUIET], np.float32),
            np.asarray(value, np.float32),
        )


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], pytest.param("bfloat16", marks=SLOW), DTYPES[2]]
)
@pytest.mark.parametrize("name", FACTORIES)
def test_state_is_a_fixed_point_traced_once_and_donated(name, dtype, tmp_path):
    tx = build(name, INNER)
    params = params_of(dtype)
    traces = []

    def update(state, grads, params):
        traces.append(1)
        return tx.update(grads, state, params, loss=jnp.float32(1), unheard_of=1)

    update = jax.jit(update, donate_argnums=(0, 1))
    state = tx.init(params)
    before = described(state)
    for step in range(3):
        grads = jax.tree.map(lambda g, i=step: g[i], stream(dtype, "nan"))
        updates, state = update(state, grads, params)
        assert described(state) == before
        assert described(updates) == described(params)
    assert len(traces) == 1
    if dtype == "float32":
        _survives_orbax(update, tx, state, params, tmp_path)


def _survives_orbax(update, tx, state, params, tmp_path):
    from orbax.checkpoint import v1 as ocp

    path = tmp_path / "state"
    ocp.save(path, state)
    target = jax.tree.map(
        lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
        jax.eval_shape(tx.init, params),
        state,
    )
    restored = ocp.load(path, target)
    grads = jax.tree.map(lambda g: g[5], stream("float32", "nan"))
    straight = update(state, jax.tree.map(jnp.array, grads), params)
    resumed = update(restored, grads, params)
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", FACTORIES)
def test_odd_leaves(name):
    """Scalar, empty, complex, integer, frozen and absent leaves."""
    tx = build(name, optax.identity())
    params = {
        "complex": jnp.array([1 + 1j, 2 - 1j], jnp.complex64),
        "empty": jnp.zeros([0, 3]),
        "frozen": None,
        "integer": jnp.array([1, 2], jnp.int32),
        "matrix": jnp.ones([3, 3]),
        "scalar": jnp.float32(2.0),
    }
    grads = params | {
        "complex": jnp.array([1e-3 + 1e-3j, 0], jnp.complex64),
        "integer": np.zeros([2], jax.dtypes.float0),
        "matrix": jnp.full([3, 3], 1e-3),
        "scalar": jnp.float32(1e-3),
    }
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params, loss=jnp.float32(1))
    for key in ("complex", "empty", "matrix", "scalar"):
        assert updates[key].shape == grads[key].shape
        assert updates[key].dtype == grads[key].dtype
        assert np.all(np.isfinite(updates[key]))
    assert updates["frozen"] is None
    assert updates["integer"].dtype == jax.dtypes.float0
