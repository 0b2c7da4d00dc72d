"""The runs of `stabil demo` without stabil: clean, and with the faults alone."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stabil.cli._demo_data import Corpus, batch_at, held_out_batches
from stabil.cli._demo_model import Gpt, Size, adamw, cross_entropy
from stabil.testing import inject


@dataclasses.dataclass(frozen=True)
class Task:
    """What all three runs share.

    Attributes:
      size: the model and the batch.
      steps: how many steps a run takes.
      seed: of the model, of the order of the data and of the faults.
      corpus: the data.
    """

    size: Size
    steps: int
    seed: int
    corpus: Corpus

    def batch(self, position: int) -> dict[str, np.ndarray]:
        """The sound batch at one position of the data."""
        return batch_at(self.corpus, self.size, self.seed, position)

    def model(self) -> Gpt:
        """The model, not yet initialised."""
        return Gpt(self.size)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with the run's schedule."""
        return adamw(self.size, self.steps)

    @functools.cached_property
    def parameters(self) -> Any:
        """The parameters that every run starts from."""
        init = jax.jit(self.model().init)
        tokens = jnp.zeros([1, self.size.context], jnp.int32)
        return init(jax.random.key(self.seed), tokens)["params"]

    @functools.cached_property
    def _mean_loss(self) -> Callable[..., jax.Array]:
        model = self.model()

        def one(params: Any, tokens: jax.Array) -> jax.Array:
            logits: Any = model.apply({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:])

        return jax.jit(
            lambda params, batches: jax.lax.map(
                lambda tokens: one(params, tokens), batches
            ).mean()
        )

    def evaluate(self, params: Any) -> float:
        """Mean loss over the fixed held-out batches, nats a byte."""
        batches = held_out_batches(self.corpus, self.size)
        return float(self._mean_loss(params, batches))


class State(NamedTuple):
    """What a step changes.

    Attributes:
      params: the model's parameters.
      opt_state: the optimizer's state.
    """

    params: Any
    opt_state: Any


class Trace(NamedTuple):
    """What one step tells, each a scalar on the device.

    Attributes:
      loss: float32, before the update.
      grad_norm: float32, before any clipping.
      sound: bool, whether every parameter is finite after the update.
    """

    loss: jax.Array
    grad_norm: jax.Array
    sound: jax.Array


@dataclasses.dataclass
class Run:
    """One finished run.

    Attributes:
      name: `clean`, `unprotected` or `protected`.
      batches: position in the data of each entry below, rising.
      losses: training loss of each step.
      grad_norms: gradient norm of each step, before any clipping.
      unsound_steps: steps after which a parameter was not finite.
      final_loss: mean loss over the held-out batches at the end, nats a byte.
      seconds: wall time, with compiling and evaluation.
      stopped: why the session ended the run early, or None.
    """

    name: str
    batches: list[int]
    losses: list[float]
    grad_norms: list[float]
    unsound_steps: int
    final_loss: float
    seconds: float
    stopped: str | None = None


def all_finite(tree: Any) -> jax.Array:
    """Whether every entry of every leaf is finite, bool scalar."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def train_plainly(
    name: str,
    task: Task,
    schedule: Sequence[inject.Fault],
    tell: Callable[[int, float], None],
) -> Run:
    """Trains with AdamW alone, while the faults of `schedule` strike.

    Args:
      name: what the run is called.
      task: what to train, on what and for how long.
      schedule: the planted faults; empty for a clean run.
      tell: called with the number of finished steps and a recent loss.
    """
    began = time.perf_counter()
    tx, step = task.optimizer(), _plain_step(task, schedule)
    state = State(task.parameters, tx.init(task.parameters))
    traces: list[Any] = []
    for i in range(task.steps):
        batch = inject.batch(schedule, i, task.batch(i))
        state = State(
            inject.parameters(schedule, i, state.params),
            inject.moments(schedule, i, state.opt_state),
        )
        state, trace = step(state, batch)
        traces.append(trace)
        if i % 10 == 9:
            tell(i + 1, float(traces[i - 5].loss))
    host = [Trace(*row) for row in jax.device_get(traces)]
    return Run(
        name=name,
        batches=list(range(task.steps)),
        losses=[float(t.loss) for t in host],
        grad_norms=[float(t.grad_norm) for t in host],
        unsound_steps=sum(not t.sound for t in host),
        final_loss=task.evaluate(state.params),
        seconds=time.perf_counter() - began,
    )


def _plain_step(task: Task, schedule: Sequence[inject.Fault]) -> Callable[..., Any]:
    model, tx = task.model(), task.optimizer()

    @jax.jit
    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Trace]:
        tokens, position = batch["tokens"], batch["position"]

        def loss_of(params: Any) -> jax.Array:
            with inject.activations(schedule, position):
                logits: Any = model.apply({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        grads = inject.gradients(schedule, position, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        trace = Trace(loss, optax.tree.norm(grads), all_finite(params))
        return State(params, opt_state), trace

    return step
