"""A Flax NNX model and its optimizer, as a session wants them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil.vocabulary import Severity, Vitals


def update_nnx(
    optimizer: Any,
    model: Any,
    grads: Any,
    *,
    readings: Any = None,
    kept: Any = None,
    **extra: Any,
) -> Vitals:
    """`optimizer.update(model, grads)` that hands extra arguments to the guard.

    Use it in the train step under `nnx.jit`. `optimizer.step` counts batches and goes
    on in a blocked step; parameters and optimizer state do not.

    Args:
      optimizer: a `flax.nnx.Optimizer` whose `tx` holds a `stabil` transformation.
      model: the module that it was made for.
      grads: from `nnx.grad` or `nnx.value_and_grad`.
      readings: `stabil.Readings` of the step, where a probe made them.
      kept: `nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))`, taken before the
        forward pass changes it: a blocked step puts it back. Without it a bad batch
        stays in the statistics until a rollback.
      extra: for `tx.update`: `loss`, `controls` and whatever else it takes.

    Returns:
      The `Vitals` for `NnxState.end_step`.

    Examples:
      >>> import jax.numpy as jnp, optax, stabil
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = stabil.guard(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...     loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
      ...     return update_nnx(optimizer, model, grads, loss=loss)
      >>> train_step(model, optimizer, jnp.ones((3, 2)) * jnp.nan).severity.name
      'BLOCK'
      >>> bool(jnp.all(jnp.isfinite(model.kernel[...])))
      True
    """
    # The host half does without Flax and the device half until somebody asks for both.
    from flax import nnx

    from stabil.transforms import vitals as read_vitals

    if readings is not None:
        extra["readings"] = readings
    optimizer.update(model, grads, **extra)
    params = nnx.to_pure_dict(nnx.state(model, optimizer.wrt))
    opt_state = _arrays(optimizer.opt_state)
    vitals = read_vitals(opt_state, params=params, readings=readings)
    if kept is not None:
        blocked = vitals.verdict.severity >= int(Severity.BLOCK)
        _replace(model, _put_back(nnx.to_pure_dict(nnx.state(model)), kept, blocked))
    return vitals


class NnxState:
    """Lets a session save and replace the state of objects that are changed in place.

    Everything that the model and the optimizer hold goes along: parameters, batch
    statistics, random streams, moments and the guard's own state.

    Args:
      model: a `flax.nnx.Module`.
      optimizer: its `flax.nnx.Optimizer`.
    """

    def __init__(self, model: Any, optimizer: Any):
        self._model, self._optimizer = model, optimizer

    def get(self) -> dict[str, Any]:
        """The state as a pytree of arrays, for `Session.resume` and `Session.steps`.

        The optimizer's records stay what they are: a session tells by their types which
        of their numbers may be NaN.
        """
        from flax import nnx

        return {
            "model": nnx.to_pure_dict(nnx.state(self._model)),
            "opt_state": _arrays(self._optimizer.opt_state),
            "step": self._optimizer.step[...],
        }

    def put(self, state: dict[str, Any]) -> None:
        """Writes a state back into model and optimizer."""
        _replace(self._model, state["model"])
        self._optimizer.step[...] = state["step"]
        leaves = jax.tree.leaves(state["opt_state"])
        variables = _variables(self._optimizer.opt_state)
        for variable, leaf in zip(variables, leaves, strict=True):
            variable[...] = leaf

    def end_step(self, session: Any, vitals: Vitals, **names: Any) -> None:
        """`Session.end_step` for objects: puts back what the session hands over."""
        state = self.get()
        after = session.end_step(state, vitals, **names)
        if after is not state:
            self.put(after)


def _put_back(now: Any, kept: Any, blocked: jax.Array) -> Any:
    """`now` with the entries that `kept` has too, as they were if `blocked`."""
    if not isinstance(kept, dict):
        return jnp.where(blocked, kept, now)
    return now | {name: _put_back(now[name], kept[name], blocked) for name in kept}


def _replace(model: Any, state: Any) -> None:
    from flax import nnx

    held = nnx.state(model)
    nnx.replace_by_pure_dict(held, state)
    nnx.update(model, held)


def _variables(tree: Any) -> list[Any]:
    from flax import nnx

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)]


def _arrays(opt_state: Any) -> Any:
    """The optimizer's state with arrays in place of NNX's variables."""
    from flax import nnx

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return jax.tree.map(
        lambda x: x[...] if is_variable(x) else x, opt_state, is_leaf=is_variable
    )
