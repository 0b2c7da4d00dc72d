"""What a checkpointed program keeps in memory while it is probed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from stabil.probes import collect, probe

ROWS, WIDTH, LAYERS = 256, 64, 64


class Layer(nn.Module):
    """A layer for scan, two tensors deep."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.sin(nn.Dense(WIDTH, name="dense")(x)), None


class Stack(nn.Module):
    """Checkpointed layers in a scan."""

    @nn.compact
    def __call__(self, x):
        kind = nn.remat(Layer, prevent_cse=False)
        lifted = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        return nn.scan(kind, length=LAYERS, **lifted)(name="layers")(x, None)[0]


def temporary_bytes(fn):
    x = jax.ShapeDtypeStruct([ROWS, WIDTH], jnp.float32)
    variables = jax.eval_shape(Stack().init, jax.random.key(0), x)
    compiled = jax.jit(fn).lower(variables, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def step(apply):
    def loss(variables, x):
        out = apply(variables, x)
        y, readings = out if isinstance(out, tuple) else (out, None)
        return jnp.sum(jnp.square(y)), readings

    return jax.grad(loss, has_aux=True)


@pytest.mark.slow
def test_no_probed_tensor_of_a_layer_is_kept_for_the_backward_pass():
    probed = probe(Stack(), where="**", stats="finite", backward=True)
    plain = temporary_bytes(step(Stack().apply))
    seen = collect(step(probed.apply), stats="finite", backward=True)
    # A tensor of a layer, kept for each.
    kept = 4 * ROWS * WIDTH * LAYERS
    assert plain > kept  # the inputs of the layers
    assert temporary_bytes(seen) < plain + kept / 2
