"""Programs over eight devices: one more collective, and the same statistics."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stabil.probes import _shards, collect, tap

KINDS = [AxisType.Auto, AxisType.Explicit]
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def _model(w, x):
    def layer(x, w):
        return tap(jnp.tanh(x @ w), "layer"), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), tap(2 * x, "in"), w)
    return jnp.mean(tap(jnp.sum(x, axis=0), "sum") ** 2)


def _count(compiled):
    return len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", compiled.as_text()))


STEP = jax.value_and_grad(_model)
STATS = ("all", "q99", "absmax_index", "first_bad_index")


@pytest.fixture(scope="module")
def seen_whole():
    """A batch with a NaN, and what is told of it where nothing is sharded."""
    rng = np.random.default_rng(5)
    w = rng.normal(size=(3, 16, 16)).astype(np.float32)
    x = rng.normal(size=(32, 16)).astype(np.float32)
    x[17, 3] = np.nan
    return w, x, jax.jit(collect(STEP, stats=STATS, backward=True))(w, x)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_programs_have_one_more_collective(seen_whole, kind):
    w, x, want = seen_whole
    args, plain, probed = _compiled(w, x, kind, STATS)
    assert _count(probed) == _count(plain) + 1
    out, readings = probed(*args)
    jax.tree.map(np.testing.assert_array_equal, out, plain(*args))
    assert readings.names == want.names
    np.testing.assert_allclose(readings.values, want.values, rtol=1e-5, atol=1e-6)
    _assert_shards(readings, x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_kurtosis_has_no_collective_of_its_own(seen_whole, kind):
    w, x, _ = seen_whole
    _, plain, probed = _compiled(w, x, kind, (*STATS, "kurtosis"))
    assert _count(probed) == _count(plain) + 1


def _compiled(w, x, kind, stats):
    """The step's arguments on a mesh, the step, and the step with its readings."""
    seen = collect(STEP, stats=stats, backward=True, per_device=True)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args = (
        jax.device_put(w, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )
    plain = jax.jit(STEP).lower(*args).compile()
    return args, plain, jax.jit(seen).lower(*args).compile()


def _assert_shards(readings, x):
    """Each device tells of its rows of the input; pairs of replicas agree."""
    shards = np.asarray(readings.shards)
    assert shards.shape == (8, *readings.values.shape)
    at, nan = readings.names.index("in"), readings.statistics.index("nan_count")
    top = readings.statistics.index("absmax")
    np.testing.assert_array_equal(shards[:, at, nan], [0, 0, 0, 0, 1, 1, 0, 0])
    want = np.nanmax(np.abs(2 * x).reshape(4, -1), axis=1).repeat(2)
    np.testing.assert_allclose(shards[:, at, top], want)


def _wrong_places(axes, cut, x):
    places = _shards.in_whole(jnp.arange(x.size), x.shape, cut)
    wrong = jnp.sum(places != x.reshape(-1)).astype(jnp.float32)
    return lax.psum(wrong, axes) if axes else wrong


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_entries_know_their_places(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = [
        *(P("data"), P(None, "model"), P("model", None, "data"), P(("model", "data"))),
        *(P(None, ("data", "model")), P(None, None, None)),
    ]
    x = np.arange(8 * 16 * 12, dtype=np.int32).reshape(8, 16, 12)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for s in specs]

    @jax.jit
    def run(tensors):
        return [_shards.on_shards(_wrong_places, t, out=()) for t in tensors]

    assert run(placed) == [0.0] * len(specs)


def test_sharded_places_of_stacked_turns():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = np.zeros((4, 16), np.float32)
    x[3, 9], x[1, 12] = np.nan, 2
    x = jax.device_put(x, NamedSharding(mesh, P("model", "data")))

    def run(x):
        def turn(carry, i):
            return carry, tap(jnp.where(i == 140, x, 0), "turn")

        return jax.lax.scan(turn, 0, jnp.arange(150))[0]

    seen = collect(run, stats=("absmax_index", "first_bad_index"), per_device=True)
    compiled = jax.jit(lambda x: seen(x)[1]).lower(x).compile()
    assert _count(compiled) == 1
    readings = compiled(x)
    largest, bad = 140 * 64 + 16 + 12, 140 * 64 + 3 * 16 + 9
    np.testing.assert_array_equal(readings.values, [[largest, bad]])
    # Of the devices, data first, the last but one has the one, and the sixth the other.
    want = np.full((8, 2), np.nan)
    want[6, 0], want[5, 1] = largest, bad
    np.testing.assert_array_equal(readings.shards[:, 0], want)


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
