"""StableAdamW: AdamW whose learning rate each tensor cuts by its own update RMS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leaves, _norms
from stabil.transforms._descend import descend


class StableAdamWState(NamedTuple):
    """State of `scale_by_stable_adamw`.

    Attributes:
      accepted_steps: int32; finite steps, t of the debiasing.
      mu: m, a tree like the parameters; leaves without a norm hold no array.
      nu: v, likewise.
      rms: float32 `[leaves]`; RMS(g / sqrt(v)) of every tensor, before the limit.
      clip_factor: float32; the smallest 1 / max(1, RMS), 0 on a non-finite step.
      clipped_steps: int32; finite steps in which a tensor's learning rate was cut.
      nonfinite_steps: int32; steps that changed nothing.
    """

    accepted_steps: jax.Array
    mu: Any
    nu: Any
    rms: jax.Array
    clip_factor: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


Mask = Callable[[str], bool] | str | tuple[str, ...]


def scale_by_stable_adamw(
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    no_decay: Mask = (),
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The direction of StableAdamW, decay included: `stable_adamw` without the rate.

    See `stable_adamw` for the equations. A rate of -eta behind it makes the optimizer.
    Quiet gradients do not pass unchanged: this is an optimizer.

    Args:
      b1: beta_1; in [0, 1).
      b2: beta_2; in [0, 1).
      eps: added to sqrt(v); its square floors v in the RMS; > 0.
      weight_decay: lambda; needs `params` unless 0; >= 0.
      no_decay: patterns or predicate on slash paths of leaves that do not decay.
      parity: True lets a non-finite gradient into the moments, as the published codes.

    Returns:
      Transformation; updates keep shape and dtype. State: `StableAdamWState`.

    Raises:
      ValueError: a hyperparameter is out of range, or decay has no `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_stable_adamw(weight_decay=0.0)
      >>> print(tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0].round(3))
      [1. 1.]

    Source: see `stable_adamw`.
    """
    where = "scale_by_stable_adamw"
    _check.fraction(where, b1=b1, b2=b2)
    _check.positive(where, eps=eps)
    if not weight_decay >= 0:
        raise ValueError(f"{where}: needed weight_decay >= 0, got {weight_decay!r}")

    def init(params: Any) -> StableAdamWState:
        leaves = len(_leaves.measured(params))
        return StableAdamWState(
            _leaves.zero_int(),
            _leaves.wide_zeros(params),
            _leaves.real_like(params, 0.0),
            jnp.zeros([leaves], jnp.float32),
            jnp.ones([], jnp.float32),
            _leaves.zero_int(),
            _leaves.zero_int(),
        )

    def one(
        g: jax.Array,
        old: tuple[jax.Array, jax.Array],
        w: jax.Array | None,
        t: jax.Array,
        finite: jax.Array,
    ) -> tuple[jax.Array, ...]:
        m, v = old
        wide, dtype = _leaves.widened(g), v.dtype
        beta1, beta2 = _debiased(b1, t, dtype), _debiased(b2, t, dtype)
        m = _leaves.times(m, beta1) + _leaves.times(wide, 1 - beta1)
        square = jnp.square(_norms.magnitude(g, dtype))
        v = beta2 * v + (1 - beta2) * square
        # Selected before they are used, for the same reason as in `_spam_step`.
        m, v = jnp.where(finite, m, old[0]), jnp.where(finite, v, old[1])
        entries = max(1, v.size)
        rms = jnp.sqrt(jnp.sum(square / jnp.maximum(v, eps**2)) / entries)
        u = _leaves.times(m, 1 / (jnp.sqrt(v) + eps))
        if w is not None:
            u = u + _leaves.times(
                _leaves.widened(w).astype(u.dtype), weight_decay * _one(v)
            )
        return _leaves.times(u, 1 / jnp.maximum(rms, 1.0)), m, v, rms

    def update(
        updates: Any, state: StableAdamWState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, StableAdamWState]:
        del extra_args
        if params is None and weight_decay:
            raise ValueError(
                "needed the parameters for weight_decay, got None: write "
                "tx.update(grads, state, params)"
            )
        grads, mu, nu = map(_leaves.by_path, (updates, state.mu, state.nu))
        weights = _leaves.by_path(params)
        finite = jnp.all(jnp.isfinite(_norms.leaf_norms(updates))) | parity
        t = state.accepted_steps + 1
        steps, rms = {}, dict.fromkeys(nu, jnp.zeros([], jnp.float32))
        new_mu, new_nu = {}, {}
        for path, g in grads.items():
            decays = weight_decay and not _leaves.matches(
                no_decay, _tree.path_name(path)
            )
            w = weights[path] if decays else None
            u, m, v, size = one(g, (mu[path], nu[path]), w, t, finite)
            steps[path] = jnp.where(finite, u, jnp.zeros_like(u)).astype(g.dtype)
            new_mu[path], new_nu[path] = m, v
            rms[path] = size.astype(jnp.float32)
        rows = jnp.stack([*rms.values()]) if rms else state.rms
        least = 1 / jnp.maximum(jnp.max(rows, initial=0.0), 1.0)
        return _leaves.with_leaves(updates, steps), StableAdamWState(
            _leaves.one_more(state.accepted_steps, finite),
            _leaves.with_leaves(state.mu, new_mu),
            _leaves.with_leaves(state.nu, new_nu),
            jnp.where(finite, rows, state.rms),
            jnp.where(finite, least, 0.0),
            _leaves.one_more(state.clipped_steps, finite & (least < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def stable_adamw(
    learning_rate: Any = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    no_decay: Mask = (),
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose learning rate each tensor divides by its update RMS above 1.

    b_t = b (1 - b^(t-1)) / (1 - b^t) for both betas;
    m <- b1_t m + (1 - b1_t) g;  v <- b2_t v + (1 - b2_t) g^2;
    RMS = sqrt(mean(g^2 / max(v, eps^2))) per tensor;  eta_t = eta / max(1, RMS);
    w <- w (1 - eta_t lambda) - eta_t m / (sqrt(v) + eps).
    Quiet gradients do not pass unchanged: this is an optimizer.

    Place: a complete optimizer. Cost: AdamW's, and one scalar reduction a tensor. Does
    not: keep a spike out of m, which acts for about 10 more steps; cut a rate below
    sqrt(1 - beta_2) of itself, as v holds the current g; or see one huge coordinate in
    a large tensor.

    Args:
      learning_rate: eta, a number or an Optax schedule.
      b1: beta_1; in [0, 1).
      b2: beta_2; in [0, 1).
      eps: added to sqrt(v); its square floors v in the RMS; > 0.
      weight_decay: lambda; >= 0.
      no_decay: patterns or predicate on slash paths of leaves that do not decay.
      parity: True lets a non-finite gradient into the moments, as the published codes.

    Returns:
      Transformation; updates keep shape and dtype; the moments are float32 (or 64).

    Raises:
      ValueError: a hyperparameter is out of range, or decay has no `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = stable_adamw(0.1)
      >>> w = jnp.ones(2)
      >>> print(tx.update(jnp.ones(2), tx.init(w), w)[0].round(3))
      [-0.101 -0.101]

    Source: Wortsman et al., Stable and low-precision training for large-scale
    vision-language models, 2023, arXiv 2304.13013; betas, eps and decay of the optimi
    package (pytorch-optimizer: eps 1e-8). We differ: (1) a non-finite gradient changes
    neither moments nor parameters, and t does not advance.
    """
    scale = scale_by_stable_adamw(
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        no_decay=no_decay,
        parity=parity,
    )
    rate = descend("stable_adamw", learning_rate, 0.0)
    return optax.with_extra_args_support(optax.chain(scale, rate))


def _one(x: jax.Array) -> jax.Array:
    return jnp.ones([], x.dtype)


def _debiased(b: float, t: jax.Array, dtype: Any) -> jax.Array:
    t = t.astype(dtype)
    # 1 - b^t by expm1: the plain difference loses digits while t is small.
    log = jnp.log(jnp.asarray(b, dtype)) if b else jnp.asarray(-jnp.inf, dtype)
    ahead = jnp.where(t > 1, -jnp.expm1(jnp.maximum(t - 1, 1) * log), 0)
    return b * ahead / -jnp.expm1(t * log)
