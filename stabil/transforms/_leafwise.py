"""Leaf-by-leaf arithmetic that the optimizers share: dtypes, debiasing, warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms._leaves import measured, wide


def real(dtype: Any) -> Any:
    """The real counterpart of an inexact dtype."""
    return jnp.finfo(dtype).dtype


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


def by_path(tree: Any) -> dict[str, jax.Array]:
    """The measured leaves under their slash paths, in flattening order."""
    return dict(zip(_tree.measured_names(tree), measured(tree), strict=True))


def when(due: jax.Array, change: Callable[[Any], Any], tree: Any) -> Any:
    """`change(tree)` where the scalar `due` holds, else the very arrays of `tree`.

    A loop of at most one turn and not a select: an optimizer before or after it
    compiles to the arithmetic that it has alone, and an idle step costs the test only.
    """

    def turn(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.zeros_like(carry[0]), change(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (due, tree))[1]


def scaled(leaves: list[jax.Array], scales: list[jax.Array], ok: jax.Array) -> Any:
    """Each leaf times its scale, and zeros where not `ok`.

    By two selects: of the forms tried, this one left idle steps bit-identical with the
    most optimizers and shapes, as it keeps XLA from contracting other products.

    Args:
      leaves: updates.
      scales: scalars, one per leaf; a leaf with scale 1 stays as it is.
      ok: bool scalar.
    """

    def one(x: jax.Array, scale: jax.Array) -> jax.Array:
        product = x.astype(wide(x)) * scale.astype(wide(x))
        kept = jnp.where(scale == 1, x, product.astype(x.dtype))
        return jnp.where(ok, kept, jnp.zeros_like(x))

    return [one(x, scale) for x, scale in zip(leaves, scales, strict=True)]


def aligned(where: str, updates: Any, names: tuple[str, ...]) -> list[Any]:
    """The gradient of each named leaf, or None where the tree holds none.

    By path and not by position: a gradient tree may hold None or `float0` where a
    parameter is frozen.
    """
    found = by_path(updates)
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ValueError(
            f"{where}: needed gradients of the parameters that init saw, got one at "
            f"{unknown[0]!r} more; call init again with these parameters"
        )
    return [found.get(name) for name in names]


def all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether every entry of every leaf is finite; bool scalar."""
    flags = [jnp.all(jnp.isfinite(x)) for x in leaves]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones([], bool)


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


def check_not_negative(where: str, **values: Any) -> None:
    """Each value must be a finite number of at least 0."""
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ValueError(f"{where}: needed a number {name} >= 0, got {value!r}")
