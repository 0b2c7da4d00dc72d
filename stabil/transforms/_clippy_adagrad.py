"""Adagrad with Clippy inside, as its paper trains."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _clippy, _leaves, _norms


class ClippyAdagradState(NamedTuple):
    """State of `clippy_adagrad`.

    Attributes:
      accumulator: G, sum of squared gradients, a tree like the parameters.
      clip_factor: float32; sigma, the smallest factor of any tensor, 0 when the step
        was not finite.
      factors: float32 `[leaves]`; sigma of every tensor.
      nonfinite_steps: int32; steps that changed nothing.
    """

    accumulator: Any
    clip_factor: jax.Array
    factors: jax.Array
    nonfinite_steps: jax.Array


def clippy_adagrad(
    learning_rate: float = 1e-3,
    *,
    lambda_rel: float = 0.5,
    lambda_abs: float = 1e-2,
    lambda_acc: float = 0.0,
    initial_accumulator: float = 0.1,
    eps: float = 1e-7,
    accumulate: Literal["before", "after", "clipped"] = "before",
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad whose step Clippy bounds, as the paper trains with it.

    G <- G + g^2;  r = g / sqrt(G + eps);
    sigma = min(1, min_j (lambda_rel |w_j| + lambda_acc / sqrt(G_j) + lambda_abs)
    / (eta |r_j|));  w <- w - eta sigma r, sigma per tensor.
    Quiet gradients do not pass unchanged: this is an optimizer.

    Place: a complete optimizer; needs `params`. Cost: one accumulator a parameter, and
    one read of it, the gradient and the parameters. Does not: decay weights.

    Args:
      learning_rate: eta; > 0.
      lambda_rel: largest change of a weight as a share of it; >= 0.
      lambda_abs: change that is always allowed; unit of the parameters, >= 0.
      lambda_acc: further allowance in units of 1 / sqrt(G); >= 0.
      initial_accumulator: G before the first step; >= 0.
      eps: added to G under the root.
      accumulate: g^2 enters G "before" the step (the paper), "after" it (the default of
        the released code), or "clipped" after it, with sigma * g.
      parity: True: one small weight may hold its tensor still, and NaN spreads.

    Returns:
      Transformation; updates keep shape and dtype. State: `ClippyAdagradState`.

    Raises:
      ValueError: a hyperparameter is out of range, or `update` gets no `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clippy_adagrad(1.0, lambda_abs=0.0)
      >>> w = jnp.ones(2)
      >>> print(tx.update(jnp.ones(2), tx.init(w), w)[0].round(3))
      [-0.5 -0.5]

    Source: as `clippy`; initial_accumulator and eps of the released code. We differ as
    `clippy` does: (1) with rho = 0.1; (2) a non-finite gradient changes nothing.
    """
    where = "clippy_adagrad"
    _check.positive(where, learning_rate=learning_rate)
    _clippy.check_bounds(where, lambda_rel=lambda_rel, lambda_abs=lambda_abs)
    _clippy.check_bounds(
        where, lambda_acc=lambda_acc, initial_accumulator=initial_accumulator
    )
    _leaves.one_of(where, ("before", "after", "clipped"), accumulate=accumulate)

    def init(params: Any) -> ClippyAdagradState:
        return ClippyAdagradState(
            _leaves.real_like(params, initial_accumulator),
            jnp.ones([], jnp.float32),
            jnp.ones([len(_leaves.measured(params))], jnp.float32),
            _leaves.zero_int(),
        )

    def one(
        g: jax.Array, w: jax.Array, total: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        dtype, axes = total.dtype, tuple(range(g.ndim))
        before = total + jnp.square(_norms.magnitude(g, dtype))
        used = before if accumulate == "before" else total
        root = jax.lax.rsqrt(used + eps)
        step = _leaves.times(_leaves.widened(g), learning_rate * root)
        size = _clippy.bound_size(w, dtype, axes, 0.0 if parity else 0.1, parity)
        bound = lambda_rel * size + lambda_acc * root + lambda_abs
        sigma = _clippy.shrink(step, bound, dtype, axes, parity)
        if accumulate == "clipped":
            before = total + jnp.square(sigma * _norms.magnitude(g, dtype))
        return -_leaves.times(step, sigma), before, sigma.reshape(())

    def update(
        updates: Any, state: ClippyAdagradState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClippyAdagradState]:
        del extra_args
        if params is None:
            raise ValueError(
                "needed the parameters, got None: write tx.update(grads, state, params)"
            )
        weights, totals = _leaves.by_path(params), _leaves.by_path(state.accumulator)
        finite = jnp.all(jnp.isfinite(_norms.leaf_norms(updates))) | parity
        # A frozen parameter may have no gradient; its row keeps a factor of 1.
        steps, kept, factors = {}, {}, dict.fromkeys(totals, jnp.ones([], jnp.float32))
        for path, g in _leaves.by_path(updates).items():
            u, new, sigma = one(g, weights[path], totals[path])
            steps[path] = jnp.where(finite, u, jnp.zeros_like(u)).astype(g.dtype)
            kept[path] = jnp.where(finite, new, totals[path])
            factors[path] = sigma.astype(jnp.float32)
        rows = jnp.stack([*factors.values()]) if factors else state.factors
        return _leaves.with_leaves(updates, steps), ClippyAdagradState(
            _leaves.with_leaves(state.accumulator, kept),
            jnp.where(finite, jnp.min(rows, initial=1.0), 0),
            jnp.where(finite, rows, state.factors),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)
