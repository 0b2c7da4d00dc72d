"""AdaFN of Stable-SPAM, alone also GradientStabilizer: a steady norm per tensor."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves
from stabil.transforms._adaptive_norm import (
    adafn,
    int_zeros,
    per_leaf,
    per_tensor,
    prepare,
)


class ScaleByAdafnState(NamedTuple):
    """State of `scale_by_adafn` and `gradient_stabilizer`.

    Attributes:
      norm_mean: average of the norm, one scalar per tensor or layer.
      norm_square_mean: average of the squared norm, likewise.
      samples: int32, samples in those averages, likewise.
    """

    norm_mean: Any
    norm_square_mean: Any
    samples: Any


def scale_by_adafn(
    *,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    eps: float = 1e-8,
    stacked: _leaves.Paths = (),
    parity: Literal["", "official"] = "",
) -> optax.GradientTransformationExtraArgs:
    """Stable-SPAM's AdaFN (AdaGN in the paper): gives every tensor a steady norm.

    `n = ||g||_2`; `a = gamma1 a + (1 - gamma1) n`; `b = gamma2 b + (1 - gamma2) n^2`;
    `g <- g / n * a_hat / (sqrt(b_hat) + eps)`, both debiased; unchanged where `n = 0`.
    The norm that results is about 1: the absolute scale of each tensor is discarded.

    `parity="official"` lets a non-finite norm into the averages, where it stays for
    ever. The default (1) keeps the averages and returns zeros for a tensor with a
    non-finite entry, and (2) counts samples per tensor, apart from any optimizer's
    counter, which in the released code a momentum reset restarts.

    Quiet gradients do not pass unchanged: each tensor is brought to a norm near 1.

    Cost: one pass for the norm; with sharded tensors one reduction each. State: two
    scalars and one counter per tensor. Place: before the optimizer, after AdaClip.
    Does not: suit plain SGD, whose learning rate then loses its unit.

    Args:
      gamma1: decay of the norm, per step; in [0, 1). Paper: 0.7.
      gamma2: decay of the squared norm, per step; in [0, 1). Paper: 0.9.
      eps: added to the root of the squared norm's average; > 0. Paper: 1e-8.
      stacked: slash paths (globs or a predicate) of leaves whose first axis counts
        layers; each layer has its own norm.
      parity: `""` or `"official"`.

    Returns:
      Transformation; updates keep shape and dtype. State: `ScaleByAdafnState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_adafn()
      >>> state = tx.init(jnp.ones(2))
      >>> _, state = tx.update(jnp.array([3e-3, 4e-3]), state)
      >>> print(tx.update(jnp.array([30.0, 40.0]), state)[0].round(1))
      [0.5 0.6]

    Source: Huang et al., Stable-SPAM, arXiv:2502.17055 v1, section on AdaGN;
    `galore_torch/stablespam.py` of TianjinYellow/StableSPAM.
    """
    name = "scale_by_adafn"
    _check.fraction(name, gamma1=gamma1, gamma2=gamma2)
    _check.positive(name, eps=eps)
    _leaves.one_of(name, ("", "official"), parity=parity)

    def init(params: Any) -> ScaleByAdafnState:
        return ScaleByAdafnState(
            norm_mean=per_tensor(params, stacked),
            norm_square_mean=per_tensor(params, stacked),
            samples=per_tensor(params, stacked, int_zeros),
        )

    def one(g: jax.Array, a: jax.Array, b: jax.Array, samples: jax.Array) -> tuple:
        x, ok, samples = prepare(g, a, samples, parity != "")
        steps = jnp.maximum(samples, 1)
        x, (a, b), _ = adafn(x, (a, b), ok, (gamma1, gamma2), steps, eps)
        return x, a, b, samples

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        del params, extra
        return per_leaf(name, updates, state, one)

    return optax.GradientTransformationExtraArgs(init, update)


def gradient_stabilizer(
    *,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    eps: float = 1e-8,
    stacked: _leaves.Paths = (),
) -> optax.GradientTransformationExtraArgs:
    """GradientStabilizer: AdaFN alone, as a link before any optimizer.

    The third version of the Stable-SPAM paper keeps only the norm part, under this
    name. Its code is not released and its own defaults are not known to us; these are
    those of the first version. Everything else is as in `scale_by_adafn`.

    Quiet gradients do not pass unchanged: each tensor is brought to a norm near 1.

    Args:
      gamma1: decay of the norm, per step; in [0, 1).
      gamma2: decay of the squared norm, per step; in [0, 1).
      eps: added to the root of the squared norm's average; > 0.
      stacked: as in `scale_by_adafn`.

    Returns:
      Transformation; updates keep shape and dtype. State: `ScaleByAdafnState`.

    Examples:
      >>> import optax
      >>> tx = optax.chain(gradient_stabilizer(), optax.adam(1e-3))

    Source: GradientStabilizer: Fix the Norm, Not the Gradient, arXiv:2502.17055 v3.
    """
    return scale_by_adafn(gamma1=gamma1, gamma2=gamma2, eps=eps, stacked=stacked)
