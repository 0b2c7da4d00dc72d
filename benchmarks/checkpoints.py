"""Time of saves and restores against plain Orbax and numpy.save, in one run.

    python benchmarks/checkpoints.py --json

Every state has 20 float32 arrays of random normal numbers. Contenders take turns, and
each number is the median of the turns. "Plain Orbax" is `CheckpointManager` with async
saves and the array format that the keeper uses (OCDBT, no compression), so that the
ratios compare like with like; Orbax's own default, which compresses, stands beside it.
Before a restore the files are dropped from the page cache where the system allows it.

`blocking_ratio`: the time that a save keeps the train loop, digests on, by plain Orbax.
`restore_ratio`: a restore with verification, by plain Orbax.
`memory_ring_speedup`: the keeper's verified restore from disk by its restore from host
memory; `..._to_plain` by plain Orbax's restore instead. On a CPU that restore copies
nothing, and the first step that donates the state works on a copy: `..._with_step` has
such a step in the time of both.
`blocking_cpu_ratio`, `restore_cpu_ratio`: the same of the processor time that the
train thread, and the process, spent: on a machine that others use, these move less.
The summary is of the largest state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from stabil.checkpoints import Keeper, _digest, _holding, _manifest

ARRAYS = 20


def make_state(megabytes):
    """A state of that size; one program makes it, so nothing is shared."""
    columns = 1024
    rows = megabytes * 1_000_000 // (4 * columns * ARRAYS)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, columns)))
    return jax.block_until_ready({f"w{i}": make(k) for i, k in enumerate(keys)})


@functools.partial(jax.jit, donate_argnums=0)
def step(state):
    """What a train step does to memory: it reads a state and writes its successor."""
    return jax.tree.map(lambda x: 0.999 * x, state)


def timed_restore(load):
    """Seconds until the state is there, and until a step has been made from it."""
    start, spent = time.perf_counter(), time.process_time()
    state = jax.block_until_ready(load())
    restored, spent = time.perf_counter(), time.process_time() - spent
    jax.block_until_ready(step(state))
    return {
        "restore_s": restored - start,
        "restore_and_step_s": time.perf_counter() - start,
        "restore_cpu_s": spent,
    }


def drop_cache(folder):
    """Asks the system to forget the files, so that a restore reads the disk."""
    os.sync()
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file, contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def no_digests():
    """The keeper without its digests, to see what they cost."""
    hold, take, check = _holding.hold, _holding.Arrivals.take, _manifest.check
    _holding.hold = lambda values, **_: lambda: [_digest.ZERO] * len(values)
    _holding.Arrivals.take = lambda self, arrays: None
    _manifest.check = lambda *arguments: None
    try:
        yield
    finally:
        _holding.hold, _holding.Arrivals.take = hold, take
        _manifest.check = check


class Turn:
    """Blocking, total and restore time of one save, seconds."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, state, begin, wait, load):
        start, spent = time.perf_counter(), time.thread_time()
        begin(state)
        blocked, spent = time.perf_counter() - start, time.thread_time() - spent
        wait()
        total = time.perf_counter() - start
        drop_cache(self.folder)
        took = {"blocking_s": blocked, "total_s": total, **timed_restore(load)}
        return {**took, "blocking_cpu_s": spent}


def by_keeper(state, folder, target):
    with Keeper(folder) as keeper:
        return Turn(folder).run(
            state,
            lambda s: keeper.save(1, s),
            keeper.wait,
            lambda: keeper.restore(target, step=1).state,
        )


def by_keeper_without_digests(state, folder, target):
    with no_digests():
        return by_keeper(state, folder, target)


def by_orbax(state, folder, target, compress=False):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=compress)
    with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
        restore = ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        )
        return Turn(folder).run(
            state,
            lambda s: manager.save(1, args=ocp.args.PyTreeSave(s)),
            manager.wait_until_finished,
            lambda: manager.restore(1, args=restore),
        )


def by_orbax_default(state, folder, target):
    return by_orbax(state, folder, target, compress=True)


