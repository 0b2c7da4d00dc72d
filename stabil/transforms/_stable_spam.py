"""Stable-SPAM: AdaClip, AdaFN and Adam with a periodic momentum reset."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import (
    _adaptive_norm,
    _check,
    _leafwise,
    _leaves,
)
from stabil.transforms._descend import descend
from stabil.transforms._stable_spam_step import (
    Clock,
    Leaf,
    Parity,
    Rates,
    decay_scale,
    step,
)


class ScaleByStableSpamState(NamedTuple):
    """State of `scale_by_stable_spam`.

    Attributes:
      steps: int32 scalar, updates since the run began; never restarts.
      age: int32 `[leaves]`, steps since the leaf's newest reset; 0 on that step.
      resets: int32 `[leaves]`, resets of each leaf.
      mu: first moments, like params.
      nu: second moments, real, like params.
      spike_max: average of the largest entry, one scalar per tensor or layer.
      norm_mean: average of the norm, likewise.
      norm_square_mean: average of the squared norm, likewise.
      samples: int32, gradients in these averages, likewise.
    """

    steps: jax.Array
    age: jax.Array
    resets: jax.Array
    mu: Any
    nu: Any
    spike_max: Any
    norm_mean: Any
    norm_square_mean: Any
    samples: Any


def scale_by_stable_spam(
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    gamma3: float = 0.999,
    every_steps: int = 1000,
    warmup_steps: int = 40,
    total_steps: int | None = None,
    eta_min: float = 0.5,
    stacked: _leaves.Paths = (),
    parity: Parity = "",
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction of the gradient after AdaClip and AdaFN, with momentum reset.

    Per tensor: AdaClip with `gamma3` (see `scale_by_adaclip`), AdaFN with `gamma1 s`
    and `gamma2` (see `scale_by_adafn`), then Adam with `beta1 s` and `beta2`; every
    `DeltaT` steps the moments and Adam's counter restart. With `total_T`,
    `s = eta_min + (1 - eta_min) (1 + cos(pi t / (total_T + 1))) / 2`, else 1.

    `parity="official"` does what the released code does. The default departs from it:
    (1) the statistics have their own counters: in the released code the reset also
    restarts theirs, which lifts AdaClip's threshold up to 500 times, so that it is off
    for hundreds of steps; (2) the reset happens on its own step, not one later with a
    step of the old moments under the corrections of step 1; (3) a tensor with a
    non-finite entry changes no statistic and no moment, and does not move; (4) after a
    reset the update warms up over `warmup_steps` as in SPAM, because even a clean
    restart begins with 4.4 times the usual step; (5) past `total_T` the decays stay at
    their end value and do not rise again; (6) moments are float32.
    `parity="pytorch_optimizer"` has (1) and (2), no warm-up, a shifted cosine, and
    leaves a tensor alone whose gradient is 0.

    Quiet gradients do not pass unchanged: the update is Adam's direction.

    Cost: two moments per parameter, two passes for maximum and norm; with sharded
    tensors two reductions each. Place: where `optax.scale_by_adam` stands. Does not:
    keep the scale of the gradient; judge whole steps, for which see `stabil.guard`.

    The signature is long because it holds every number of the released code.

    Args:
      b1: beta1, decay of the first moment; in [0, 1).
      b2: beta2, decay of the second moment; in [0, 1).
      eps: added to roots, of Adam's and of the norms' averages; > 0. Paper: 1e-8.
      gamma1: decay of the norm; in [0, 1), or -1 for `b1`. Paper: 0.7.
      gamma2: decay of the squared norm; in [0, 1). Paper: 0.9.
      gamma3: decay of the largest entry; in [0, 1). Paper: 0.999.
      every_steps: DeltaT, steps between resets; >= 1. Paper: 1000.
      warmup_steps: steps of warm-up after a reset; >= 0; no effect with `parity`.
      total_steps: total_T, >= 1, or None for constant decays.
      eta_min: s at the end of `total_steps`; in (0, 1]. Released code: 0.5.
      stacked: slash paths (globs or a predicate) of leaves whose first axis counts
        layers; each layer has its own statistics.
      parity: `""` for the cured method, `"official"`, or `"pytorch_optimizer"`.

    Returns:
      Transformation. `update` takes `controls` (`stabil.Controls`) and `reset_leaves`
      (bool `[leaves]`), both optional; either restarts moments ahead of the period.
      Updates keep shape and dtype. State: `ScaleByStableSpamState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_stable_spam()
      >>> update, _ = tx.update(jnp.array([1e-7, -2e-7]), tx.init(jnp.ones(2)))
      >>> print(update.round(2))
      [ 1. -1.]

    Source: Huang et al., Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit
    Adam, arXiv:2502.17055 v1; `galore_torch/stablespam.py` of TianjinYellow/StableSPAM.
    """
    name = "scale_by_stable_spam"
    gamma1 = b1 if gamma1 == -1 else gamma1
    _check.fraction(name, b1=b1, b2=b2, gamma1=gamma1, gamma2=gamma2, gamma3=gamma3)
    _check.positive(name, eps=eps, eta_min=eta_min)
    _check.at_least(name, 1, every_steps=every_steps, total_steps=total_steps or 1)
    _check.at_least(name, 0, warmup_steps=warmup_steps)
    if eta_min > 1:
        raise ValueError(f"{name}: needed 0 < eta_min <= 1, got {eta_min!r}")
    _leaves.one_of(name, ("", "official", "pytorch_optimizer"), parity=parity)
    rates = Rates(b1, b2, eps, (gamma1, gamma2, gamma3), parity)
    period = _leafwise.never(every_steps)

    def init(params: Any) -> ScaleByStableSpamState:
        def zeros(p: jax.Array) -> jax.Array:
            return jnp.zeros_like(p, p.dtype if parity else _leaves.wide(p))

        leaves = len(_leaves.measured(params))
        scalars = functools.partial(_adaptive_norm.per_tensor, params, stacked)
        return ScaleByStableSpamState(
            steps=jnp.zeros([], jnp.int32),
            age=jnp.full([leaves], -1, jnp.int32),
            resets=jnp.zeros([leaves], jnp.int32),
            mu=_leaves.like(params, zeros),
            nu=_leaves.like(params, lambda p: zeros(p).real),
            spike_max=scalars(),
            norm_mean=scalars(),
            norm_square_mean=scalars(),
            samples=scalars(_adaptive_norm.int_zeros),
        )

    def update(
        updates: Any,
        state: ScaleByStableSpamState,
        params: Any = None,
        *,
        controls: Any = None,
        reset_leaves: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaleByStableSpamState]:
        del params, extra
        grads = _leafwise.aligned(name, updates, _tree.measured_names(state.mu))
        steps = _leaves.one_more(state.steps)
        due = steps % period == 0
        flags = _leafwise.reset_flags(len(grads), controls, reset_leaves, due)
        age = jnp.where(flags, 0, _leaves.one_more(state.age))
        resets = state.resets + flags.astype(jnp.int32)
        dtype = _leaves.statistics_dtype(updates)
        scale = _leafwise.warmup_scale(age, 0 if parity else warmup_steps, dtype)
        scale = jnp.where(resets > 0, scale, jnp.ones([], dtype))
        clock = Clock(flags, state.age, age, scale)
        shrink = decay_scale(steps, total_steps, eta_min, parity, dtype)
        fields = [jax.tree.leaves(getattr(state, field)) for field in Leaf._fields]
        leaves = map(Leaf._make, zip(*fields, strict=True))
        rows = [
            step(g, leaf, Clock(*(c[i] for c in clock)), shrink, rates)
            for i, (g, leaf) in enumerate(zip(grads, leaves, strict=True))
        ]
        new = {
            field: jax.tree.unflatten(
                jax.tree.structure(getattr(state, field)), [row[1][j] for row in rows]
            )
            for j, field in enumerate(Leaf._fields)
        }
        state = ScaleByStableSpamState(steps=steps, age=age, resets=resets, **new)
        return _leaves.rebuild(updates, [row[0] for row in rows]), state

    return optax.GradientTransformationExtraArgs(init, update)


def stable_spam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    *,
    weight_decay: float = 0.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """The Stable-SPAM optimizer: `scale_by_stable_spam`, weight decay, learning rate.

    Weight decay acts on the parameters before the step, as in the released code and
    as in AdamW.

    Quiet gradients do not pass unchanged: this is a whole optimizer.

    Args:
      learning_rate: a number >= 0 or a schedule of the step.
      weight_decay: decoupled decay per unit of learning rate; >= 0.
      **options: arguments of `scale_by_stable_spam`, `parity` among them; others are
        refused.

    Returns:
      Transformation; `update` needs `params` when `weight_decay` is not 0.

    Raises:
      ValueError: a hyperparameter is out of range.
      TypeError: an unknown argument.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = stable_spam(1e-3, every_steps=500)
      >>> update, _ = tx.update(jnp.array([1.0, -2.0]), tx.init(jnp.ones(2)))
      >>> print(update.round(4))
      [-0.001  0.001]

    Source: as `scale_by_stable_spam`.
    """
    scale = scale_by_stable_spam(**options)
    return optax.chain(scale, descend("stable_spam", learning_rate, weight_decay))
