"""Statistics of one's own that close over arrays, those of the step included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stabil.probes import collect, register, tap

LIMIT = jnp.array(1.0)
HELD = [LIMIT]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register("above_array", lambda e: jnp.abs(e.value) > LIMIT)
    register("above_held", lambda e: jnp.abs(e.value) > HELD[-1])


def turn(x, w):
    inner = jax.jit(lambda x: tap(jnp.tanh(w * x), "layer"))
    twice, same = (lambda x: tap(2 * x, "twice")), (lambda x: tap(x, "same"))
    x = jax.lax.cond(x[0] > 0, twice, same, inner(x))
    return jax.lax.fori_loop(0, 2, lambda _, x: tap(3 * x, "loop"), x), None


def test_a_threshold_of_the_step_reaches_every_loop_and_branch():
    x, w = jnp.array([0.25, -1.0, 2.0, 0.5]), jnp.array([1.0, -2.0])

    def loss(w):
        return jnp.sum(jax.lax.scan(jax.checkpoint(turn), x, w)[0])

    @jax.jit
    def run(limit):
        HELD[:] = [limit]
        seen = collect(jax.grad(loss), stats="above_held", backward=True)
        return seen(w)[1]

    for limit in (0.5, 2.0):
        readings = run(limit)
        counts = readings["above_held"].tolist()
        told = dict(zip(readings.names, counts, strict=True))
        assert all(np.isnan(v) == ("same" in n) for n, v in told.items())
        v = np.tanh(np.asarray(x))
        for name, scale in (("layer[0]", 1), ("twice[0]", 2), ("loop[0,1]", 18)):
            assert told[name] == np.sum(np.abs(scale * v) > limit), name
        # The last cotangents are those of a sum, three times as large a turn before.
        assert told["loop[1,1]@grad"] == 4 * (1 > limit)
        assert told["loop[1,0]@grad"] == 4


def test_another_trace_has_its_own_threshold():
    x = jnp.array([0.25, -1.0, 2.0, 0.5])

    def count(limit):
        HELD[:] = [limit]
        return collect(lambda x: tap(x, "y"), stats="above_held")(x)[1]["above_held"]

    assert [count(0.3), count(1.5)] == [3, 1]
    assert [jax.jit(count)(0.3), jax.jit(lambda n: count(2 * n))(0.75)] == [3, 1]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_and_thresholds_reach_the_shards(rng, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    stats = ("above_array", "above_held")

    def run(x, limit):
        HELD[:] = [limit]
        seen = collect(lambda x: tap(2 * x, "y"), stats=stats, per_device=True)
        return seen(x)[1]

    placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    readings = jax.jit(run)(placed, 2.5)
    want = [np.sum(np.abs(2 * x) > limit) for limit in (1.0, 2.5)]
    np.testing.assert_array_equal(readings.values, [want])
    blocks = np.abs(2 * x).reshape(4, 2, 2, 3).swapaxes(1, 2).reshape(8, 6)
    np.testing.assert_array_equal(readings.shards[:, 0, 1], (blocks > 2.5).sum(1))
    if kind == AxisType.Auto:
        limits = jnp.array([0.5, 2.5])
        each = jax.vmap(lambda x, limit: run(x, limit)["above_held"])
        want = [[np.sum(np.abs(2 * v) > n)] for v, n in zip(x[:2], limits, strict=True)]
        np.testing.assert_array_equal(jax.jit(each)(placed[:2], limits), want)
