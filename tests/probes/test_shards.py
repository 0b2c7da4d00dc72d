"""Programs over eight devices: one more collective, and the same statistics."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stabil.probes import collect, tap

KINDS = [AxisType.Auto, AxisType.Explicit]
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def _model(w, x):
    def layer(x, w):
        return tap(jnp.tanh(x @ w), "layer"), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), tap(2 * x, "in"), w)
    return jnp.mean(tap(jnp.sum(x, axis=0), "sum") ** 2)


def _count(compiled):
    return len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_programs_have_one_more_collective(rng, kind):
    w = rng.normal(size=(3, 16, 16)).astype(np.float32)
    x = rng.normal(size=(32, 16)).astype(np.float32)
    x[17, 3] = np.nan
    step = jax.value_and_grad(_model)
    stats = ("all", "kurtosis", "q99")
    seen = collect(step, stats=stats, backward=True, per_device=True)
    whole, want = jax.jit(seen)(jnp.asarray(w), jnp.asarray(x))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args = (
        jax.device_put(w, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )
    plain = jax.jit(step).lower(*args).compile()
    probed = jax.jit(seen).lower(*args).compile()
    assert _count(probed) == _count(plain) + 1
    out, readings = probed(*args)
    jax.tree.map(np.testing.assert_array_equal, out, plain(*args))
    assert readings.names == want.names
    np.testing.assert_allclose(readings.values, want.values, rtol=1e-5, atol=1e-6)
    _assert_shards(readings, x)


def _assert_shards(readings, x):
    """Each device tells of its rows of the input; pairs of replicas agree."""
    shards = np.asarray(readings.shards)
    assert shards.shape == (8, *readings.values.shape)
    at, nan = readings.names.index("in"), readings.statistics.index("nan_count")
    top = readings.statistics.index("absmax")
    np.testing.assert_array_equal(shards[:, at, nan], [0, 0, 0, 0, 1, 1, 0, 0])
    want = np.nanmax(np.abs(2 * x).reshape(4, -1), axis=1).repeat(2)
    np.testing.assert_allclose(shards[:, at, top], want)


def test_sharded_statistics_of_each_device_need_no_collective(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = rng.normal(size=(32, 16)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def run(x):
        return collect(lambda x: tap(2 * x, "y"), per_device=True)(x)[1].shards

    compiled = jax.jit(run).lower(x).compile()
    assert _count(compiled) == 0
    assert compiled(x).sharding.spec[0] in ("data", ("data",))


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_programs_under_vmap_and_when_not_due(rng, kind):
    import flax.linen as nn

    from stabil import probe

    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = rng.normal(size=(16, 4, 3)).astype(np.float32)
    probed = probe(nn.Dense(2), stats="absmax", every=2)
    params = probed.init(jax.random.key(0), x)
    y = np.asarray(x @ params["params"]["kernel"])
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    run = jax.jit(lambda i, x: probed.at(i).apply(params, x)[1]["absmax"])
    np.testing.assert_allclose(run(2, x), [np.abs(y).max()], rtol=1e-5)
    assert np.isnan(run(3, x)).all()
    if kind == AxisType.Auto:
        each = jax.vmap(lambda x: probed.at(0).apply(params, x)[1]["absmax"])
        want = np.abs(y).max(axis=(1, 2))[:, None]
        np.testing.assert_allclose(jax.jit(each)(x), want, rtol=1e-5)
