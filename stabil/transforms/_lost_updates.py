"""Counts updates that rounding swallows: a run that looks stable and learns nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leafwise, _leaves


class LostUpdatesState(NamedTuple):
    """State of `lost_updates`.

    Attributes:
      share: float32 `[leaves]`, of the newest update's nonzero entries, those that
        left their parameter as it was; 0 for an update of zeros.
      usual_share: float32 `[leaves]`, its running average.
      warn: bool scalar, whether the running average of any leaf is above the limit.
    """

    share: jax.Array
    usual_share: jax.Array
    warn: jax.Array


def lost_updates(
    *, limit: float = 0.5, decay: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    """Measures which share of the updates is lost to the parameters' rounding.

    An entry is lost when `u != 0` and `p + u`, rounded to the dtype of `p`, is `p`.
    In bfloat16 that is the case for any `|u| < |p| / 512`, so that a run with a small
    learning rate can stand still while every number looks healthy.

    Quiet gradients pass unchanged.

    Cost: one pass over parameters and updates. State: two numbers per leaf. Place: last
    in the chain, after the learning rate; `update` needs `params`. Does not: change
    an update, apart from entries that are not finite, which become 0; cure the loss,
    for which keep a float32 copy of the parameters or round stochastically.

    Args:
      limit: running share of a leaf above which `warn` is set; in (0, 1].
      decay: decay of the running share, per step; in [0, 1).

    Returns:
      Transformation; updates keep shape and dtype. State: `LostUpdatesState`.

    Raises:
      ValueError: a hyperparameter is out of range; at trace time, `params` is missing.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = lost_updates()
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> update = jnp.array([1e-3, 1e-1], jnp.bfloat16)
      >>> _, state = tx.update(update, tx.init(params), params)
      >>> print(state.share, state.warn)
      [0.5] False

    Source: ours.
    """
    name = "lost_updates"
    _check.positive(name, limit=limit)
    _check.fraction(name, decay=decay)
    if limit > 1:
        raise ValueError(f"{name}: needed 0 < limit <= 1, got {limit!r}")

    def init(params: Any) -> LostUpdatesState:
        leaves = len(_leafwise.by_path(params))
        return LostUpdatesState(
            share=jnp.zeros([leaves], jnp.float32),
            usual_share=jnp.zeros([leaves], jnp.float32),
            warn=jnp.zeros([], bool),
        )

    def update(
        updates: Any, state: LostUpdatesState, params: Any = None, **extra: Any
    ) -> tuple[Any, LostUpdatesState]:
        del extra
        if params is None:
            raise ValueError(
                f"{name}: needed params, whose rounding it measures, got None; write "
                "tx.update(grads, opt_state, params)"
            )
        found = {
            path: jnp.where(jnp.isfinite(u), u, jnp.zeros_like(u))
            for path, u in _leafwise.by_path(updates).items()
        }
        shares = [
            _share(p, found[path]) if path in found else jnp.zeros([], jnp.float32)
            for path, p in _leafwise.by_path(params).items()
        ]
        share = jnp.stack(shares) if shares else state.share
        usual = decay * state.usual_share + (1 - decay) * share
        return _leaves.rebuild(updates, list(found.values())), LostUpdatesState(
            share, usual, jnp.any(usual > limit)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _share(p: jax.Array, u: jax.Array) -> jax.Array:
    wide = _leaves.wide(p)
    moved = (p.astype(wide) + u.astype(wide)).astype(p.dtype)
    tried = u != 0
    lost = jnp.sum(tried & (moved == p)).astype(jnp.float32)
    return lost / jnp.maximum(jnp.sum(tried).astype(jnp.float32), 1.0)
