"""Clipping by the norm of the whole gradient, in float32 and safe from overflow."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _leaves, _norms, _scaling

# torch.nn.utils.clip_grad_norm_ adds this to the norm.
TORCH_EPS = 1e-6


class ClipByGlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`; scalars of the newest step and two counters.

    Attributes:
      clip_factor: float32; what the step was multiplied by, 1 when left alone, 0 when
        it was not finite.
      norm: float32; L2 norm before clipping, of the newest finite step.
      threshold: float32; the norm that it was held against.
      clipped_steps: int32; finite steps that were scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def clip_by_global_norm(
    max_norm: Any = 1.0,
    *,
    within: Literal["tree", "group"] = "tree",
    parity: Literal["optax", "torch"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales the gradient down to a norm of at most `max_norm`.

    n = sqrt(sum_i ||g_i||^2) over all leaves;  g_i <- g_i * min(1, c / n).
    Quiet gradients pass unchanged.

    Place: first in the chain. Cost: one read of the gradient for the norm, one
    reduction over devices; the product runs on clipped steps only. Does not: adapt,
    or tell a spike from a step.

    Args:
      max_norm: c, the largest norm that passes; unit of the gradient, >= 0. A traced
        scalar is accepted, as `optax.inject_hyperparams` hands one in.
      within: "tree" says that the norm of all parameters is meant, and warns when
        `init` finds masked leaves, because then it is the norm of a group; "group"
        says that a group is meant.
      parity: "optax" or "torch" follows that code to the letter, overflow and NaN
        included; None departs from both as numbered below.

    Returns:
      Transformation; updates keep shape and dtype. `update` takes the optional
      keywords `norms` (per-leaf norms of this very input, float32 `[leaves]`; leave it
      out behind another rule that scales)
      and `scale` (loss scale: the gradient at hand is `scale` times the true one, to
      which `max_norm` and the reported norm refer). State: `ClipByGlobalNormState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clip_by_global_norm(1.0)
      >>> g = {"x": jnp.array([3.0]), "y": jnp.array([4.0])}
      >>> updates, state = tx.update(g, tx.init(g))
      >>> print(updates["x"], updates["y"], state.norm)
      [0.6] [0.8] 5.0

    Source: Pascanu et al., On the difficulty of training recurrent neural networks,
    2013. The default c = 1 is common in large-model training. We differ: (1) the norm
    is taken in float32 whatever the leaves are; Optax sums bfloat16 squares in bfloat16
    and reads up to 72% low. (2) Squares that overflow are taken again, scaled by the
    largest entry, so a finite gradient has a finite norm. (3) A non-finite entry makes
    the whole step zero and is counted; it does not spread. (4) 0 / 0 gives 0. (5) A
    gradient under the limit stays bit-identical; torch multiplies by c / (n + 1e-6).
    """
    if not _leaves.is_traced(max_norm) and not max_norm >= 0:
        raise ValueError(f"clip_by_global_norm: needed max_norm >= 0, got {max_norm!r}")
    _leaves.one_of("clip_by_global_norm", ("tree", "group"), within=within)
    _leaves.one_of("clip_by_global_norm", (None, "optax", "torch"), parity=parity)

    def init(params: Any) -> ClipByGlobalNormState:
        if within == "tree":
            _warn_about_groups(params)
        dtype = _leaves.statistics_dtype(params)
        return _leaves.separate(
            ClipByGlobalNormState(
                jnp.ones([], jnp.float32),
                jnp.zeros([], dtype),
                jnp.asarray(max_norm).astype(dtype),
                _leaves.zero_int(),
                _leaves.zero_int(),
            )
        )

    def update(
        updates: Any,
        state: ClipByGlobalNormState,
        params: Any = None,
        *,
        norms: Any = None,
        scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, ClipByGlobalNormState]:
        del params, extra_args
        dtype = state.norm.dtype
        limit = jnp.asarray(max_norm).astype(dtype)
        if parity:
            updates, factor, norm = _published(updates, limit, parity, dtype)
            finite = jnp.asarray(True)
        else:
            at_hand = _norms.total_norm(_norms.leaf_norms(updates, norms)).astype(dtype)
            norm = _scaling.unscaled(at_hand, scale)
            finite = jnp.isfinite(norm)
            updates = _shrink(updates, norm, limit, finite)
            factor = jnp.where(finite, _scaling.ratio(limit, norm), 0)
        return updates, ClipByGlobalNormState(
            factor.astype(jnp.float32),
            jnp.where(finite, norm, state.norm),
            limit,
            _leaves.one_more(state.clipped_steps, finite & (factor < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _shrink(tree: Any, norm: jax.Array, limit: jax.Array, finite: jax.Array) -> Any:
    over = norm > limit
    unit = _norms.power_of_two_below(norm)
    # In two steps, as limit / norm may leave the range of float32.
    rest = limit * (unit / jnp.where(over, norm, jnp.ones_like(norm)))

    def change(i: int, x: jax.Array) -> jax.Array:
        y = _leaves.times(_leaves.times(x, 1 / unit), rest)
        return jnp.where(finite, jnp.where(over, y, x), jnp.zeros_like(x))

    return _scaling.rewrite_if(over | ~finite, tree, change)


def _published(
    tree: Any, limit: jax.Array, rule: str, dtype: Any
) -> tuple[Any, jax.Array, jax.Array]:
    norms = _norms.naive_norms(tree, dtype)
    norm = jnp.sqrt(jnp.sum(jnp.square(norms)))
    if rule == "torch":
        factor = jnp.minimum(limit / (norm + TORCH_EPS), jnp.ones_like(norm))
    else:
        factor = jnp.where(norm < limit, jnp.ones_like(norm), limit / norm)
    return _scaling.multiply(tree, factor), factor, norm


def _warn_about_groups(params: Any) -> None:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    masked = sum(isinstance(x, optax.MaskedNode) for x in leaves)
    if masked:
        warnings.warn(
            f"needed the whole tree, got one with {masked} of {len(leaves)} leaves "
            "masked: the norm is that of a group, and groups clipped one by one "
            "exceed the limit together; put clip_by_global_norm outside of masked and "
            'multi_transform, or write clip_by_global_norm(..., within="group")',
            UserWarning,
            stacklevel=3,
        )
