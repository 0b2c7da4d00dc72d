"""Go back to before a loss spike and leave out the data that caused it.

The batches 70 to 74 are broken. At step 76 the loop notices, goes back to the newest
healthy step, and goes on with the data after the broken batches. A rollback is kept on
the disk with the data it skipped, so that a restart skips the same.

Run with `python examples/rollback_and_skip.py`.
"""

import tempfile

import jax
import jax.numpy as jnp
import optax

from stabil.checkpoints import Keeper

TX = optax.adam(1e-2)
BROKEN = range(70, 75)


def init():
    params = {"w": jnp.zeros((8, 4))}
    return {"params": params, "opt_state": TX.init(params)}


def batch_at(position):
    """Data by its position in the stream: any batch can be had again."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), position), (32, 8))
    y = jnp.tanh(x[:, :4])
    return x, -100 * y if position in BROKEN else y


@jax.jit
def train_step(state, batch):
    def loss_of(params):
        x, y = batch
        return jnp.mean(jnp.square(x @ params["w"] - y))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def positions(keeper, start):
    """Positions in the data from `start` on, without what rollbacks have left out."""
    skipped = [record["extra"]["skip"] for record in keeper.rollbacks()]
    position = start
    while True:
        if not any(first <= position <= last for first, last in skipped):
            yield position
        position += 1


def main(directory, steps=120):
    state, step, losses = init(), 0, []
    with Keeper(directory, save_every=10) as keeper:
        data = positions(keeper, 0)
        normal = None
        while step < steps:
            position = next(data)
            state, loss = train_step(state, batch_at(position))
            step, loss = step + 1, float(loss)
            normal = loss if normal is None else normal
            if step >= 76 and losses[-1] > 2 * losses[60] and not keeper.rollbacks():
                # The batches since the target are not trained on again.
                target = keeper.newest_healthy(before=71)
                skip = [target, position]
                back = keeper.rollback(
                    state, target + 1, "loss spike", extra={"skip": skip}
                )
                state, step, losses = back.state, back.step, losses[: back.step]
                data = positions(keeper, back.extra["position"])
                print(f"back to step {step}, data {skip[0]} to {skip[1]} left out")
                continue
            losses.append(loss)
            # A step is healthy when the ten steps after it were calm.
            if keeper.save(step, state, extra={"position": position + 1}):
                calm = step >= 20 and max(losses[step - 10 :]) <= 2 * normal
                if calm and step - 10 in keeper.steps():
                    keeper.mark(step - 10, "healthy", "ten calm steps after it")
        keeper.wait()
        print("steps on disk:", keeper.steps())
    print(f"loss at the end {losses[-1]:.3f}, before the spike {losses[69]:.3f}")
    return losses, keeper


if __name__ == "__main__":
    main(tempfile.mkdtemp())
