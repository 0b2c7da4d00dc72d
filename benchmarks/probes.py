"""Cost of probes in a train step, against the same step without them.

    python benchmarks/probes.py [--json] [--size demo|wide] [--dtype float32|bfloat16]
                                [--rounds 21] [--batch 8] [--forward] [--peers]

The step is forward, backward and AdamW of a decoder: `demo` is 4 layers of width 128
at sequence 128, `wide` 6 layers of width 384 at sequence 256. Steps of all
configurations run in turn, round by round; a ratio is the median over rounds of one
configuration's time over that of the plain step in the same round. `noise` is a second
plain step. Configurations read the places of the default, those with `modules` in
their name every module's output; `full_backward` is collected around the whole step.
`--forward` adds rows of the loss alone, against the loss alone; `--peers` the same step
with other tools, see `probes_peers`.
Times are CPU seconds of the process where the device is the CPU, wall seconds
elsewhere. The summary's compile ratios are medians over three turns, in which each
program is traced and compiled from nothing. Bytes and temporary memory are XLA's own
analysis and do not depend on the machine's load; bytes hold branches that are seldom
taken. The steps run with host transfers disallowed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from probes_peers import measure_peers

from stabil.probes import collect, probe

SIZES = {"demo": (4, 128, 128), "wide": (6, 384, 256)}
VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, kw = x.shape[-1], dict(dtype=self.dtype)
        h = nn.LayerNorm(name="norm_1", **kw)(x)
        attention = nn.MultiHeadDotProductAttention(4, name="attention", **kw)
        x = x + attention(h, mask=nn.make_causal_mask(x[..., 0]))
        h = nn.Dense(4 * width, name="up", **kw)(nn.LayerNorm(name="norm_2", **kw)(x))
        return x + nn.Dense(width, name="down", **kw)(nn.gelu(h))


class Decoder(nn.Module):
    """A byte-level language model."""

    layers: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="embed")(tokens)
        for i in range(self.layers):
            x = Block(self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype, name="head")(x)


def loss_of(apply: Callable[..., Any], params: Any, tokens: Any, i: Any) -> Any:
    """The loss, and readings where `apply` has any."""
    out = apply(params, tokens[:, :-1], i)
    logits, readings = out if isinstance(out, tuple) else (out, None)
    logits = logits.astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return each.mean(), readings


def step_with(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A train step around `apply(params, tokens, step)`."""
    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, tokens: jax.Array, i: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            return loss_of(apply, params, tokens, i)

        (value, readings), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, readings

    return step


