"""One jitted train step with a probe and a clip that spikes cannot teach.

A small MLP learns a smooth function. At step 60 a batch is a million times too large:
the clip bounds it, the readings say which layer saw it first, and the run goes on.

Run with `python examples/train_step.py`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import stabil


class Mlp(nn.Module):
    """Two hidden layers; `x` is `[batch, 2]`, the output `[batch]`."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(64, name="first")(x))
        x = nn.tanh(nn.Dense(64, name="second")(x))
        return nn.Dense(1, name="out")(x)[:, 0]


probed = stabil.probe(Mlp(), where="*", stats=("finite", "absmax", "rms"))
tx = optax.chain(stabil.spike_aware(), optax.adamw(3e-3))


def batch_for_step(step):
    """Points and their values; the batch of step 60 is broken."""
    x = jax.random.uniform(jax.random.key(step), (128, 2), minval=-2.0, maxval=2.0)
    y = jnp.sin(x[:, 0]) * jnp.cos(x[:, 1])
    return (1e6 * x, 1e6 * y) if step == 60 else (x, y)


@jax.jit
def train_step(params, opt_state, batch):
    """Returns new parameters and optimizer state, the loss and the step's vitals."""
    x, y = batch

    def loss_of(params):
        prediction, readings = probed.apply({"params": params}, x)
        return jnp.mean(jnp.square(prediction - y)), readings

    (loss, readings), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss, stabil.vitals(opt_state, readings=readings)


def main(steps=200):
    """Trains and returns the loss of each step."""
    x, _ = batch_for_step(0)
    params = probed.init(jax.random.key(0), x)["params"]
    opt_state = tx.init(params)
    losses = []
    for step in range(steps):
        batch = batch_for_step(step)
        params, opt_state, loss, vitals = train_step(params, opt_state, batch)
        losses.append(float(loss))
        if step % 50 == 0 or vitals.severity > stabil.Severity.OK:
            print(
                f"step {step:3d}  loss {losses[-1]:.3g}  "
                f"gradient times {float(vitals.measures.clip_factor):.2g}  "
                f"largest in first layer {float(vitals.readings['absmax'][0]):.3g}  "
                f"{' '.join(vitals.causes)}"
            )
    return losses


if __name__ == "__main__":
    main()
