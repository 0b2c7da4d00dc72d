"""SPAM: Adam that clips spiking coordinates and restarts its moments periodically."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leafwise, _leaves, _masks
from stabil.transforms._descend import descend
from stabil.transforms._spam_step import Clock, Rates, Times, read_clock, step

Parity = Literal["", "official", "pytorch_optimizer"]


class ScaleBySpamState(NamedTuple):
    """State of `scale_by_spam`.

    Attributes:
      steps: int32 scalar, updates since the run began; never restarts.
      age: int32 `[leaves]`, steps since the leaf's newest reset; 0 on that step.
      resets: int32 `[leaves]`, resets of each leaf.
      mu: first moments, like params.
      nu: second moments, real, like params.
      mask: bool, coordinates that may move; scalars where momentum is dense.
      clipped: float32 `[leaves]`, fraction of entries clipped in the newest step.
    """

    steps: jax.Array
    age: jax.Array
    resets: jax.Array
    mu: Any
    nu: Any
    mask: Any
    clipped: jax.Array


def scale_by_spam(
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    threshold: float = 5000.0,
    every_steps: int = 500,
    warmup_steps: int = 150,
    grace_steps: int = 20,
    density: float = 1.0,
    seed: int = 0,
    bias_correction: Literal["restart", "official", "none"] | None = None,
    parity: Parity = "",
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction with SPAM's spike clip, momentum reset and warm-up.

    Every `DeltaT` steps `m = v = 0`. Then, coordinate by coordinate,
    `g <- sign(g) sqrt(theta v)` where `g**2 > theta v`; `m` and `v` as in Adam from the
    clipped `g`; and the update is `s(c) m_hat / (sqrt(v_hat) + eps)`, where after a
    reset `s(c) = 1 - 0.99 (1 + cos(pi c / (N + 1))) / 2` warms up over `N` steps.

    `parity="official"` does what the released code does. The default departs from it:
    (1) a coordinate whose `v` is 0 is not clipped: the released code clips it to 0 and
    so freezes it until the next reset; (2) the clip compares with the debiased `v`, so
    that `theta` means the same number of deviations (70.7 for 5000) at every age;
    (3) the bias correction restarts with the moments: with a counter that goes on,
    updates grow up to 2.7 times after each reset; (4) a non-finite entry changes no
    moment and its coordinate does not move, and entries beyond 2.8e14 count as that;
    (5) moments are float32: in bfloat16 a second moment cannot decay; (6) the first
    mask of sparse momentum is drawn like the later ones. `parity="pytorch_optimizer"`
    is the official behaviour with that package's warm-up, which runs one step ahead.

    Quiet gradients do not pass unchanged: the update is Adam's direction.

    Cost: elementwise, no collective; two moments per parameter, and one bool with
    sparse momentum, which saves no memory here. Place: where `optax.scale_by_adam`
    stands. Does not: clip during the first `grace_steps` after a reset, which the
    warm-up covers; judge whole steps, for which see `stabil.guard`.

    The signature is long because it holds every number of the released code.

    Args:
      b1: decay of `m`; in [0, 1). Paper: 0.9.
      b2: decay of `v`; in [0, 1). Paper: 0.999.
      eps: added to the uncorrected `sqrt(v)`; > 0. Released code: 1e-6.
      threshold: theta, in squared root-mean-squares; > 0. Paper: 5000.
      every_steps: DeltaT, steps between resets; >= 1. Paper: 500.
      warmup_steps: N; >= 0. Paper: 150.
      grace_steps: steps after a reset without clipping; >= 0. Released code: 20.
      density: share of the coordinates of each matrix that keep moments and move;
        1 is dense, in (0, 1].
      seed: of the masks; masks are drawn from the seed, the cycle and the leaf.
      bias_correction: `"restart"`, `"official"` (counter never restarts) or `"none"`;
        None takes what `parity` implies.
      parity: `""` for the cured method, `"official"`, or `"pytorch_optimizer"`.

    Returns:
      Transformation. `update` takes `controls` (`stabil.Controls`) and `reset_leaves`
      (bool `[leaves]`), both optional; either restarts moments ahead of the period.
      Updates keep shape and dtype. State: `ScaleBySpamState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_spam(threshold=50.0, grace_steps=1)
      >>> state = tx.init(jnp.ones(2))
      >>> for g in ([1.0, -1.0], [1.0, -1.0], [1000.0, -1.0]):
      ...     update, state = tx.update(jnp.array(g), state)
      >>> print(state.clipped)  # of two entries, one was cut to sqrt(50)
      [0.5]
      >>> print(update.round(2))
      [ 0.78 -1.  ]

    Source: Huang et al., SPAM: Spike-Aware Adam with Momentum Reset, ICLR 2025,
    arXiv:2501.06842; `galore_torch/SPAM.py` of TianjinYellow/SPAM-Optimizer.
    """
    name = "scale_by_spam"
    _check.fraction(name, b1=b1, b2=b2)
    _check.positive(name, eps=eps, threshold=threshold, density=density)
    _check.at_least(name, 1, every_steps=every_steps)
    _check.at_least(name, 0, warmup_steps=warmup_steps, grace_steps=grace_steps)
    if density > 1:
        raise ValueError(f"{name}: needed 0 < density <= 1, got {density!r}")
    _leaves.one_of(name, ("", "official", "pytorch_optimizer"), parity=parity)
    faithful = parity != ""
    if bias_correction is None:
        bias_correction = "official" if faithful else "restart"
    _leaves.one_of(
        name, ("restart", "official", "none"), bias_correction=bias_correction
    )
    rates = Rates(b1, b2, eps, threshold, faithful, bias_correction != "none")
    period = _leafwise.never(every_steps)
    times = Times(period, warmup_steps, grace_steps, parity, bias_correction)

    def init(params: Any) -> ScaleBySpamState:
        def zeros(p: jax.Array) -> jax.Array:
            return jnp.zeros_like(p, p.dtype if faithful else _leaves.wide(p))

        def full(p: jax.Array) -> jax.Array:
            return jnp.ones(p.shape if density < 1 and p.ndim > 1 else (), bool)

        leaves = len(_leaves.measured(params))
        return ScaleBySpamState(
            steps=jnp.zeros([], jnp.int32),
            age=jnp.full([leaves], -1, jnp.int32),
            resets=jnp.zeros([leaves], jnp.int32),
            mu=_leaves.like(params, zeros),
            nu=_leaves.like(params, lambda p: zeros(p).real),
            mask=_masks.draw(_leaves.like(params, full), density, seed, 0),
            clipped=jnp.zeros([leaves], jnp.float32),
        )

    def update(
        updates: Any,
        state: ScaleBySpamState,
        params: Any = None,
        *,
        controls: Any = None,
        reset_leaves: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaleBySpamState]:
        del params, extra
        names = _tree.measured_names(state.mu)
        grads = _leafwise.aligned(name, updates, names)
        steps = _leaves.one_more(state.steps)
        due = steps % period == 0
        flags = _leafwise.reset_flags(len(names), controls, reset_leaves, due)
        dtype = _leaves.statistics_dtype(updates)
        clock = read_clock(state.age, state.resets, steps, flags, times, dtype)
        arrays = map(jax.tree.leaves, (state.mu, state.nu, state.mask))
        rows = [
            step(g, m, v, keep, Clock(*(x[i] for x in clock)), rates)
            for i, (g, m, v, keep) in enumerate(zip(grads, *arrays, strict=True))
        ]
        new, mu, nu, clipped = map(list, zip(*rows, strict=True)) if rows else ([],) * 4
        # A new mask is in force from the next reset on, so it is drawn a step before.
        turn = (steps + 1) % period == 0
        mask = _masks.redraw(turn, state.mask, density, seed, (steps + 1) // period)
        return _leaves.rebuild(updates, new), ScaleBySpamState(
            steps=steps,
            age=clock.age,
            resets=clock.resets,
            mu=jax.tree.unflatten(jax.tree.structure(state.mu), mu),
            nu=jax.tree.unflatten(jax.tree.structure(state.nu), nu),
            mask=mask,
            clipped=jnp.stack(clipped) if clipped else state.clipped,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def spam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    *,
    weight_decay: float = 0.0,
    parity: Parity = "",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """The SPAM optimizer: `scale_by_spam`, decoupled weight decay, learning rate.

    Quiet gradients do not pass unchanged: this is a whole optimizer.

    Weight decay acts on the parameters before the step, as in AdamW. With `parity` it
    acts after the step, `p <- p (1 - lr wd)`, as in the released code, and not on
    matrices with sparse momentum when `parity="official"`, where it has no effect.

    Args:
      learning_rate: a number >= 0 or a schedule of the step.
      weight_decay: decoupled decay per unit of learning rate; >= 0. Paper: 0.
      parity: as in `scale_by_spam`.
      **options: further arguments of `scale_by_spam`; others are refused.

    Returns:
      Transformation; `update` needs `params` when `weight_decay` is not 0.

    Raises:
      ValueError: a hyperparameter is out of range.
      TypeError: an unknown argument.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = spam(1e-3, weight_decay=0.1)
      >>> params = jnp.ones(2)
      >>> update, _ = tx.update(jnp.array([1.0, -2.0]), tx.init(params), params)
      >>> print(update.round(4))
      [-0.0011  0.0009]

    Source: as `scale_by_spam`.
    """
    scale = scale_by_spam(parity=parity, **options)
    decay = "after" if parity else "before"
    if parity == "official" and options.get("density", 1.0) < 1:
        decay = "after, not on matrices"
    return optax.chain(scale, descend("spam", learning_rate, weight_decay, decay=decay))
