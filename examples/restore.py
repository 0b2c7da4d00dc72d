"""Save in mid-run, rebuild everything, restore the newest healthy step, continue.

The continued run ends bit for bit where the uninterrupted one ends, detectors included:
what the guard has learnt about this run is part of the optimizer's state.

Run with `python examples/restore.py`.
"""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stabil


def build():
    """What a script builds at its start: the optimizer, the first state, the step."""
    model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(1)])
    tx = stabil.guard(optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))

    def init():
        params = model.init(jax.random.key(0), jnp.ones([1, 2]))["params"]
        return {"params": params, "opt_state": tx.init(params)}

    @jax.jit
    def train_step(state, step):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), [64, 2])
        y = jnp.sin(x[:, :1] - x[:, 1:])

        def loss_of(params):
            return jnp.mean(jnp.square(model.apply({"params": params}, x) - y))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = tx.update(
            grads, state["opt_state"], state["params"], loss=loss
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    return init, train_step


def main(directory):
    """Trains 100 steps, then again from the newest healthy step; compares the ends."""
    init, train_step = build()
    state = init()
    with stabil.checkpoints.Keeper(directory, save_every=20) as keeper:
        for step in range(100):
            # Saved is the state that this step starts from; the one before it has
            # been watched for twenty steps by now.
            if keeper.save(step, state) and step:
                keeper.mark(step - 20, "healthy", "calm for 20 steps after it")
            state = train_step(state, step)

    # A new process would start here: nothing is left but the folder.
    init, train_step = build()
    with stabil.checkpoints.Keeper(directory, save_every=20) as keeper:
        restored = keeper.restore(jax.eval_shape(init))
    print(f"restored step {restored.step}")
    assert restored.step == 60  # nobody has judged step 80 yet
    again = restored.state
    for step in range(restored.step, 100):
        again = train_step(again, step)

    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in leaves)
    print("the continued run equals the uninterrupted one bit for bit")


if __name__ == "__main__":
    main(tempfile.mkdtemp())
