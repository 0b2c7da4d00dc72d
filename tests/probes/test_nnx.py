"""Probed NNX models: the same model and state, and a row for each module."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stabil.probes import collect, probe

X = np.random.default_rng(7).normal(size=(4, 8)).astype(np.float32)


class Block(nnx.Module):
    """A small residual block."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """Blocks, batch statistics and random numbers."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))


class Shared(nnx.Module):
    """One block, called twice, the second time checkpointed and compiled."""

    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        run = nnx.jit(nnx.remat(lambda block, x: block(x)))
        return run(self.block, self.block(x))


class Stack(nnx.Module):
    """Layers stacked by scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(axis_size=3)
        def make(rngs):
            return Block(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


class Experts(Stack):
    """The stacked layers side by side."""

    def __call__(self, x):
        run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return run(self.layers, x).mean(0)


LAYERS = tuple(
    f"{n}[{i}]" for i in range(3) for n in ("layers/up", "layers/down", "layers")
)
BLOCKS = tuple(f"blocks/{i}{n}" for i in range(2) for n in ("/up", "/down", ""))
MODELS = {
    Net: (*BLOCKS, "norm", "drop", "Net"),
    Shared: (
        *("block/up", "block/down", "block"),
        *("block/up#2", "block/down#2", "block#2", "Shared"),
    ),
    Stack: (*LAYERS, "Stack"),
    Experts: ("layers/up", "layers/down", "layers", "Experts"),
}


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.bits
@pytest.mark.parametrize("kind", list(MODELS), ids=lambda m: m.__name__)
def test_rows_bits_and_state(kind):
    traces = []

    @nnx.jit
    def plain(model, x):
        traces.append("plain")
        return nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)

    @nnx.jit
    def probed(model, x):
        traces.append("probed")

        def loss(m):
            y, readings = probe(m, where="**")(x)
            return jnp.sum(y**2), readings

        (value, readings), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return (value, grads), readings

    one, other = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    for _ in range(3):
        want = plain(one, X)
        got, readings = probed(other, X)
        assert_same(got, want)
        assert_same(nnx.state(other), nnx.state(one))
    assert nnx.graphdef(other) == nnx.graphdef(one)
    assert traces.count("probed") == traces.count("plain") <= 2
    assert readings.names == MODELS[kind]
    assert np.isfinite(readings.values).all() and readings["absmax"].min() > 0


class Branches(nnx.Module):
    """A block on one side of a condition, in a plain scan over its split state."""

    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        x = nnx.cond(x[0, 0] > 0, lambda m, x: m(x), lambda m, x: 2 * x, self.block, x)
        graph, state = nnx.split(self.block)

        def turn(x, _):
            return nnx.merge(graph, state)(x), None

        return jax.lax.scan(turn, x, None, length=2)[0]


def test_a_condition_and_a_plain_scan_over_split_state():
    readings = jax.eval_shape(lambda: probe(Branches(nnx.Rngs(0)), where="**")(X)[1])
    per = ("block/up", "block/down", "block")
    assert readings.names == (
        *per,
        *(f"{n}#2[{i}]" for i in range(2) for n in per),
        "Branches",
    )


def test_a_function_that_was_traced_before_is_seen():
    run = nnx.jit(lambda block, x: block(x))

    class Reused(Shared):
        def __call__(self, x):
            return run(self.block, x)

    def both():
        model = Reused(nnx.Rngs(0))
        one = probe(model, where="block")(X)[1]
        return model(X), one, probe(model, where="**")(X)[1]

    _, one, all_ = jax.eval_shape(both)
    assert one.names == ("block",)
    assert all_.names == ("block/up", "block/down", "block", "Reused")


@pytest.mark.parametrize(
    ("kind", "where", "want"),
    [
        (Net, (Block, "drop"), ("blocks/0", "blocks/1", "drop")),
        (Net, (nnx.BatchNorm,), ("norm",)),
        (Shared, Block, ("block", "block#2")),
        (Stack, Block, tuple(f"layers[{i}]" for i in range(3))),
    ],
)
def test_modules_are_chosen_by_class(kind, where, want):
    def run():
        return probe(kind(nnx.Rngs(0)), where=where)(X)[1]

    assert jax.eval_shape(run).names == want


def test_one_layer_of_a_stack_is_named():
    model = Stack(nnx.Rngs(0))
    kernel = model.layers.up.kernel
    kernel[...] = kernel[...].at[1, 0, 0].set(jnp.nan)
    _, readings = probe(model, where="layers/up")(X)
    assert readings["nan_count"].tolist() == [0, 4, 64]


def test_cotangents_and_inputs_through_collect():
    def step(model):
        def loss(m):
            return jnp.sum(probe(m, inputs=True, backward=True, where="**")(X)[0] ** 2)

        return nnx.grad(loss)(model)

    model = Block(nnx.Rngs(0))
    got, readings = collect(step, backward=True)(model)
    assert_same(got, nnx.grad(lambda m: jnp.sum(m(X) ** 2))(model))
    forward = ("Block@input", "up", "down@input", "down", "Block")
    assert readings.names[:5] == forward
    assert set(readings.names[5:]) >= {"Block@grad", "down@grad", "up@grad"}


class Ruled(nnx.Module):
    """A layer with a derivative rule of its own, which doubles its gradient."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        @nnx.custom_vjp
        def rule(layer, x):
            return layer(x)

        def forward(layer, x):
            graph, state = nnx.split(layer)
            return jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)

        def backward(vjp, g):
            grads, g = vjp(g[1])
            return jax.tree.map(lambda v: 2 * v, grads), g

        rule.defvjp(forward, backward)
        return rule(self.layer, x)


def test_cotangents_within_a_derivative_rule():
    def step(apply):
        def loss(model):
            return jnp.sum(apply(model) ** 2)

        return nnx.grad(loss)

    def probed(model):
        return probe(model, backward=True, where="**")(X)[0]

    model = Ruled(nnx.Rngs(0))
    seen = collect(step(probed), stats="absmax", backward=True)
    got, readings = nnx.jit(seen)(model)
    assert_same(got, nnx.jit(step(lambda model: model(X)))(model))
    assert readings.names == ("layer", "Ruled", "Ruled@grad", "layer@grad")
    rows = dict(zip(readings.names, readings["absmax"].tolist(), strict=True))
    assert rows["layer@grad"] == rows["Ruled@grad"] == 2 * rows["layer"]


def test_random_numbers_handed_in_advance():
    class Noisy(nnx.Module):
        def __call__(self, x, rngs):
            return x + jax.random.normal(rngs.noise(), x.shape)

    one, other = nnx.Rngs(noise=3), nnx.Rngs(noise=3)
    for _ in range(2):
        want = Noisy()(X, one)
        got, _ = probe(Noisy(), where="**")(X, other)
        np.testing.assert_array_equal(got, want)


def test_classes_and_module_are_left_as_they_were():
    model = Block(nnx.Rngs(0))
    before = dict(vars(model.up)), Block.__call__, nnx.Linear.__call__
    probe(model, where="up", stats="finite")(X)
    with pytest.raises(TypeError):
        probe(model)(X, "surplus")
    after = dict(vars(model.up)), Block.__call__, nnx.Linear.__call__
    assert before == after
    assert "__call__" not in vars(nnx.Module)


def test_pattern_that_matches_nothing():
    text = (
        "needed `where` patterns that match a place in the program, got 'mlp'; places: "
        "up, down, Block; write for example where='**/mlp*', or where='**' for "
        "everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        probe(Block(nnx.Rngs(0)), where="mlp")(X)