def loss_with(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The loss alone around `apply(params, tokens, step)`."""

    def forward(params: Any, state: Any, tokens: jax.Array, i: jax.Array) -> Any:
        return loss_of(apply, params, tokens, i)

    return forward


def configurations(model: Decoder, forward: bool) -> dict[str, Callable[..., Any]]:
    """Train steps by name."""

    def plain(p: Any, x: jax.Array, i: jax.Array) -> Any:
        return model.apply(p, x)

    def probed(**kwargs: Any) -> Callable[..., Any]:
        at = probe(model, **kwargs).at
        return lambda p, x, i: at(i).apply(p, x)

    both = dict(stats="all", backward=True)
    every = dict(where="**")
    alone = {
        "forward_plain": loss_with(plain),
        "forward_minimal": loss_with(probed()),
        "forward_full": loss_with(probed(stats="all")),
        "forward_minimal_every_10": loss_with(probed(every=10)),
        "forward_full_every_10": loss_with(probed(stats="all", every=10)),
    }
    return {
        "plain": step_with(plain),
        "noise": step_with(lambda p, x, i: model.apply(p, x)),
        "minimal": step_with(probed()),
        "full": step_with(probed(stats="all")),
        "minimal_every_10": step_with(probed(every=10)),
        "full_every_10": step_with(probed(stats="all", every=10)),
        "minimal_modules": step_with(probed(**every)),
        "full_modules": step_with(probed(**every, stats="all")),
        "full_modules_every_10": step_with(probed(**every, stats="all", every=10)),
        "full_backward": collect(step_with(probed(**both)), **both),
        **(alone if forward else {}),
    }


def compile_ratios(
    steps: dict[str, Callable[..., Any]], arguments: Any, clock: Callable[[], float]
) -> dict[str, float]:
    """Of each step over the first one: medians over turns of what tracing costs too."""
    turns = []
    for _ in range(3):
        seconds = {}
        for name, step in steps.items():
            jax.clear_caches()
            start = clock()
            jax.jit(step).lower(*arguments).compile()
            seconds[name] = clock() - start
        base = next(iter(seconds.values()))
        turns.append({name: s / base for name, s in seconds.items()})
    return {name: statistics.median(t[name] for t in turns) for name in steps}


def measure(
    size: str, dtype: str, rounds: int, batch: int, forward: bool, peers: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times, bytes and compile times of every configuration, and peers."""
    layers, width, length = SIZES[size]
    model = Decoder(layers, width, jnp.dtype(dtype))
    shape = (batch, length + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
    state = jax.jit(optax.adamw(1e-3).init)(params)
    on_cpu = jax.default_backend() == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    compiled, result = {}, {}
    jax.jit(step_with(lambda p, x, i: model.apply(p, x))).lower(
        params, state, tokens, jnp.int32(0)
    ).compile()  # what is compiled first pays for what is compiled once
    for name, step in configurations(model, forward).items():
        start = clock()
        lowered = jax.jit(step).lower(params, state, tokens, jnp.int32(0))
        compiled[name] = lowered.compile()
        cost, memory = compiled[name].cost_analysis(), compiled[name].memory_analysis()
        result[name] = {
            "compile_seconds": clock() - start,
            "bytes_accessed": cost["bytes accessed"],
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    times: dict[str, list[float]] = {name: [] for name in compiled}
    numbers = [jnp.int32(i) for i in range(rounds)]
    for i in numbers:
        for name, step in compiled.items():
            with jax.transfer_guard("disallow"):
                start = clock()
                jax.block_until_ready(step(params, state, tokens, i))
                times[name].append(clock() - start)
    for name, r in result.items():
        # The first two rounds warm up; of every 10 steps of a cadence one is due.
        base = "forward_plain" if name.startswith("forward") else "plain"
        pairs = list(zip(times[name], times[base], strict=True))[2:]
        r["step_ratio"] = statistics.median(a / b for a, b in pairs)
        r["step_seconds"] = statistics.median(a for a, _ in pairs)
        r["bytes_ratio"] = r["bytes_accessed"] / result[base]["bytes_accessed"]
        r["compile_ratio"] = r["compile_seconds"] / result[base]["compile_seconds"]
    steps = configurations(model, forward)
    chosen = {n: steps[n] for n in ("plain", "noise", "minimal", "minimal_modules")}
    ratios = compile_ratios(chosen, (params, state, tokens, jnp.int32(0)), clock)
    for name, value in ratios.items():
        result[name]["compile_ratio"] = value
    if not peers:
        return result, {}
    others = measure_peers(
        step_with(lambda p, x, i: model.apply(p, x)),
        (params, state, tokens, jnp.int32(0)),
        rounds,
        clock,
        **dict(layers=layers, width=width, length=length, batch=batch),
        **dict(vocabulary=VOCABULARY, dtype=dtype),
    )
    return result, others


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--forward", action="store_true", help="the loss alone too")
    parser.add_argument("--peers", action="store_true", help="other tools too")
    args = parser.parse_args()
    found, peers = measure(
        args.size, args.dtype, args.rounds, args.batch, args.forward, args.peers
    )

    def ratio(name: str) -> float:
        return found[name]["step_ratio"]

    def tenth(name: str) -> float:
        """The rounds hold few due steps, so their median is that of an off-step."""
        return (9 * ratio(f"{name}_every_10") + ratio(name)) / 10

    summary = {
        "minimal_every_step_ratio": ratio("minimal"),
        "full_every_step_ratio": ratio("full"),
        "full_every_10_ratio": tenth("full"),
        "compile_ratio": found["minimal"]["compile_ratio"],
        "every_module_minimal_every_step_ratio": ratio("minimal_modules"),
        "every_module_full_every_step_ratio": ratio("full_modules"),
        "every_module_full_every_10_ratio": tenth("full_modules"),
        "every_module_compile_ratio": found["minimal_modules"]["compile_ratio"],
        "noise_ratio": found["noise"]["step_ratio"],
        "compile_noise_ratio": found["noise"]["compile_ratio"],
    }
    whole = {
        "summary": summary,
        "configurations": found,
        "peers": peers,
        "size": args.size,
        "dtype": args.dtype,
        "device": jax.devices()[0].device_kind,
    }
    if args.json:
        print(json.dumps(whole))
        return
    kinds = ("step", "bytes", "compile")
    for name, r in found.items():
        ratios = "  ".join(f"{k} {r[f'{k}_ratio']:.3f}" for k in kinds)
        print(f"{name:22} {ratios}  temp {r['temporary_bytes'] / 1e6:.1f} MB")
    for name, r in peers.items():
        print(f"{name:26} {r.get('note') or format(r['step_ratio'], '.3f')}")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
