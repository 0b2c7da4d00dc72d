"""Models of Equinox and Haiku: seen by taps, where these packages are installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.probes import collect, tap

X = np.random.default_rng(5).normal(size=(4, 8)).astype(np.float32)
LAYERS = ("layer[0]", "layer[1]", "layer[2]")
BACK = tuple(f"{name}@grad" for name in reversed(LAYERS))


def check(loss, model):
    """Same loss and gradients, and a row for each layer, forward and backward."""

    @jax.jit
    def run(model):
        step = jax.value_and_grad(loss)
        return step(model), collect(step, backward=True, stats="absmax")(model)

    want, (got, readings) = run(model)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert readings.names == (*LAYERS, "out", "out@grad", *BACK)
    assert (readings["absmax"] > 0).all()
    return readings


def test_equinox_scan_of_checkpointed_layers():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(keys)

    def loss(layers):
        arrays, static = eqx.partition(layers, eqx.is_array)

        @jax.checkpoint
        def turn(x, arrays):
            layer = eqx.combine(arrays, static)
            return tap(jnp.tanh(jax.vmap(layer)(x)), "layer"), None

        x, _ = jax.lax.scan(turn, jnp.asarray(X), arrays)
        return jnp.sum(jnp.square(tap(x, "out")))

    readings = check(loss, layers)
    x = X.astype(np.float64)
    for i in range(3):
        x = np.tanh(x @ np.asarray(layers.weight[i]).T + np.asarray(layers.bias[i]))
        np.testing.assert_allclose(readings["absmax"][i], np.abs(x).max(), rtol=1e-5)


def test_haiku_layer_stack():
    hk = pytest.importorskip("haiku")

    def forward(x):
        def layer(x):
            return tap(jnp.tanh(hk.Linear(8)(x)), "layer")

        return tap(hk.experimental.layer_stack(3)(layer)(x), "out")

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), X)
    check(lambda params: jnp.sum(jnp.square(model.apply(params, X))), params)
