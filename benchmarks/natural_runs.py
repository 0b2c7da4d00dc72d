"""Methods, settings and compiled runs of `natural.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import natural_model as model
import numpy as np
import optax

import stabil
from stabil import transforms

STEPS, WARMUP_STEPS = 400, 100
# Adam's own default, which the published reports of instability share.
B2 = 0.999
HELD_OUT_ROWS = 256


class Setting(NamedTuple):
    """A way to make training unstable that has been published.

    Attributes:
      name: for tables.
      why: the published reason.
      learning_rate: peak, after a warm-up of `WARMUP_STEPS`.
      data: kind of the data, see `data_for`.
    """

    name: str
    why: str
    learning_rate: float
    data: str = "plain"


SETTINGS = (
    Setting("high_rate", "post-LN, no QK-norm, rate too high", 4e-2),
    Setting("shift", "b2 = 0.999 under a sudden change of the data", 2.5e-2, "shift"),
    Setting("repeats", "batches of one repeated token", 2.5e-2, "repeats"),
    Setting("noise", "bursts of random text", 2.5e-2, "noise"),
)
# Around the best one, up to where every method fails.
RATES = (3e-3, 1e-2, 2e-2, 4e-2, 8e-2)
# Runs in one compiled program; more of them take turns.
CHUNK = 5


def schedule(rate: Any) -> Callable[[Any], Any]:
    return lambda step: rate * jnp.minimum(1.0, (step + 1) / WARMUP_STEPS)


def methods() -> dict[str, Callable[[Any], optax.GradientTransformation]]:
    """Functions of the learning-rate schedule; each method with its defaults."""

    def before(link: optax.GradientTransformation | None) -> Callable[[Any], Any]:
        links = [] if link is None else [link]
        return lambda rate: optax.chain(*links, optax.adamw(rate, b2=B2))

    return {
        "nothing": before(None),
        "clip 1.0": before(optax.clip_by_global_norm(1.0)),
        "AGC": before(transforms.adaptive_gradient_clip()),
        "ZClip": before(transforms.zclip()),
        "AdaGC": before(transforms.adagc()),
        "SPAM": lambda rate: transforms.spam(rate, weight_decay=1e-4, b2=B2),
        "Stable-SPAM": lambda rate: transforms.stable_spam(
            rate, weight_decay=1e-4, b2=B2
        ),
        "guard": lambda rate: stabil.guard(optax.adamw(rate, b2=B2)),
        # What the session's runs are without their ladder.
        "guard, clip 1.0": lambda rate: stabil.guard(
            before(optax.clip_by_global_norm(1.0))(rate)
        ),
    }


@functools.cache
def data_for(kind: str, seed: int, steps: int = STEPS) -> tuple[Any, Any]:
    """Batches `[steps, BATCH, LENGTH + 1]` and held-out rows of the last language."""
    rng = np.random.default_rng([seed, 1])
    first, second = model.language(0), model.language(1)
    rows = model.text(first, steps * model.BATCH, rng)
    batches = rows.reshape(steps, model.BATCH, -1)
    last = first
    if kind == "shift":
        half = steps // 2
        late = model.text(second, (steps - half) * model.BATCH, rng)
        batches[half:] = late.reshape(steps - half, model.BATCH, -1)
        last = second
    if kind == "repeats":
        # Three batches in a row of one token, once in 50 steps.
        for start in range(49, steps - 20, 50):
            batches[start : start + 3] = rng.integers(0, model.VOCABULARY)
    if kind == "noise":
        # Eight batches in a row without any rule, three times.
        for start in (steps // 4, steps // 2, 3 * steps // 4):
            random = rng.integers(0, model.VOCABULARY, batches[:8].shape)
            batches[start : start + 8] = random
    held_out = model.text(last, HELD_OUT_ROWS, np.random.default_rng([seed, 2]))
    return batches, held_out


class Result(NamedTuple):
    """Of several runs.

    Attributes:
      final: held-out loss of the last parameters `[runs]`.
      losses: training losses `[runs, steps]`.
      norms: gradient norms `[runs, steps]`.
    """

    final: Any
    losses: Any
    norms: Any


@functools.cache
def compiled(method: str) -> Callable[..., Any]:
    """Several runs of one method in one program: a `vmap` of a `scan`."""
    make = methods()[method]

    def run(rate: Any, key: Any, batches: Any, held_out: Any) -> Any:
        tx = optax.with_extra_args_support(make(schedule(rate)))
        params = model.init(key)

        def step(carry: Any, tokens: Any) -> Any:
            params, state = carry
            loss, grads = jax.value_and_grad(model.loss_of)(params, tokens)
            updates, state = tx.update(grads, state, params, loss=loss)
            params = optax.apply_updates(params, updates)
            return (params, state), (loss, optax.tree.norm(grads))

        (params, _), rows = jax.lax.scan(step, (params, tx.init(params)), batches)
        return model.loss_of(params, held_out), *rows

    return jax.jit(jax.vmap(run))


def play(
    method: str, data: str, rates_and_seeds: list[tuple[float, int]], steps: int = STEPS
) -> Result:
    """Runs every pair of learning rate and seed; rows in that order."""
    run, found = compiled(method), []
    for start in range(0, len(rates_and_seeds), CHUNK):
        pairs = rates_and_seeds[start : start + CHUNK]
        full = pairs + [pairs[0]] * (CHUNK - len(pairs))
        keys = jnp.stack([jax.random.key(seed) for _, seed in full])
        texts = zip(*(data_for(data, seed, steps) for _, seed in full), strict=True)
        rates = jnp.asarray([rate for rate, _ in full], jnp.float32)
        rows = run(rates, keys, *map(np.stack, texts))
        found.append([np.asarray(x, np.float64)[: len(pairs)] for x in rows])
    return Result(*map(np.concatenate, zip(*found, strict=True)))
