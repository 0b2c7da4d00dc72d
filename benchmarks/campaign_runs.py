"""The runs of `campaign.py` that need no host: clean, unprotected, single measures.

Each is one compiled loop that takes its fault as an argument, so that a method is
compiled once for all trials.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stabil
from stabil.cli import _demo_data, _demo_model
from stabil.testing import inject

SAVE_EVERY = 40  # steps between checkpoints
LEVEL_EVERY = 8  # steps between evaluations of the clean run
HELD_OUT = 64  # batches


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a campaign share.

    Attributes:
      size: the demo's model, small.
      steps: steps of each run.
    """

    size: _demo_model.Size
    steps: int

    @functools.cached_property
    def corpus(self) -> Any:
        return _demo_data.read_corpus()

    @functools.cached_property
    def model(self) -> Any:
        return _demo_model.Gpt(self.size)

    def optimizer(self) -> Any:
        return _demo_model.adamw(self.size, self.steps)

    @functools.cache  # noqa: B019
    def params(self, seed: int) -> Any:
        return self._init(jax.random.key(seed))

    @functools.cached_property
    def _init(self) -> Callable[..., Any]:
        tokens = jnp.zeros([1, self.size.context], jnp.int32)
        return jax.jit(lambda key: self.model.init(key, tokens)["params"])

    def batch(self, seed: int, position: int) -> dict[str, np.ndarray]:
        return _demo_data.batch_at(self.corpus, self.size, seed, position)

    @functools.cache  # noqa: B019
    def tokens(self, seed: int) -> np.ndarray:
        """The batches of a run in order, uint8 `[steps, batch, context + 1]`."""
        return np.stack([self.batch(seed, i)["tokens"] for i in range(self.steps)])

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules, in the order of the calls; "" for the whole model."""
        probed: Any = stabil.probe(self.model, where="**")
        x = jnp.zeros([1, self.size.context], jnp.int32)
        read = jax.eval_shape(lambda p: probed.apply({"params": p}, x), self.params(0))
        return (*read[1].names[:-1], "")

    @functools.cached_property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the parameters."""
        names = inject.names_in("parameters", self.params(0))
        return tuple(name.partition("/")[2] for name in names)

    def dial_names(self, tx: Any) -> tuple[str, ...]:
        """Everything that a fault can strike in a run with the optimizer `tx`."""
        params = self.params(0)
        state = jax.eval_shape(tx.init, params)
        moments = inject.names_in("moments", state)
        return (
            "batch",
            "loss",
            *inject.names_in("activations", self.modules),
            *inject.names_in("gradients", params),
            *inject.names_in("parameters", params),
            *(m for m in moments if "/mu/" in m or "/nu/" in m),
        )

    @functools.cached_property
    def _held_out(self) -> np.ndarray:
        found = _demo_data.held_out_batches(self.corpus, self.size, HELD_OUT)
        # As one batch: many small ones cost more.
        return found.reshape(-1, found.shape[-1])

    def evaluate(self, params: Any) -> jax.Array:
        """Mean held-out loss, nats a byte; traceable."""
        x = jnp.asarray(self._held_out)
        logits: Any = self.model.apply({"params": params}, x[:, :-1])
        return _demo_model.cross_entropy(logits, x[:, 1:])


def methods(setting: Setting) -> dict[str, Any]:
    """The optimizers that are compared, each around the same AdamW."""
    adamw = setting.optimizer()
    t = stabil.transforms
    return {
        "unprotected": adamw,
        "clip": optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "apply_if_finite": optax.apply_if_finite(adamw, max_consecutive_errors=5),
        "skip_maxtext": t.skip_spikes(adamw, rule="maxtext"),
        "zclip": optax.chain(t.zclip(parity=True), adamw),
    }


def struck_state(dial: Any, position: Any, params: Any, opt_state: Any) -> Any:
    """Parameters and optimizer state as a fault leaves them before a step."""
    params = inject.parameters(dial, position, params)
    return params, inject.moments(dial, position, opt_state)


def struck_gradients(
    setting: Setting, apply: Callable[..., Any], params: Any, dial: Any, step: Any
) -> Any:
    """Loss, gradients and what else `apply` returns, under the fault.

    Args:
      setting: gives the model.
      apply: as `model.apply`, with a pair for its result.
      params: the parameters.
      dial: the fault.
      step: position and tokens of the batch.
    """
    position, tokens = step
    tokens = inject.batch(dial, position, tokens)

    def loss_of(params: Any) -> Any:
        with inject.activations(dial, position):
            logits, readings = apply({"params": params}, tokens[:, :-1])
        loss = _demo_model.cross_entropy(logits, tokens[:, 1:])
        return inject.loss(dial, position, loss), readings

    (loss, readings), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return loss, inject.gradients(dial, position, grads), readings


def all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def loop(setting: Setting, tx: Any) -> Callable[..., Any]:
    """A whole run with the optimizer `tx`: `(params, tokens, dial) -> result`.

    The result holds `loss`, the held-out loss at the end; `sound`, whether all
    parameters are finite then; `levels`, the held-out loss at every `LEVEL_EVERY`
    steps, NaN but for the last in a run with a fault, where nobody asks.
    """
    tx = optax.with_extra_args_support(tx)
    model = setting.model

    def body(carry: Any, step: Any) -> Any:
        params, opt_state, dial = carry
        params, opt_state = struck_state(dial, step[0], params, opt_state)
        apply = lambda *args: (model.apply(*args), None)  # noqa: E731
        loss, grads, _ = struck_gradients(setting, apply, params, dial, step)
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        return (optax.apply_updates(params, updates), opt_state, dial), None

    def chunk(carry: Any, steps: Any) -> Any:
        carry, _ = jax.lax.scan(body, carry, steps)
        asked = (carry[2].step < 0) | (steps[0][-1] == setting.steps - 1)
        unasked = lambda _: jnp.float32(jnp.nan)  # noqa: E731
        return carry, jax.lax.cond(asked, setting.evaluate, unasked, carry[0])

    @jax.jit
    def run(params: Any, tokens: jax.Array, dial: Any) -> dict[str, jax.Array]:
        steps = (jnp.arange(setting.steps, dtype=jnp.int32), tokens)
        steps = jax.tree.map(lambda x: x.reshape(-1, LEVEL_EVERY, *x.shape[1:]), steps)
        carry, levels = jax.lax.scan(chunk, (params, tx.init(params), dial), steps)
        return {"loss": levels[-1], "sound": all_finite(carry[0]), "levels": levels}

    return run
