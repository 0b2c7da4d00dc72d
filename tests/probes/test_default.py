"""Which places a probe reads by default."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import stabil


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(4, name="dense_0")(x)
        return x + nn.Dense(4, name="dense_1")(h), None


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="embed")(x)
        for i in range(2):
            x = Block(name=f"block_{i}")(x)[0]
        x = stabil.tap(x, "mine")
        return nn.Dense(2, name="head")(x)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return scanned(name="layers")(x)[0]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(Stack(name="decoder")(x))


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(Flat(name="decoder")(x))


INNER = ("block_0", "block_1")
CASES = [
    (Flat(), ("embed", *INNER, "mine", "head")),
    (
        Nested(),
        (*(f"decoder/{b}" for b in INNER), "mine", "decoder", "head"),
    ),
    (
        Scanned(),
        (*(f"decoder/layers[{i}]" for i in range(3)), "decoder", "head"),
    ),
    (nn.Dense(3), ("Dense",)),
]


@pytest.mark.parametrize(("model", "names"), CASES)
def test_blocks_and_what_frames_them(model, names):
    x = jnp.ones((1, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    probed = stabil.probe(model, stats="absmax")
    _, readings = jax.eval_shape(probed.apply, params, x)
    assert readings.names == names


def test_whoever_collects_around_sees_the_same_places():
    x = jnp.ones((1, 4))
    params = jax.eval_shape(Flat().init, jax.random.key(0), x)
    probed = stabil.probe(Flat(), stats="absmax", backward=True)

    def loss(params):
        return probed.apply(params, x)[0].sum()

    step = stabil.collect(jax.grad(loss), stats="absmax", backward=True)
    _, readings = jax.eval_shape(step, params)
    forward = ("embed", *INNER, "mine", "head")
    assert readings.names == (*forward, *(f"{n}@grad" for n in reversed(forward)))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(3, 3, rngs=rngs)
        self.layers = nnx.List([Pair(rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.a(x)


def test_entries_of_an_nnx_list_are_blocks():
    model = Listed(nnx.Rngs(0))

    @nnx.jit
    def run(model, x):
        return stabil.probe(model, stats="absmax")(x)

    _, readings = run(model, jnp.ones((1, 3)))
    assert readings.names == ("embed", "layers/0", "layers/1")
