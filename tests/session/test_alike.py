"""A restored state is to the compiler what the first one was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil.session._alike import Alike

MESH = Mesh(np.asarray(jax.devices()), "x")
SPLIT = NamedSharding(MESH, PartitionSpec("x"))


def restored(template):
    """What a keeper gives: bound to devices, strong dtypes."""

    def make(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(3), jax.devices()[0])
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding)

    return jax.tree.map(make, template)


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.zeros(3),
        jnp.zeros(3, jnp.bfloat16),
        jnp.asarray(3),
        jnp.asarray(1.5),
        jnp.int32(3),
        jax.random.key(0),
        jax.device_put(jnp.zeros(8), SPLIT),
        jax.device_put(jnp.zeros(2), jax.devices()[1]),
    ],
    ids=str,
)
def test_a_step_is_traced_and_compiled_once(leaf):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x, tree))
    first = {"leaf": leaf}
    alike = Alike(first)
    step(first)
    state = alike(restored(alike.template))
    step(state)
    assert step._cache_size() == 1
    assert state["leaf"].dtype == leaf.dtype
    assert state["leaf"].sharding == leaf.sharding
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        np.testing.assert_array_equal(np.asarray(state["leaf"], np.float32), 1.0)


def test_numbers_and_host_arrays_pass():
    alike = Alike({"a": 3, "b": np.ones(2), "c": None})
    assert alike.template["a"] == 3
    state = alike({"a": 4, "b": np.zeros(2), "c": None})
    assert state["a"] == 4 and isinstance(state["b"], np.ndarray)
