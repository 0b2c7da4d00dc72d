"""Restore the newest healthy step of a run, whatever is wrong with the newer ones.

Steps 40 and 60 are healthy, step 80 holds a NaN, and a bit of step 60 flips on the
disk. Restored is step 40, and what happened on the way is said.

Run with `python examples/restore_healthy.py`.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

from stabil.checkpoints import Keeper, verify

TX = optax.adamw(1e-2)


def init():
    """The first state; its shapes are all that a restore needs."""
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    return {"params": params, "opt_state": TX.init(params), "step": jnp.int32(0)}


@jax.jit
def train_step(state):
    grads = state["params"]
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def write_a_run(directory):
    """Saves every 20 steps; the last state is ruined and nobody noticed."""
    state = init()
    with Keeper(directory, save_every=20) as keeper:
        for step in range(1, 81):
            state = train_step(state)
            if step == 80:
                state["params"] = {"w": state["params"]["w"].at[3, 5].set(jnp.nan)}
            if keeper.save(step, state):
                keeper.mark(step, "healthy", "the loss looked good")


def flip_one_bit(directory, step):
    """What a bad disk does: one bit in the largest file of a step."""
    files = [p for p in (pathlib.Path(directory) / str(step)).rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(bytes(raw))


def main(directory):
    write_a_run(directory)
    flip_one_bit(directory, 60)

    with Keeper(directory) as keeper:
        print("on disk:", keeper.steps())
        restored = keeper.restore(jax.eval_shape(init))
        print("restored step", restored.step)
        for note in restored.notes:
            print("note:", note.replace(str(directory), "RUN"))
        print("on disk:", keeper.steps())

    sound = [found.step for found in verify(directory) if found.ok]
    print("every byte is as it was saved in steps", sorted(sound))
    return restored


if __name__ == "__main__":
    main(tempfile.mkdtemp())
