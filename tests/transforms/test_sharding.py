"""On an eight-device mesh every method gives the single-device result."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from public_factories import FACTORIES, build

import stabil

pytestmark = pytest.mark.usefixtures("standard_promotion")
STEPS = 30
LAYOUT = {
    "fully_sharded": PartitionSpec("data"),
    "columns": PartitionSpec(None, "model"),
    "rows_and_columns": PartitionSpec("data", "model"),
    "layers": PartitionSpec(None, "data", "model"),
    "bias": PartitionSpec("model"),
    "replicated": PartitionSpec(),
}
SHAPES = {
    "fully_sharded": (16, 8),
    "columns": (8, 16),
    "rows_and_columns": (8, 8),
    "layers": (2, 8, 8),
    "bias": (8,),
    "replicated": (6,),
}


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shardings():
    return {k: NamedSharding(mesh(), spec) for k, spec in LAYOUT.items()}


def data():
    rng = np.random.default_rng(3)
    params = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()
    }
    level = 1e-2 * np.exp(0.1 * rng.normal(size=STEPS))
    level[-5] *= 50
    grads = {}
    for k, s in SHAPES.items():
        g = rng.normal(size=(STEPS, *s)) * level.reshape(-1, *[1] * len(s))
        grads[k] = jnp.asarray(g, jnp.float32)
    return params, grads


@pytest.mark.parametrize("name", FACTORIES)
def test_sharded_run_equals_the_run_on_one_device(name):
    tx = build(name, optax.adam(1e-3))
    params, grads = data()

    @jax.jit
    def run(params, grads):
        def step(state, g):
            updates, state = tx.update(g, state, params, loss=jnp.float32(1))
            return state, updates

        return jax.lax.scan(step, tx.init(params), grads)[1]

    placed = jax.tree.map(jax.device_put, params, shardings())
    spread = {
        k: NamedSharding(mesh(), PartitionSpec(None, *spec))
        for k, spec in LAYOUT.items()
    }
    expected = run(params, grads)
    got = run(placed, jax.tree.map(jax.device_put, grads, spread))
    for key in SHAPES:
        np.testing.assert_allclose(got[key], expected[key], rtol=2e-4, atol=1e-7)


def collectives(tx, layout) -> dict[str, int]:
    """Collective operations in one compiled step of parameters sharded by `layout`."""
    params = {
        k: jax.device_put(p, NamedSharding(mesh(), layout(p)))
        for k, p in data()[0].items()
    }

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    text = jax.jit(step).lower(params, tx.init(params), params).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in kinds}


LAYOUTS = {
    "fsdp": lambda p: PartitionSpec("data") if p.shape[0] % 4 == 0 else PartitionSpec(),
    "tensor parallel": lambda p: PartitionSpec(*[None] * (p.ndim - 1), "model"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guard_adds_no_collective_to_clip_by_global_norm(layout):
    def count(tx):
        return collectives(tx, LAYOUTS[layout])

    clip = count(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    none = {"all-gather": 0, "all-to-all": 0, "collective-permute": 0}
    assert clip == none | {"all-reduce": 1}
    assert count(optax.chain(stabil.spike_aware(), optax.adamw(1e-3))) == clip
    assert count(stabil.guard(optax.adamw(1e-3))) == clip
