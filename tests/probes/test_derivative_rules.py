"""Derivative rules written by hand, and what they look at on the way back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.probes import collect, tap

X = jnp.array([0.5, -1.0, 2.0, 0.25])
W = jnp.stack([jnp.eye(4) * i for i in (1.0, 2.0, 3.0)])


@jax.custom_vjp
def look(x):
    """The identity, which taps the cotangent that comes back."""
    return x


look.defvjp(lambda x: (x, None), lambda _, g: (tap(g, "back"),))


@jax.custom_vjp
def measured(x, slot):
    """The identity, which leaves the largest cotangent as the gradient of `slot`."""
    return x


measured.defvjp(lambda x, slot: (x, None), lambda _, g: (g, jnp.max(jnp.abs(g))))


def layer(x, w):
    return look(tap(jnp.tanh(w @ x), "layer")), None


def unrolled(w, x):
    for i in range(3):
        x = layer(x, w[i])[0]
    return x.sum()


def over_layers(w, x, wrap=lambda f: f):
    return jax.lax.scan(wrap(layer), x, w)[0].sum()


def around(w, x):
    return jax.checkpoint(over_layers)(w, x)


def with_policy(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)


TURNS = ("layer[0]", "layer[1]", "layer[2]")
BACK = tuple(n for i in (2, 1, 0) for n in (f"back[{i}]", f"layer[{i}]@grad"))
CASES = {
    "unrolled": unrolled,
    "scan": over_layers,
    "checkpoint": functools.partial(over_layers, wrap=jax.checkpoint),
    "checkpoint by a policy": functools.partial(over_layers, wrap=with_policy),
    "checkpoint around the scan": around,
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_tap_in_a_rule_is_read_wherever_the_rule_runs(name):
    step = jax.grad(CASES[name], argnums=(0, 1))

    @jax.jit
    def run(w, x):
        return collect(step, stats="absmax", backward=True)(w, x)

    grads, readings = run(W, X)
    jax.tree.map(np.testing.assert_array_equal, grads, jax.jit(step)(W, X))
    told = readings["absmax"]
    if name == "unrolled":
        calls = [n for n in readings.names if n.startswith("back")]
        assert calls == ["back", "back#2", "back#3"]
    else:
        assert readings.names == TURNS + BACK
    # The tapped cotangent is that of the layer's output.
    np.testing.assert_array_equal(told[3::2], told[4::2])
    assert told[3] == 1.0


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "remat"])
def test_statistics_left_as_the_gradient_of_a_slot(wrap):
    def turn(x, layer):
        w, slot = layer
        return measured(tap(jnp.tanh(w @ x), "layer"), slot), None

    def loss(w, slots):
        return jax.lax.scan(wrap(turn), X, (w, slots))[0].sum()

    def plain(w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), X, w)[0].sum()

    @jax.jit
    def run(w):
        step = jax.grad(loss, argnums=(0, 1))
        return collect(step, stats="absmax", backward=True)(w, jnp.zeros(3))

    (grad, slots), readings = run(W)
    np.testing.assert_array_equal(grad, jax.jit(jax.grad(plain))(W))
    assert readings.names[3:] == tuple(f"layer[{i}]@grad" for i in (2, 1, 0))
    np.testing.assert_array_equal(slots[::-1], readings["absmax"][3:])