def by_numpy(state, folder, target):
    def save(s):
        for name, x in s.items():
            with open(folder / f"{name}.npy", "wb") as file:
                np.save(file, np.asarray(x))
                file.flush()
                os.fsync(file.fileno())

    def load():
        return {n: jnp.asarray(np.load(folder / f"{n}.npy")) for n in target}

    folder.mkdir()
    return Turn(folder).run(state, save, lambda: None, load)


def by_memory(state, folder, target):
    with Keeper(folder) as keeper:
        # The ring is warm in a run: every snapshot after the first few reuses memory.
        for step in range(3):
            keeper.snapshot(step, state)
        keeper.mark(2, "healthy")
        start = time.perf_counter()
        keeper.snapshot(3, state)
        blocked = time.perf_counter() - start
        took = timed_restore(lambda: keeper.restore(target).state)
    # Copies are all that it does.
    return {
        "blocking_s": blocked,
        "total_s": blocked,
        **took,
        "blocking_cpu_s": blocked,
    }


CONTENDERS = {
    "stabil": by_keeper,
    "stabil_without_digests": by_keeper_without_digests,
    "stabil_memory": by_memory,
    "orbax": by_orbax,
    "orbax_compressed": by_orbax_default,
    "numpy_fsync": by_numpy,
}


def measure(megabytes, turns, scratch):
    """Medians of every contender for a state of one size."""
    state = make_state(megabytes)
    step(jax.tree.map(jnp.copy, state))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state
    )
    seen = {name: [] for name in CONTENDERS}
    # The first turn warms up imports and allocators and is not counted.
    for turn in range(turns + 1):
        for name, contender in CONTENDERS.items():
            print(f"{megabytes} MB, turn {turn}, {name}", file=sys.stderr, flush=True)
            folder = pathlib.Path(tempfile.mkdtemp(dir=scratch)) / "run"
            took = contender(state, folder, target)
            shutil.rmtree(folder.parent)
            if turn:
                seen[name].append(took)
    return {
        name: {k: statistics.median(t[k] for t in took) for k in took[0]}
        for name, took in seen.items()
    }


def summarize(result):
    ours, plain, ring = result["stabil"], result["orbax"], result["stabil_memory"]
    bare = result["stabil_without_digests"]
    return {
        "blocking_ratio": ours["blocking_s"] / plain["blocking_s"],
        "restore_ratio": ours["restore_s"] / plain["restore_s"],
        "blocking_cpu_ratio": ours["blocking_cpu_s"] / plain["blocking_cpu_s"],
        "restore_cpu_ratio": ours["restore_cpu_s"] / plain["restore_cpu_s"],
        "memory_ring_speedup": ours["restore_s"] / ring["restore_s"],
        "memory_ring_speedup_to_plain": plain["restore_s"] / ring["restore_s"],
        "memory_ring_speedup_with_step": ours["restore_and_step_s"]
        / ring["restore_and_step_s"],
        "total_ratio": ours["total_s"] / plain["total_s"],
        "restore_ratio_to_default": ours["restore_s"]
        / result["orbax_compressed"]["restore_s"],
        "digest_blocking_s": ours["blocking_s"] - bare["blocking_s"],
        "digest_restore_s": ours["restore_s"] - bare["restore_s"],
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], help="MB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scratch", default=None, help="folder on the disk to measure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    sizes = {mb: measure(mb, args.turns, args.scratch) for mb in args.sizes}
    ratios = {mb: summarize(result) for mb, result in sizes.items()}
    summary = {"megabytes": max(sizes), **ratios[max(sizes)]}
    summary["load_average"] = os.getloadavg()[0]
    if args.json:
        found = {"sizes": sizes, "ratios": ratios, "summary": summary}
        print(json.dumps({**found, "device": jax.devices()[0].device_kind}, indent=1))
        return
    for mb, result in sizes.items():
        print(f"{mb} MB, seconds: {', '.join(result['orbax'])}")
        for name, took in result.items():
            print(f"  {name:24}", "".join(f"{v:10.3f}" for v in took.values()))
        for name, value in ratios[mb].items():
            print(f"  {name:24}{value:10.3f}")


if __name__ == "__main__":
    main()
