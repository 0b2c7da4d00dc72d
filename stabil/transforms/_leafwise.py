"""Leaf-by-leaf arithmetic that the optimizers share: dtypes, debiasing, warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree


def measured(tree: Any) -> list[jax.Array]:
    """The leaves that have a norm, in flattening order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if _tree.is_measured(x)]


def rebuild(tree: Any, new: list[jax.Array | None]) -> Any:
    """`tree` with its measured leaves replaced, None skipped; each keeps its dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    fresh = iter([x for x in new if x is not None])
    out = [
        next(fresh).astype(jnp.asarray(x).dtype) if _tree.is_measured(x) else x
        for x in leaves
    ]
    return jax.tree.unflatten(treedef, out)


def wide(x: jax.Array) -> Any:
    """Dtype to compute in: float32, or wider where the leaf is wider; keeps complex."""
    return jnp.promote_types(x.dtype, jnp.float32)


def real(dtype: Any) -> Any:
    """The real counterpart of an inexact dtype."""
    return jnp.finfo(dtype).dtype


def like(params: Any, make: Callable[[jax.Array], jax.Array]) -> Any:
    """A tree of the parameters' structure; leaves without a norm hold no array."""

    def one(p: Any) -> Any:
        return make(jnp.asarray(p)) if _tree.is_measured(p) else optax.MaskedNode()

    return jax.tree.map(one, params)


def abs_square(x: jax.Array) -> jax.Array:
    """`|x|**2`, real."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def debias(decay: Any, steps: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """`1 - decay**steps`, without the cancellation at `decay` near 1.

    Args:
      decay: Python number or array in [0, 1).
      steps: integer array, >= 0.
      dtype: dtype of the result.
    """
    if isinstance(decay, (int, float)):
        log = jnp.asarray(math.log(decay) if decay > 0 else -jnp.inf, dtype)
    else:
        log = jnp.log(decay.astype(dtype))
    # 0 * -inf is NaN: no step means no weight, whatever the decay.
    powers = jnp.where(steps > 0, steps.astype(dtype) * log, jnp.zeros([], dtype))
    return -jnp.expm1(powers)


def warmup_scale(
    age: jax.Array, warmup_steps: int, dtype: Any = jnp.float32, *, ahead: int = 0
) -> jax.Array:
    """SPAM's cosine warm-up after a reset: `0.01` at age 0, 1 from `warmup_steps` on.

    `s(c) = 1 - 0.99 (1 + cos(pi c / (N + 1))) / 2` for `c < N`, else 1.

    Args:
      age: int32, steps since the reset; 0 on the step of the reset.
      warmup_steps: N; 0 means no warm-up.
      dtype: dtype of the result.
      ahead: steps by which the cosine runs ahead of the age.
    """
    c = jnp.asarray(age)
    angle = (c + ahead).astype(dtype) * (math.pi / (warmup_steps + 1))
    scale = 1 - 0.99 * (1 + jnp.cos(angle)) / 2
    return jnp.where(c < warmup_steps, scale, jnp.ones([], dtype)).astype(dtype)


def scaled(scale: jax.Array, x: jax.Array) -> jax.Array:
    """`scale * x`; `x` itself, bit for bit, where `scale` is 1."""
    product = (x.astype(wide(x)) * scale.astype(wide(x))).astype(x.dtype)
    return jnp.where(scale == 1, x, product)


def aligned(where: str, updates: Any, names: tuple[str, ...]) -> list[Any]:
    """The gradient of each named leaf, or None where the tree holds none.

    By path and not by position: a gradient tree may hold None or `float0` where a
    parameter is frozen.
    """
    found = dict(zip(_tree.measured_names(updates), measured(updates), strict=True))
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ValueError(
            f"{where}: needed gradients of the parameters that init saw, got one at "
            f"{unknown[0]!r} more; call init again with these parameters"
        )
    return [found.get(name) for name in names]


def reset_flags(
    leaves: int, controls: Any, reset_leaves: Any, due: jax.Array
) -> jax.Array:
    """bool `[leaves]`: which leaves restart in this step.

    Args:
      leaves: how many measured leaves there are.
      controls: `stabil.Controls` or None.
      reset_leaves: bool `[leaves]` or scalar, or None.
      due: bool scalar, the period's own wish.
    """
    flags = jnp.broadcast_to(due, [leaves])
    if controls is not None:
        flags |= jnp.asarray(controls.reset_moments, bool)
    if reset_leaves is not None:
        flags |= jnp.asarray(reset_leaves, bool)
    return flags


def never(every_steps: int | None) -> int:
    """A period as an int32 that a step counter can reach, or not in any run."""
    largest = jnp.iinfo(jnp.int32).max
    return largest if every_steps is None else min(int(every_steps), int(largest))


def bounded(x: jax.Array) -> jax.Array:
    """`x` with entries beyond `LARGEST` brought to that size; squares then fit."""
    if jnp.iscomplexobj(x):
        return jax.lax.complex(bounded(x.real), bounded(x.imag))
    return jnp.clip(x, -_tree.LARGEST, _tree.LARGEST)


def widest(tree: Any) -> Any:
    """Real dtype for scalars that act on all leaves: float32, or the widest leaf's."""
    kinds = [real(wide(x)) for x in measured(tree)]
    return jnp.result_type(jnp.float32, *kinds) if kinds else jnp.float32


def check_choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """A word must be one of the known ones."""
    if value not in choices:
        raise ValueError(
            f"{where}: needed {name} to be one of {choices}, got {value!r}"
        )


class DecayAfterStepState(NamedTuple):
    """State of `decay_after_step`.

    Attributes:
      steps: int32 scalar, updates since the run began; a schedule reads it.
    """

    steps: jax.Array


def decay_after_step(
    learning_rate: optax.ScalarOrSchedule, weight_decay: float, *, skip_matrices: bool
) -> optax.GradientTransformationExtraArgs:
    """Decay as in SPAM's code: `p <- (p + update) (1 - lr wd)`; last in the chain.

    Args:
      learning_rate: the learning rate of the chain.
      weight_decay: wd.
      skip_matrices: whether leaves of two and more axes do not decay.
    """

    def init(params: Any) -> DecayAfterStepState:
        del params
        return DecayAfterStepState(jnp.zeros([], jnp.int32))

    def update(
        updates: Any, state: DecayAfterStepState, params: Any = None, **extra: Any
    ) -> tuple[Any, DecayAfterStepState]:
        del extra
        if params is None:
            raise ValueError(
                "spam: needed params for weight_decay, got None; write "
                "tx.update(grads, opt_state, params)"
            )
        schedule = callable(learning_rate)
        rate = learning_rate(state.steps) if schedule else learning_rate
        owners = _tree.measured_names(updates)
        named = dict(zip(_tree.measured_names(params), measured(params), strict=True))

        def decayed(u: jax.Array, p: jax.Array) -> jax.Array:
            if skip_matrices and u.ndim > 1:
                return u
            kind = wide(p)
            lost = jnp.asarray(rate, real(kind)) * weight_decay
            return u.astype(kind) - lost.astype(kind) * (p + u).astype(kind)

        new = [
            decayed(u, named[name])
            for name, u in zip(owners, measured(updates), strict=True)
        ]
        state = DecayAfterStepState(optax.safe_increment(state.steps))
        return rebuild(updates, new), state

    return optax.GradientTransformationExtraArgs(init, update)
