"""A run that saves, judges, deletes and rolls back as fast as it can, to be killed.

    python kill_worker.py FOLDER DIARY SEED [POINT TIMES]

The state is a function of its step and of a taint that comes up now and then and is
noticed two steps later. The diary says what the run knew: `healthy 12` after a mark,
`back 15` before a rollback. With a point, the process kills itself there.
"""

import os
import random
import signal
import sys

import jax.numpy as jnp

from stabil.checkpoints import Keeper, NoHealthyStepError, _points


def make_state(step, taint=0):
    return {
        "w": (jnp.arange(2000.0) * (step + 1)).reshape(20, 100),
        "step": jnp.int32(step),
        "taint": jnp.int32(taint),
    }


def write(diary, line):
    os.write(diary, f"{line}\n".encode())


def kill_at(point, times):
    left = [times]

    def reached(name):
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    _points.reached = reached


def begin(keeper):
    """The step to go on from."""
    target = make_state(0)
    if not keeper.steps():
        keeper.save(0, target)
        keeper.wait()
        keeper.mark(0, "healthy")
        return 0
    try:
        restored = keeper.restore(target)
    except NoHealthyStepError:
        # Killed before the first verdict.
        restored = keeper.restore(target, step=min(keeper.steps()))
    assert int(restored.state["taint"]) == 0, f"tainted step {restored.step}"
    return restored.step


def run(folder, diary, seed, remote=None, steps=400):
    chance = random.Random(seed)
    keeper = Keeper(
        folder, keep_last=2, save_every=2, save_every_minutes=None, remote=remote
    )
    step = begin(keeper)
    write(diary, f"begun {step}")
    taint_began = None
    while step < steps:
        step += 1
        if taint_began is None and chance.random() < 0.08:
            taint_began = step
        keeper.save(step, make_state(step, int(taint_began is not None)))
        if taint_began is None:
            old = step - 3
            if keeper.steps().get(old) == "pending":
                keeper.mark(old, "healthy", "three calm steps")
                write(diary, f"healthy {old}")
        elif step >= taint_began + 2:
            write(diary, f"back {taint_began}")
            step = keeper.rollback(make_state(0), taint_began, "taint").step
            taint_began = None
    keeper.close()


if __name__ == "__main__":
    if len(sys.argv) > 4:
        kill_at(sys.argv[4], int(sys.argv[5]))
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    far = sys.argv[4:] and sys.argv[4] in _points.REMOTE
    place = f"file://{sys.argv[1]}-far" if far else None
    run(sys.argv[1], log, int(sys.argv[3]), place)
