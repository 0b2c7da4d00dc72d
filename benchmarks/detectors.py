"""Cost of the judge inside the step, as a share of the demo model's train step.

    python benchmarks/detectors.py [--json] [--signals 500] [--rounds 15]

The judge stands alone here, with its state donated as in a train step, for as many
signals as asked: the loss, the gradient norm, `--rows` activations, and of the rest one
half gradient leaves and one half moments. A row brings four statistics, which count as
one signal, and leaves and rows stand in groups of siblings. The step is forward,
backward and AdamW of the model of `stabil demo`, unguarded. Both are timed in turn,
round by round; the ratio is the median over rounds. The compiled judge is searched for
transfers to the host and for collectives.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stabil.cli import _demo_model as demo
from stabil.detectors import Evidence, JudgeState, groups_of, judge, read_rows
from stabil.vocabulary import Readings

HOST = r"(outfeed|infeed|send|recv|custom-call[^\n]*callback|all-reduce|all-gather)"


def judge_step(signals: int, rows: int) -> tuple[Callable[..., Any], Any, str]:
    """The compiled judge, its first state, and its program as text."""
    leaves = (signals - rows - 2) // 2
    rng = np.random.default_rng(0)
    names = tuple(f"block_{i}/{part}" for i in range(rows // 4) for part in "abcd")
    table = jnp.asarray(rng.lognormal(size=(rows, 4)), jnp.float32)
    statistics = ("absmax", "std", "kurtosis", "stable_rank")
    readings = Readings(table, names, statistics)
    kinds = [f"block_{i // 8}/{'abcdefgh'[i % 8]}" for i in range(leaves)]
    evidence = Evidence(
        loss=jnp.float32(2.0),
        loss_given=jnp.asarray(True),
        gradient_sums=jnp.ones(leaves),
        moment_levels=jnp.ones(leaves),
        bad_moments=jnp.zeros(leaves, bool),
        impossible_moments=jnp.zeros(leaves, bool),
        update_rms=jnp.float32(0.2),
        rows=read_rows(readings, rows),
    )

    def step(state: JudgeState) -> tuple[JudgeState, Any]:
        found = judge(
            state,
            evidence,
            threshold=6.0,
            warmup_steps=20,
            max_consecutive_steps=5,
            rows_fingerprint=jnp.uint32(0),
            groups=groups_of([*kinds, *names]),
            names=rows,
        )
        return found.state, found.verdict

    state = JudgeState.empty(leaves, rows)
    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state).compile()
    print(f"judge compiled in {time.perf_counter() - began:.1f} s", flush=True)
    return lambda state: compiled(state)[0], state, compiled.as_text()


def train_step() -> tuple[Callable[..., Any], Any]:
    """The compiled step of the demo's model and its first state."""
    size = demo.Size()
    model, tx = demo.Gpt(size), demo.adamw(size, 1000)
    shape = (size.batch, size.context + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, demo.VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])

    def step(state: Any) -> Any:
        params, opt_state = state

        def loss_of(p: Any) -> jax.Array:
            return demo.cross_entropy(model.apply(p, tokens[:, :-1]), tokens[:, 1:])

        grads = jax.grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    return jax.jit(step, donate_argnums=0).lower(state).compile(), state


def seconds(step: Callable[..., Any], state: Any, calls: int) -> tuple[float, Any]:
    """Seconds a call, and the state after."""
    began = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / calls, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--signals", type=int, default=500)
    parser.add_argument("--rows", type=int, default=64, help="of these, activations")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    judged, judge_state, text = judge_step(args.signals, args.rows)
    train, train_state = train_step()
    ratios, judge_times, step_times = [], [], []
    for i in range(args.rounds + 1):
        a, judge_state = seconds(judged, judge_state, 100)
        b, train_state = seconds(train, train_state, 5)
        if i:  # the first round warms up
            ratios.append(a / b)
            judge_times.append(a)
            step_times.append(b)
    figures = {
        "signals": args.signals,
        "judge_microseconds": 1e6 * statistics.median(judge_times),
        "step_microseconds": 1e6 * statistics.median(step_times),
        "ratio": statistics.median(ratios),
        "host_transfers_or_collectives": len(re.findall(HOST, text)),
        "device": jax.devices()[0].device_kind,
    }
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<32}{value}")


if __name__ == "__main__":
    main()
