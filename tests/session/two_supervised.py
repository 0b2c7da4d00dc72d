"""One process of a run in which the second is killed, hangs, or reads corrupt data."""

import functools
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stabil
from stabil.checkpoints import Keeper
from stabil.session import Session, run_main

STEPS, FAULT_AT, HANG_SECONDS = 60, 33, 4.0


def batch_for_step(i, process, count, fault):
    rng = np.random.default_rng(i)
    x = rng.normal(size=(2, 8, 4)).astype(np.float32)
    if fault == "corrupt" and 37 <= i < 44:
        x[1] = np.nan  # the half of the second process
    devices = np.asarray(jax.devices())[:2]
    split = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    mine = x if count == 1 else x[process : process + 1]
    return jax.make_array_from_process_local_data(split, mine)


def main(port, process, count, folder, fault):
    process, count, folder = int(process), int(count), pathlib.Path(folder)
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, process)
    tx = stabil.guard(optax.adam(0.01))
    whole = NamedSharding(Mesh(np.asarray(jax.devices())[:2], "x"), PartitionSpec())
    marker = folder.parent / f"{folder.name}-struck"

    @functools.partial(jax.jit, out_shardings=whole)
    def train_step(state, x, controls):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(-1)) ** 2))(
            params
        )
        updates, opt_state = tx.update(
            grads, opt_state, params, loss=loss, controls=controls
        )
        vitals = stabil.vitals(opt_state, params=params)
        return (optax.apply_updates(params, updates), opt_state), vitals

    def strike(step):
        if process != 1 or step != FAULT_AT or marker.exists():
            return
        marker.write_text(fault)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        if fault == "ask":
            os.kill(os.getpid(), signal.SIGTERM)

    params = jax.jit(lambda: jnp.zeros(4), out_shardings=whole)()
    state = (params, jax.jit(tx.init, out_shardings=whole)(params))
    batches = functools.partial(
        batch_for_step, process=process, count=count, fault=fault
    )
    with (
        Keeper(folder / "checkpoints", save_every=10) as keeper,
        Session(
            folder,
            checkpoints=keeper,
            total_steps=STEPS,
            progress=False,
            hang_seconds=HANG_SECONDS,
        ) as session,
    ):
        session.end_on_signal(signal.SIGTERM)
        state = session.resume(state, batches)
        for step, batch in session.steps(state, batches):
            strike(step)
            state, vitals = train_step(state, batch, session.controls)
            state = session.end_step(state, vitals)
    if process == 0:
        np.save(folder.parent / f"{folder.name}.npy", np.asarray(state[0]))


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
