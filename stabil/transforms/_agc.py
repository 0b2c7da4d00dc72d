"""Adaptive gradient clipping: each unit against the norm of its own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leaves, _norms, _scaling

# The published codes divide by at least this.
GRAD_FLOOR = 1e-6

Axes = Literal["in_out", "out_in"] | Callable[[str, int], tuple[int, ...]]


class AdaptiveGradientClipState(NamedTuple):
    """State of `adaptive_gradient_clip`; scalars of the newest step and counters.

    Attributes:
      clip_factor: float32; the smallest factor of any unit, 1 when none was clipped,
        0 when the step was not finite.
      norm: float32; L2 norm of the clippable leaves before clipping, of the newest
        finite step.
      threshold: float32; lambda.
      clipped_units: int32; units scaled down in this step.
      clipped_steps: int32; finite steps in which a unit was scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_units: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def adaptive_gradient_clip(
    clipping: Any = 0.01,
    *,
    eps: float = 1e-3,
    axes: Axes = "in_out",
    stacked: _leaves.Paths = (),
    exclude: _leaves.Paths = (),
    parity: Literal["optax", "pytorch_optimizer"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Bounds the gradient of every unit by a share of the norm of its weights.

    Per unit i, if ||G_i|| / max(||W_i||, eps) > lambda:
    G_i <- lambda * max(||W_i||, eps) / ||G_i|| * G_i.

    A unit is one output of a layer. Rank 0 and 1: the whole leaf. "in_out": rank 2
    and 3 reduce axis 0, higher ranks all axes but the last (HWIO kernels). "out_in":
    all axes after the first (the layout of PyTorch). Quiet gradients pass unchanged.

    Place: on the gradient, before momentum and weight decay; needs `params`. Cost: one
    read of gradient and parameters; no state that learns; no collective unless a
    reduced axis is sharded. Does not: notice a spike in a layer with large weights.

    Args:
      clipping: lambda, the largest ratio of gradient to weight norm; > 0.
      eps: floor of the weight norm, so that zero weights can leave zero; > 0.
      axes: "in_out", "out_in", or a function of slash path and rank that gives the
        axes to reduce, counted after the layer axis of a stacked leaf.
      stacked: patterns (`blocks/*`) or predicate on slash paths; such leaves are
        `[layers, ...]`, as `scan` over layers makes them, and each layer has its own
        units.
      exclude: patterns or predicate; such leaves pass unclipped. The paper leaves out
        the weights of the final classifier.
      parity: what becomes of a unit that holds a NaN. "optax", as DeepMind's and timm's
        code: all of it is NaN; "pytorch_optimizer": it passes unclipped; None: see (1).

    Returns:
      Transformation; updates keep shape and dtype. State: `AdaptiveGradientClipState`.

    Raises:
      ValueError: a hyperparameter is out of range, or `update` gets no `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = adaptive_gradient_clip(0.5)
      >>> w, g = jnp.ones((1, 2)), jnp.array([[0.25, 2.0]])
      >>> print(tx.update(g, tx.init(w), w)[0])
      [[0.25 0.5 ]]

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without
    Normalization, 2021, section 4; lambda = 0.01 for batches of 4096 and eps = 1e-3
    from there. We differ: (1) a non-finite entry makes the whole step zero and is
    counted. (2) Norms are taken in float32 and cannot overflow. (3) Rank 5 and more is
    allowed, and the layer axis of stacked leaves is never reduced.
    """
    where = "adaptive_gradient_clip"
    if not _leaves.is_traced(clipping):
        _check.positive(where, clipping=clipping)
    _check.positive(where, eps=eps)
    if not callable(axes):
        _leaves.one_of(where, ("in_out", "out_in"), axes=axes)
    _leaves.one_of(where, (None, "optax", "pytorch_optimizer"), parity=parity)
    reduced = axes if callable(axes) else _by_rank(axes)

    def init(params: Any) -> AdaptiveGradientClipState:
        dtype, zero = _leaves.statistics_dtype(params), _leaves.zero_int()
        limit = jnp.asarray(clipping).astype(jnp.float32)
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(
            AdaptiveGradientClipState(
                one, jnp.zeros([], dtype), limit, zero, zero, zero
            )
        )

    def update(
        updates: Any, state: AdaptiveGradientClipState, params: Any = None, **extra: Any
    ) -> tuple[Any, AdaptiveGradientClipState]:
        del extra
        if params is None:
            raise ValueError(
                "needed the parameters, got None: write tx.update(grads, state, params)"
            )
        dtype = state.norm.dtype
        limit = jnp.asarray(clipping).astype(dtype)
        layout = _norms.Layout(updates, stacked, exclude)
        norms, factors = [], []
        for name, x, w, is_stacked, used in zip(
            _tree.measured_names(updates),
            _leaves.measured(updates),
            _leaves.partners(updates, params),
            layout.stacked,
            layout.rows,
            strict=True,
        ):
            if not used:
                factors.append(jnp.ones((1,) * x.ndim, dtype))
                continue
            at = _axes(reduced, name, x.ndim, is_stacked)
            grad = _unit_norm(x, dtype, at, bool(parity))
            bound = jnp.maximum(_unit_norm(w, dtype, at, bool(parity)), eps) * limit
            norms.append(grad)
            factors.append(_factor(grad, bound, parity))
        state = state._replace(threshold=limit.astype(jnp.float32))
        return _finish(updates, state, norms, factors, parity)

    return optax.GradientTransformationExtraArgs(init, update)


def _by_rank(layout: str) -> Callable[[str, int], tuple[int, ...]]:
    def rule(name: str, rank: int) -> tuple[int, ...]:
        del name
        if rank < 2:
            return tuple(range(rank))
        if layout == "out_in":
            return tuple(range(1, rank))
        return (0,) if rank < 4 else tuple(range(rank - 1))

    return rule


def _axes(rule: Any, name: str, rank: int, is_stacked: bool) -> tuple[int, ...]:
    if not is_stacked:
        return rule(name, rank)
    return tuple(axis + 1 for axis in rule(name, rank - 1))


def _unit_norm(
    x: jax.Array, dtype: Any, axes: tuple[int, ...], naive: bool
) -> jax.Array:
    plain = jnp.sqrt(_norms.squares(x, dtype, axes))
    if naive:
        return plain
    due = jnp.any(jnp.isinf(plain))
    exact = jax.lax.cond(due, lambda: _norms.exact_norm(x, dtype, axes), lambda: plain)
    return jnp.where(jnp.isnan(plain), plain, exact)


def _factor(grad: jax.Array, bound: jax.Array, parity: str | None) -> jax.Array:
    # The two tests differ for a NaN only.
    kept = ~(grad > bound) if parity == "pytorch_optimizer" else grad < bound
    return jnp.where(kept, jnp.ones_like(grad), bound / jnp.maximum(grad, GRAD_FLOOR))


def _finish(
    updates: Any,
    state: AdaptiveGradientClipState,
    norms: list[jax.Array],
    factors: list[jax.Array],
    parity: str | None,
) -> tuple[Any, AdaptiveGradientClipState]:
    flat = [jnp.ravel(n) for n in norms]
    total = _norms.total_norm(jnp.concatenate(flat)) if flat else state.norm * 0
    finite = jnp.isfinite(total)
    # A unit exactly at its bound has a factor of 1 (or a rounding above) in the codes.
    factors = factors if parity else [jnp.minimum(f, 1.0) for f in factors]
    if parity:
        updates, given = _scaling.multiply(updates, factors), jnp.asarray(True)
    else:
        updates, given = _scaling.scale_rows(updates, factors, finite), finite
    least = [jnp.min(f, initial=1.0) for f in factors]
    least = jnp.min(jnp.stack(least)) if least else jnp.ones([], state.norm.dtype)
    units = sum((jnp.sum(f < 1, dtype=jnp.int32) for f in factors), _leaves.zero_int())
    clipped = given & (units > 0)
    return updates, AdaptiveGradientClipState(
        jnp.where(given, least, jnp.zeros_like(least)).astype(jnp.float32),
        jnp.where(finite, total.astype(state.norm.dtype), state.norm),
        state.threshold,
        jnp.where(given, units, 0),
        _leaves.one_more(state.clipped_steps, clipped),
        _leaves.one_more(state.nonfinite_steps, ~finite),
    )
