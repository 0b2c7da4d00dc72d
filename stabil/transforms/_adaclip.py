"""AdaClip of Stable-SPAM: bounds entries by the usual largest entry."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves
from stabil.transforms._adaptive_norm import (
    adaclip,
    int_zeros,
    per_leaf,
    per_tensor,
    prepare,
)


class ScaleByAdaclipState(NamedTuple):
    """State of `scale_by_adaclip`.

    Attributes:
      spike_max: average of the largest entry, one scalar per tensor or layer.
      samples: int32, samples in that average, likewise.
    """

    spike_max: Any
    samples: Any


def scale_by_adaclip(
    *,
    decay: float = 0.999,
    stacked: _leaves.Paths = (),
    parity: Literal["", "official"] = "",
) -> optax.GradientTransformationExtraArgs:
    """Stable-SPAM's AdaClip: bounds entries by the tensor's usual largest entry.

    `x = max|g|`; `M = gamma3 M + (1 - gamma3) x`; `T = M / (1 - gamma3^k)`; and where
    `|g_i| > T`, `g_i <- g_i / x * T`.

    `parity="official"` lets a non-finite entry into M, where it stays for ever. The
    default (1) keeps M and returns zeros for a tensor with a non-finite entry, and
    (2) counts samples per tensor, apart from any optimizer's counter: in the released
    code a momentum reset also resets k and so lifts T up to 500 times.

    Quiet gradients do not pass unchanged: the newest largest entry counts in T, so any
    entry above the usual one is brought down a little.

    Cost: one pass for the maximum; with sharded tensors one reduction each. State: one
    scalar and one counter per tensor. Place: before the optimizer. Does not: keep the
    order of entries; those just above T end below those just under it, as published.

    Args:
      decay: gamma3, per step; in [0, 1). Paper: 0.999.
      stacked: slash paths (globs or a predicate) of leaves whose first axis counts
        layers; each layer has its own T.
      parity: `""` or `"official"`.

    Returns:
      Transformation; updates keep shape and dtype. State: `ScaleByAdaclipState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_adaclip(decay=0.9)
      >>> state = tx.init(jnp.ones(3))
      >>> _, state = tx.update(jnp.array([1.0, -1.0, 0.5]), state)
      >>> print(tx.update(jnp.array([9.0, -1.0, 0.5]), state)[0].round(2))
      [ 5.21 -1.    0.5 ]

    Source: Huang et al., Stable-SPAM, arXiv:2502.17055 v1, section on AdaClip;
    `galore_torch/stablespam.py` of TianjinYellow/StableSPAM.
    """
    name = "scale_by_adaclip"
    _check.fraction(name, decay=decay)
    _leaves.one_of(name, ("", "official"), parity=parity)

    def init(params: Any) -> ScaleByAdaclipState:
        return ScaleByAdaclipState(
            per_tensor(params, stacked),
            per_tensor(params, stacked, int_zeros),
        )

    def one(g: jax.Array, top: jax.Array, samples: jax.Array) -> tuple:
        x, ok, samples = prepare(g, top, samples, parity != "")
        x, top = adaclip(x, top, ok, decay, jnp.maximum(samples, 1))
        return x, top, samples

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        del params, extra
        return per_leaf(name, updates, state, one)

    return optax.GradientTransformationExtraArgs(init, update)
