"""Statistics of pytrees, with the layers of a stacked leaf apart."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stabil.probes import tree_statistics


def _params(rng):
    return {
        "embed": jnp.asarray(rng.normal(size=(7, 90)), jnp.bfloat16),
        "layers": {
            "bias": jnp.zeros((3,)),
            "w": jnp.asarray(rng.normal(size=(3, 4, 5))),
        },
        "steps": jnp.arange(3),
    }


def test_rows_of_every_floating_leaf(rng):
    params = _params(rng)
    readings = jax.jit(lambda p: tree_statistics(p, stats="all"))(params)
    assert readings.names == ("embed", "layers/bias", "layers/w")
    w = np.asarray(params["layers"]["w"], np.float64)
    np.testing.assert_allclose(readings["std"][2], w.std(), rtol=1e-6)
    np.testing.assert_allclose(readings["absmax"][2], np.abs(w).max(), rtol=1e-6)
    assert readings["zero_count"].tolist() == [0, 3, 0]


def test_layers_of_a_stacked_leaf_are_apart(rng):
    params = _params(rng)
    params["layers"]["w"] = params["layers"]["w"].at[1, 2, 3].set(jnp.inf)
    readings = jax.jit(lambda p: tree_statistics(p, stacked="layers/*"))(params)
    layers = tuple(f"layers/{n}[{i}]" for n in ("bias", "w") for i in range(3))
    assert readings.names == ("embed", *layers)
    bad = [n for n, c in zip(readings.names, readings["inf_count"], strict=True) if c]
    assert bad == ["layers/w[1]"]
    want = [np.abs(w[np.isfinite(w)]).max() for w in np.asarray(params["layers"]["w"])]
    np.testing.assert_allclose(readings["absmax"][-3:], want)


def test_moments_of_an_optimizer(rng):
    params = {"w": jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)}
    tx = optax.adam(1e-3)
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        _, state = tx.update(params, tx.init(params), params)
    readings = tree_statistics(state, where="**/nu/**", stats="max")
    assert readings.names == ("0/nu/w",)
    np.testing.assert_allclose(readings["max"], 1e-3 * jnp.max(params["w"] ** 2))


def test_boxes_masks_and_variables_are_no_obstacle():
    w = jnp.array([3.0, -4.0])
    tx = optax.masked(optax.trace(0.9), {"w": True, "frozen": False})
    params = {"w": w, "frozen": w}
    boxed = nn.Partitioned(w, ("model",))
    trees = (
        {"a": boxed, "b": nn.LogicallyPartitioned(w, ("embed",))},
        tx.init(params),
        nnx.state(nnx.List([nnx.Param(w), nnx.Param(2 * w)])),
    )

    def names(tree):
        run = jax.eval_shape(lambda: tree_statistics(tree, stats="absmax"))
        return tuple(n.removesuffix("/value") for n in run.names)

    assert [*map(names, trees)] == [("a", "b"), ("inner_state/trace/w",), ("0", "1")]


def test_nothing_to_measure_gives_no_row():
    readings = tree_statistics({})
    assert readings.names == () and readings.values.shape == (0, 4)


def test_pattern_that_matches_no_leaf(rng):
    text = (
        "needed `where` patterns that match a place in the program, got 'head'; "
        "places: embed, layers/bias, layers/w; write for example where='**/mlp*', or "
        "where='**' for everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tree_statistics(_params(rng), where="head")
