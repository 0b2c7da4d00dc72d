"""Add stabil to a run that was begun without it, and lose nothing.

The old run saved with Orbax's `CheckpointManager`: parameters and the state of `adamw`.
The new script puts a guard around the same optimizer. `adopt` carries every parameter,
moment and counter over, starts the guard's own statistics fresh, and names both. Runs
of Orbax's newest API are adopted as well, and Orbax opens what a keeper saved.

Run with `python examples/adopt_in_old_run.py`.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import stabil

OLD = optax.adamw(optax.cosine_decay_schedule(1e-2, 1000))
NEW = stabil.guard(OLD)


def init(tx):
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    return {"params": params, "opt_state": tx.init(params)}


def train(tx, state, steps):
    @jax.jit
    def train_step(state, step):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (32, 8))

        def loss_of(params):
            return jnp.mean(
                jnp.square(x @ params["w"] + params["b"] - jnp.sin(x[:, :4]))
            )

        grads = jax.grad(loss_of)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    for step in steps:
        state = train_step(state, step)
    return state


def equal(a, b):
    same = lambda x, y: bool(jnp.array_equal(x, y, equal_nan=True))  # noqa: E731
    return jax.tree.all(jax.tree.map(same, a, b))


def main(directory):
    directory = pathlib.Path(directory)
    old = train(OLD, init(OLD), range(200))
    with ocp.CheckpointManager(directory / "old_run") as manager:
        manager.save(200, args=ocp.args.StandardSave(old))

    # The new script knows the old run's folder and nothing else of it.
    with stabil.checkpoints.Keeper(directory / "new_run", save_every=100) as keeper:
        adopted = keeper.adopt(directory / "old_run", init(NEW))
        for note in adopted.notes:
            print(note if len(note) < 100 else note[:97] + "...")
        state = train(NEW, adopted.state, range(adopted.step, 300))
        keeper.save(300, state)
        keeper.wait()
        print("steps of the new run:", keeper.steps())

    # There is a way back: the new run is an ordinary one for Orbax.
    with ocp.CheckpointManager(directory / "new_run") as manager:
        restore = ocp.args.StandardRestore(state)
        found = manager.restore(300, args=ocp.args.Composite(state=restore)).state
    print("plain Orbax reads the new run:", equal(found, state))

    # Nothing was wrong with the run, so the guard changed no bit of it.
    plain = train(OLD, old, range(200, 300))
    same = equal(plain["params"], state["params"])
    print("the guarded run equals the old one bit for bit:", same)
    return same


if __name__ == "__main__":
    main(tempfile.mkdtemp())
