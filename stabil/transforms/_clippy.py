"""Clippy: bounds an update by the size of the weights that it changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _leaves, _norms, _scaling


class ClippyState(NamedTuple):
    """State of `clippy`; scalars of the newest step and two counters.

    Attributes:
      clip_factor: float32; sigma, the smallest factor of any tensor, 0 when the step
        was not finite.
      norm: float32; L2 norm of the update before clipping, of the newest finite step.
      threshold: float32; lambda_rel.
      clipped_steps: int32; finite steps in which a tensor was scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def clippy(
    *,
    lambda_rel: float = 0.5,
    lambda_abs: float = 1e-2,
    rms_floor: float = 0.1,
    stacked: _leaves.Paths = (),
    exclude: _leaves.Paths = (),
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Scales a tensor's update so that no weight moves by too large a share of itself.

    With the final update u (the learning rate is in it), per tensor:
    sigma = min(1, min_j (lambda_rel * max(|w_j|, rho * RMS(w)) + lambda_abs) / |u_j|);
    u <- sigma * u. Quiet gradients pass unchanged.

    Place: last in the chain, after the learning rate; needs `params`. Cost: one read of
    update and parameters, one stacked reduction over devices; no state that learns.
    Does not: keep a spike out of the moments. One coordinate sets the factor of its
    tensor, so larger tensors are clipped harder.

    Args:
      lambda_rel: largest change of a weight as a share of it; >= 0.
      lambda_abs: change that is always allowed; unit of the parameters, >= 0.
      rms_floor: rho; weights smaller than this share of the RMS of their tensor count
        as that share; >= 0.
      stacked: patterns (`blocks/*`) or predicate on slash paths; such leaves are
        `[layers, ...]` and have a factor a layer.
      exclude: patterns or predicate; such leaves pass unclipped. The paper leaves out
        embeddings.
      parity: True follows the published `shrink_by_references`: no rho, and a NaN makes
        the whole tensor NaN.

    Returns:
      Transformation; updates keep shape and dtype. State: `ClippyState`.

    Raises:
      ValueError: a hyperparameter is out of range, or `update` gets no `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clippy(lambda_rel=0.5, lambda_abs=0.0)
      >>> w, u = jnp.array([2.0, 1.0]), jnp.array([-1.0, 1.0])
      >>> print(tx.update(u, tx.init(w), w)[0])
      [-0.5  0.5]

    Source: Tang et al., Improving Training Stability for Multitask Ranking Models in
    Recommender Systems, 2023, arXiv 2302.09178; lambda_rel 0.5 and lambda_abs 1e-2 from
    there. The released code defaults to 0.1 and 1e-7. We differ: (1) `rms_floor`: with
    the released defaults one weight at 0 holds its whole tensor still (factor 1.5e-6).
    (2) A non-finite update is zeros for the whole tree and is counted; a non-finite
    weight counts as 0. (3) A tensor that needs no factor stays bit-identical.
    """
    check_bounds("clippy", lambda_rel=lambda_rel, lambda_abs=lambda_abs)
    check_bounds("clippy", rms_floor=rms_floor)
    floor = 0.0 if parity else rms_floor

    def init(params: Any) -> ClippyState:
        zero, none = jnp.zeros([], _leaves.statistics_dtype(params)), _leaves.zero_int()
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(ClippyState(one, zero, one * lambda_rel, none, none))

    def update(
        updates: Any, state: ClippyState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClippyState]:
        del extra_args
        if params is None:
            raise ValueError(
                "needed the parameters, got None: write tx.update(grads, state, params)"
            )
        layout = _norms.Layout(updates, stacked, exclude)
        weights = iter(_leaves.partners(updates, params))

        def factor(u: jax.Array, axes: tuple[int, ...]) -> jax.Array:
            w = next(chosen)
            bound = lambda_rel * bound_size(w, layout.dtype, axes, floor, parity)
            return shrink(u, bound + lambda_abs, layout.dtype, axes, parity)

        chosen = (w for w, r in zip(weights, layout.rows, strict=True) if r)
        rows = layout.gather(updates, factor)
        if parity:
            norm = jnp.sqrt(
                jnp.sum(jnp.square(_norms.naive_norms(updates, layout.dtype)))
            )
            finite = jnp.asarray(True)
            updates = _scaling.multiply(updates, layout.scatter(updates, rows))
        else:
            norm = _norms.total_norm(_norms.leaf_norms(updates))
            finite = jnp.isfinite(norm)
            updates = _scaling.select_rows(
                updates, layout.scatter(updates, rows), finite
            )
        least = jnp.min(rows, initial=1.0)
        return updates, ClippyState(
            jnp.where(finite, least, 0).astype(jnp.float32),
            jnp.where(finite, norm.astype(state.norm.dtype), state.norm),
            state.threshold,
            _leaves.one_more(state.clipped_steps, finite & (least < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def check_bounds(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{where}: needed {name} >= 0, got {value!r}")


def bound_size(
    w: jax.Array, dtype: Any, axes: tuple[int, ...], floor: float, naive: bool
) -> jax.Array:
    size = _norms.magnitude(w, dtype)
    if naive:
        return size
    size = jnp.where(jnp.isfinite(size), size, 0)
    norm = _norms.exact_norm(size, dtype, axes)
    entries = max(1, size.size // max(1, norm.size))
    return jnp.maximum(size, floor * norm / jnp.sqrt(jnp.asarray(entries, dtype)))


def shrink(
    u: jax.Array, bound: jax.Array, dtype: Any, axes: tuple[int, ...], naive: bool
) -> jax.Array:
    """sigma over `axes`, which are kept; the largest factor that fits the bound."""
    size = _norms.magnitude(u, dtype)
    safe = jnp.where(size == 0, jnp.ones_like(size), size)
    each = jnp.where(size == 0, jnp.ones_like(size), bound / safe)
    sigma = jnp.min(each, axis=axes, keepdims=True, initial=1.0)
    if naive:
        # XLA's minimum may lose a NaN among many entries.
        bad = jnp.any(jnp.isnan(each), axis=axes, keepdims=True)
        sigma = jnp.where(bad, jnp.nan, sigma)
    return sigma
