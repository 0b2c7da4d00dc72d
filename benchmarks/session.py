"""Cost of the host half: microseconds a step, memory, and the effect on step time.

    python benchmarks/session.py [--steps N] [--json]

`host_us`: what `steps` and `end_step` cost the training thread on a step without an
event, with new vitals of a guard over 12 leaves, which the step has made.
`event_us`: the same when every step is clipped and so makes a row in the log.
`share_of_step`: `host_us` by the time of a bare step of the demo's model on this
machine; the two run one after the other, so it is an upper bound wherever the device
works by itself. `share_of_small_step`: of a step of 12 matrices of width 256, batch 64.
`bytes_per_1000_steps`: growth of the host's memory once every window is full.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
import tracemalloc

import detectors
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stabil

WIDTH, LAYERS, BATCH = 256, 12, 64
FILLED = 2500  # steps after which every window of the host half is full
TX = stabil.guard(optax.adam(1e-4))


@jax.jit
def train_step(state, batch, controls):
    params, opt_state = state

    def loss_of(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = TX.update(
        grads, opt_state, params, loss=loss, controls=controls
    )
    vitals = stabil.vitals(opt_state, params=params)
    return (optax.apply_updates(params, updates), opt_state), vitals


def first_state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
    return params, TX.init(params)


def bare_step_us(steps):
    state, controls = first_state(), stabil.Controls.untouched()
    batch = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    state, vitals = train_step(state, batch, controls)
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        state, vitals = jax.block_until_ready(train_step(state, batch, controls))
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times), vitals


def demo_step_us(steps):
    step, state = detectors.train_step()
    times = []
    for _ in range(steps):
        seconds, state = detectors.seconds(step, state, 1)
        times.append(seconds)
    return 1e6 * statistics.median(times)


@jax.jit
def again(vitals, step):
    """The same vitals of another step: arrays that nobody has read yet."""
    tally = vitals.tally._replace(judged_steps=step)
    return dataclasses.replace(vitals, tally=tally)


def host_us(vitals, steps):
    with stabil.Session(tempfile.mkdtemp(), total_steps=steps, progress=False) as s:
        times, begun = [], time.perf_counter()
        for step, _ in s.steps(0, lambda i: i):
            drawn = time.perf_counter() - begun
            new = jax.block_until_ready(again(vitals, np.int32(step + 1)))
            begun = time.perf_counter()
            s.end_step(0, new)
            now = time.perf_counter()
            times.append(drawn + now - begun)
            begun = now
    return 1e6 * statistics.median(times)


def bytes_per_1000_steps(vitals, steps):
    with stabil.Session(tempfile.mkdtemp(), total_steps=steps + FILLED) as s:
        tracemalloc.start()
        for step, _ in s.steps(0, lambda i: i):
            s.end_step(0, again(vitals, np.int32(step + 1)))
            if step == FILLED - 1:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return 1000 * (after - before) / steps


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    step, vitals = bare_step_us(min(args.steps, 200))
    quiet = host_us(vitals, args.steps)
    demo = demo_step_us(min(args.steps, 40))
    measures = vitals.measures._replace(clip_factor=jnp.float32(0.5))
    clipped = dataclasses.replace(vitals, measures=measures)
    found = {
        "host_us": round(quiet, 1),
        "event_us": round(host_us(clipped, args.steps), 1),
        "step_us": round(demo, 1),
        "share_of_step": round(quiet / demo, 4),
        "small_step_us": round(step, 1),
        "share_of_small_step": round(quiet / step, 4),
        "bytes_per_1000_steps": round(bytes_per_1000_steps(vitals, args.steps)),
    }
    if args.json:
        print(json.dumps({"summary": found}))
    else:
        print("\n".join(f"{name:22} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
