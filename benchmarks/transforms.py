"""Cost of every transformation chained with AdamW, against what people use today.

    python benchmarks/transforms.py [--json] [--rounds 5] [--params 25] [--only NAMES]

One step takes parameters, optimizer state and the accumulated gradients of a
transformer (25 million parameters in float32 by default) and returns new parameters and
state and the accumulator, emptied. All arguments are donated, so a method may overwrite
the gradients, as it may in a train step, where they are temporaries. Steps of all
methods are timed in turn, round by round; a ratio is the median over rounds of one
method's time over that of `chain(clip_by_global_norm, adamw)` in the same round. Bytes,
flops and temporary memory are XLA's own analysis of the compiled step and do not depend
on the machine's load; of a branch that an ordinary step does not take, such as the
second pass on overflow, XLA counts the bytes all the same.

The gradient is an ordinary one, of norm 0.5, so that nothing is clipped. `msign` acts
on the attention projections; its turn, once in 100 steps, is timed once and has rows of
its own: the turn, and the mean over a period.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import transforms_peers as peers

import stabil
import stabil.transforms

REFERENCE = "optax: chain(clip_by_global_norm, adamw)"
GUARD = "stabil: guard(adamw)"
MSIGN = "stabil: adamw, msign"
MSIGN_TURN = f"{MSIGN} (its turn)"
PERIOD = 100
ATTENTION = ("*/qkv", "*/out")
LEARNING_RATE = 3e-4
# Times the parameters: a norm of 0.5.
GRADIENT = 0.005


def transformer(millions: float) -> dict[str, Any]:
    """Parameters of a decoder with six separate blocks, about `millions` million."""
    width = round((millions * 1e6 / 97) ** 0.5 / 64) * 64
    vocabulary = round((millions * 1e6 - 72 * width**2) / (2 * width))
    shapes: dict[str, Any] = {"embed": (vocabulary, width), "head": (width, vocabulary)}
    for i in range(6):
        shapes[f"block_{i}"] = {
            "norm_1": (width,),
            "norm_2": (width,),
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [0.02 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def contenders() -> dict[str, optax.GradientTransformation]:
    """Every method by name, each with AdamW."""
    adamw = optax.adamw(LEARNING_RATE)
    found = {
        "optax: adamw": adamw,
        REFERENCE: optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "optax: apply_if_finite(adamw)": optax.apply_if_finite(adamw, 5),
        GUARD: stabil.guard(adamw),
    }
    for name in stabil.transforms.__all__:
        factory = getattr(stabil.transforms, name)
        if not inspect.isfunction(factory) or name == "guard":
            continue
        signature = inspect.signature(factory)
        if "GradientTransformation" not in str(signature.return_annotation):
            continue
        parameters = list(signature.parameters)
        if parameters[:1] == ["inner"]:
            found[f"stabil: {name}(adamw)"] = factory(adamw)
        elif parameters[:1] == ["learning_rate"]:
            found[f"stabil: {name}"] = factory(LEARNING_RATE)
        elif name.startswith("scale_by_"):
            scale = optax.scale_by_learning_rate(LEARNING_RATE)
            found[f"stabil: {name}"] = optax.chain(factory(), scale)
        elif name == "msign":
            for row, every in ((MSIGN, PERIOD), (MSIGN_TURN, 1)):
                link = factory(every_steps=every, where=ATTENTION)
                found[row] = optax.chain(adamw, link)
        elif name in ("clippy", "clip_update_norm"):
            found[f"stabil: adamw, {name}"] = optax.chain(adamw, factory())
        else:
            found[f"stabil: {name}, adamw"] = optax.chain(factory(), adamw)
    skip = stabil.transforms.skip_bad_micro_batches()
    multi = optax.MultiSteps(adamw, 1, should_skip_update_fn=skip)
    found["stabil: skip_bad_micro_batches, MultiSteps(adamw)"] = (
        multi.gradient_transformation()
    )
    return found


def step_of(tx: optax.GradientTransformation) -> Callable:
    """One optimizer step, all of whose arguments may be overwritten."""
    tx = optax.with_extra_args_support(tx)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, state = tx.update(grads, state, params, loss=jnp.float32(2.0))
        emptied = jax.tree.map(jnp.zeros_like, grads)
        return optax.apply_updates(params, updates), state, emptied

    return jax.jit(step, donate_argnums=(0, 1, 2))


def timed(compiled: Callable, tx: Any, params: Any) -> float:
    """Seconds of one step, after one step to warm up; buffers are made beforehand."""
    state = tx.init(params)
    params = jax.tree.map(jnp.copy, params)
    for _ in range(2):
        grads = jax.tree.map(lambda p: GRADIENT * p, params)
        jax.block_until_ready((params, state, grads))
        start = time.perf_counter()
        params, state, grads = compiled(params, state, grads)
        jax.block_until_ready((params, state, grads))
        seconds = time.perf_counter() - start
    return seconds


def with_turns(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """The mean step of `msign` over a period, one turn in it, round by round."""
    turn = times[MSIGN_TURN][0]
    mean = [((PERIOD - 1) * idle + turn) / PERIOD for idle in times[MSIGN]]
    return {f"{MSIGN} (mean of {PERIOD} steps)": mean}


def measure(rounds: int, millions: float, only: set[str] | None) -> dict[str, Any]:
    """Times and XLA's figures of every contender."""
    params = transformer(millions)
    methods = contenders()
    if only:
        kept = {REFERENCE, GUARD}
        methods = {
            k: v for k, v in methods.items() if k in kept or any(o in k for o in only)
        }
    compiled, figures = {}, {}
    for name, tx in methods.items():
        print(f"compiling {name}", file=sys.stderr)
        step = step_of(tx)
        state = jax.eval_shape(tx.init, params)
        compiled[name] = step.lower(params, state, params).compile()
        cost = compiled[name].cost_analysis()
        memory = compiled[name].memory_analysis()
        figures[name] = {
            "bytes_accessed": cost["bytes accessed"],
            "flops": cost["flops"],
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    times: dict[str, list[float]] = {name: [] for name in methods}
    others = peers.available(params, LEARNING_RATE, GRADIENT)
    times |= {name: [] for name in others}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        for name, tx in methods.items():
            if turn == 0 or name != MSIGN_TURN:
                times[name].append(timed(compiled[name], tx, params))
        for name, run in others.items():
            times[name].append(run())
    if MSIGN_TURN in times:
        times |= with_turns(times)
    # Packages that do not run inside a compiled step have a time only.
    for name in times:
        figures.setdefault(name, {}).update(
            median_ms=1e3 * statistics.median(times[name]),
            # Its turn was timed in the first round only.
            time_ratio=statistics.median(
                a / b for a, b in zip(times[name], times[REFERENCE], strict=False)
            ),
        )
        if name in methods:
            reference = figures[REFERENCE]["bytes_accessed"]
            figures[name]["bytes_ratio"] = figures[name]["bytes_accessed"] / reference
    size = sum(x.size for x in jax.tree.leaves(params))
    finite = figures.get("optax: apply_if_finite(adamw)", {})
    return {
        "summary": {
            "guard_bytes_ratio": figures[GUARD]["bytes_ratio"],
            "guard_time_ratio": figures[GUARD]["time_ratio"],
            "apply_if_finite_bytes_ratio": finite.get("bytes_ratio"),
            "apply_if_finite_time_ratio": finite.get("time_ratio"),
            "parameters": size,
            "rounds": rounds,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        },
        "methods": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=float, default=25.0, help="millions")
    parser.add_argument("--only", default="", help="names, or parts, with commas")
    arguments = parser.parse_args()
    only = {x for x in arguments.only.split(",") if x} or None
    result = measure(arguments.rounds, arguments.params, only)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'method':52} {'bytes':>6} {'time':>6} {'ms':>7} {'temporary MB':>13}")
    for name, f in result["methods"].items():
        size = f"{f['bytes_ratio']:6.3f}" if "bytes_ratio" in f else " " * 6
        spare = f.get("temporary_bytes", float("nan")) / 1e6
        timing = f"{f['time_ratio']:6.3f} {f['median_ms']:7.1f}"
        print(f"{name:52} {size} {timing} {spare:13.1f}")
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
