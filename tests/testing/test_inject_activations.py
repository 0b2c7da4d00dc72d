"""Faults in the output of a Linen module, inside a compiled step."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stabil
from stabil.testing import inject


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "seen", x)
        return nn.Dense(4, name="down")(nn.tanh(nn.Dense(8, name="up")(x)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = x + Mlp(name=f"block_{i}")(x)
        return x


X = jnp.linspace(-1, 1, 8).reshape(2, 4)
PARAMS = {"params": Model().init(jax.random.key(0), X)["params"]}


def fault(**fields):
    defaults = {"kind": "nan", "place": "activations", "step": 3, "where": "block_1"}
    return inject.Fault(**defaults | fields)


def loss_at(schedule, step, params=PARAMS):
    with inject.activations(schedule, step):
        return jnp.sum(jnp.square(Model().apply(params, X)))


def test_strikes_in_its_step_alone_with_one_compile():
    traces = 0

    @jax.jit
    def run(step):
        nonlocal traces
        traces += 1
        return jax.value_and_grad(lambda p: loss_at((fault(),), step, p))(PARAMS)

    clean = jax.jit(jax.value_and_grad(lambda p: loss_at((), 0, p)))(PARAMS)
    for step in range(6):
        loss, grads = run(step)
        bad = jax.tree.map(lambda g: bool(jnp.isnan(g).any()), grads)
        assert any(jax.tree.leaves(bad)) == (step == 3) == bool(jnp.isnan(loss))
        if step != 3:
            np.testing.assert_allclose(loss, clean[0], rtol=1e-6)
    assert traces == 1


@pytest.mark.parametrize(
    ("where", "poisoned"), [("block_1", "block_2"), ("block_2/up", None), ("up", "1 2")]
)
def test_the_fault_enters_where_it_was_told(where, poisoned):
    with inject.activations((fault(where=where),), 3):
        out, state = Model().apply(PARAMS, X, mutable=["intermediates"])
    inputs = {k: v["seen"][0] for k, v in state["intermediates"].items()}
    bad = [name for name, x in inputs.items() if np.isnan(np.asarray(x)).all()]
    expected = {"block_2": ["block_2"], None: [], "1 2": ["block_1", "block_2"]}
    assert bad == expected[poisoned]
    assert np.isnan(np.asarray(out)).all()


def test_a_later_interceptor_sees_the_struck_value():
    seen = {}

    def watch(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        seen["/".join(context.module.path)] = bool(np.isnan(np.asarray(out)).any())
        return out

    with inject.activations((fault(),), 3):
        with nn.intercept_methods(watch):
            Model().apply(PARAMS, X)
    first = [path for path, bad in seen.items() if bad]
    assert first == ["block_1", "block_2/up", "block_2/down", "block_2", ""]


def test_scale_and_entries():
    with inject.activations((fault(kind="scale", size=100.0, where="", entries=2),), 3):
        struck = Model().apply(PARAMS, X)
    clean = Model().apply(PARAMS, X)
    ratio = np.asarray(struck / clean)
    assert int((ratio > 99).sum()) == 2 and int((ratio == 1).sum()) == 6


def test_works_under_remat_and_scan_over_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(4, name="inner")(x), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return stack(name="layers")(x, None)[0]

    params = Deep().init(jax.random.key(0), X)

    @jax.jit
    def run(step):
        def loss(p):
            with inject.activations((fault(where="inner"),), step):
                return jnp.sum(Deep().apply(p, X))

        return jax.value_and_grad(loss)(params)

    assert np.isfinite(run(2)[0]) and np.isnan(run(3)[0])


def test_a_module_that_does_not_exist():
    message = (
        "needed a Linen module whose path ends with 'block_9', got none; the modules "
        "called were block_0/up, block_0/down, block_0, block_1/up, block_1/down, "
        "block_1, block_2/up, block_2/down and 2 more; put the model's apply inside "
        "the context"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loss_at((fault(where="block_9"),), 3)


def test_no_model_inside_the_context():
    message = (
        "needed a Linen module whose path ends with 'block_1', got none; the modules "
        "called were none; put the model's apply inside the context"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        with inject.activations((fault(),), 3):
            pass


def test_an_output_that_does_not_take_the_kind():
    class Count(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sum(x > 0)

    message = (
        "needed an output that nan can strike, got none from the module ''; integers "
        "take bit_flip and garbage, complex numbers all but bit_flip, floats every "
        "kind"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        with inject.activations((fault(where=""),), 3):
            Count().apply({}, X)


def test_an_error_in_the_model_is_not_replaced():
    with pytest.raises(ZeroDivisionError, match="^division by zero$"):
        with inject.activations((fault(),), 3):
            _ = 1 / 0


def test_a_probe_reads_the_struck_value_at_the_struck_module():
    probed = stabil.probe(Model(), where="**")

    @jax.jit
    def run(step):
        with inject.activations((fault(),), step):
            return probed.apply(PARAMS, X)[1]

    readings = run(3)
    rows = list(np.asarray(readings["nan_count"]))
    first = next(n for n, bad in zip(readings.names, rows, strict=True) if bad)
    assert first == "block_1"
    assert not np.asarray(run(2)["nan_count"]).any()
