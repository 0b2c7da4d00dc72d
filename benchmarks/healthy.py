"""False alarms of the guard on healthy runs of the demo's model, probes on.

    python benchmarks/healthy.py [--json] [--steps 1500]

A small GPT learns the demo's data with several optimizers, each in one compiled scan,
with every block probed. Nothing is planted, so that every verdict above WATCH is a
false alarm. The shadow counts say how often other thresholds would have fired.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stabil
from stabil.cli import _demo_data as data
from stabil.cli import _demo_model as demo
from stabil.vocabulary import Cause, Severity

SIZE = demo.Size(layers=6, width=48, heads=4, context=32, batch=8)
STATISTICS = ("nan_count", "inf_count", "absmax", "std", "rms", "kurtosis")


def optimizers(steps: int) -> dict[str, optax.GradientTransformation]:
    """What is guarded, by name."""
    hot = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 20, steps)
    return {
        "adamw": demo.adamw(SIZE, steps),
        "adamw, ten times the rate": optax.adamw(hot),
        "sgd with momentum": optax.sgd(0.3, momentum=0.9),
    }


def train(tx: Any, steps: int, seed: int) -> tuple[Any, jax.Array, Any]:
    """Verdicts `[steps]`, losses, and the shadow counts of one run."""
    model = demo.Gpt(SIZE)
    probed: Any = stabil.probe(model, where="**", stats=STATISTICS)
    text = data.read_corpus().train
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, len(text) - SIZE.context - 1, (steps, SIZE.batch))
    text = jnp.asarray(text)
    shape = jnp.zeros((1, SIZE.context), jnp.int32)
    params = model.init(jax.random.key(seed), shape)["params"]

    def step(carry: Any, start: jax.Array) -> Any:
        params, state = carry
        tokens = text[start[:, None] + jnp.arange(SIZE.context + 1)]

        def loss_of(p: Any) -> Any:
            logits, readings = probed.apply({"params": p}, tokens[:, :-1])
            return demo.cross_entropy(logits, tokens[:, 1:]), readings

        (loss, readings), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = tx.update(grads, state, params, loss=loss, readings=readings)
        carry = optax.apply_updates(params, updates), state
        return carry, (stabil.vitals(state).verdict, loss)

    run = jax.jit(lambda carry, x: jax.lax.scan(step, carry, x))
    (_, state), (verdict, losses) = run((params, tx.init(params)), jnp.asarray(starts))
    return jax.device_get(verdict), losses, stabil.vitals(state).shadow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    rows = {}
    for seed, (name, tx) in enumerate(optimizers(args.steps).items()):
        print(f"{name} ...", file=sys.stderr, flush=True)
        verdict, losses, shadow = train(stabil.guard(tx), args.steps, seed)
        flags = np.bitwise_or.reduce(verdict.flags)
        rows[name] = {
            "watch": int(np.sum(verdict.severity == Severity.WATCH)),
            "warn": int(np.sum(verdict.severity == Severity.WARN)),
            "block": int(np.sum(verdict.severity == Severity.BLOCK)),
            "causes": Cause.names(int(flags)),
            "last_loss": float(np.mean(losses[-50:])),
            "shadow": shadow.scalars(),
        }
    kinds = ("watch", "warn", "block")
    summary = {f"{k}_steps": sum(r[k] for r in rows.values()) for k in kinds}
    summary = {"steps": args.steps * len(rows), **summary}
    if args.json:
        print(json.dumps({"summary": summary, "runs": rows}))
    else:
        for name, row in rows.items():
            print(f"{name:<28}" + "".join(f"{k} {row[k]:<6}" for k in kinds))
            print(f"  loss {row['last_loss']:.3f}, causes: {row['causes'] or 'none'}")
        print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
