"""ZClip: clips a gradient norm by its z-score against running statistics."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms, _scaling

# The published code adds this to the norm that it divides by.
DIVISOR_EPS = 1e-6
# Norms within 2 % of each other are the same: the deviation never falls below this
# share of the mean.
DEVIATION_FLOOR = 0.02


class ZClipState(NamedTuple):
    """State of `zclip`; all scalars.

    Attributes:
      mean: float32; mu, running mean of the norms.
      variance: float32; sigma^2, running variance of the norms.
      collected_steps: int32; norms taken into the warm-up so far, then constant.
      outliers_in_a_row: int32; up to and including the newest step.
      run_mean: float32; mean of the norms of that run of outliers.
      run_squares: float32; sum of squared deviations from `run_mean`.
      level_shifts: int32; how often a run of outliers became the new level.
      z_score: float32; (n - mu) / sigma of the newest finite step, 0 in the warm-up.
      clip_factor: float32; what the step was multiplied by; 0 when it was not finite.
      norm: float32; L2 norm before clipping, of the newest finite step.
      threshold: float32; the norm that this step was clipped to, or would have been
        called an outlier above; 0 where there was none.
      clipped_steps: int32; finite steps that were scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    mean: jax.Array
    variance: jax.Array
    collected_steps: jax.Array
    outliers_in_a_row: jax.Array
    run_mean: jax.Array
    run_squares: jax.Array
    level_shifts: jax.Array
    z_score: jax.Array
    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


# Ten arguments: eight are the published class's own, two are the switch and the escape.
def zclip(
    *,
    z_threshold: float = 2.5,
    decay: float = 0.97,
    warmup_steps: int = 25,
    mode: Literal["reciprocal", "mean", "max"] = "reciprocal",
    max_norm: float | None = None,
    clip_factor: float = 1.0,
    eps: float = 1e-6,
    freeze_on_outlier: bool = False,
    max_consecutive_steps: int = 25,
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clips a norm that lies more than `z_threshold` deviations above its mean.

    z_t = (n_t - mu) / sigma. Above z_thres the gradient is scaled to the norm
    mu + z* sigma, with z* = z_thres^2 / z_t ("reciprocal"), 0 ("mean") or z_thres
    ("max"; the published code calls it "percentile"). That norm, or n_t if it was no
    outlier, enters: mu <- alpha mu + (1 - alpha) x, and likewise the variance.
    Quiet gradients do not pass unchanged: 1 to 2 steps in 100 of a steady run lie above
    2.5 deviations.

    Place: first in the chain, before a constant cap. Cost: one read of the gradient,
    one reduction over devices, thirteen scalars; the product runs on clipped steps
    only. Does not: find the tensor that spiked (one factor scales all of them), judge
    during the warm-up, or react to small norms.

    Args:
      z_threshold: z_thres; deviations, > 0.
      decay: alpha, memory of the statistics, per step; in [0, 1).
      warmup_steps: finite norms that seed mu and sigma, unclipped unless `max_norm` is
        given; >= 1.
      mode: the norm that an outlier is scaled to.
      max_norm: constant cap as well; None for none (the paper), 1.0 in its code.
      clip_factor: multiplies the norm that an outlier is scaled to, mean included.
      eps: added to sigma in z.
      freeze_on_outlier: keep outliers out of the statistics altogether.
      max_consecutive_steps: outliers in a row that become the new level; >= 1. The
        default is as many as seed the statistics at first.
      parity: True follows the published code to the letter, lock-up included.

    Returns:
      Transformation; updates keep shape and dtype. `update` takes the optional
      keywords `norms` (per-leaf norms of this very input, float32 `[leaves]`; leave it
      out behind another rule that scales) and `scale` (loss scale:
      statistics are those of the gradient divided by it). State: `ZClipState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = zclip(warmup_steps=2)
      >>> state = tx.init(jnp.ones(1))
      >>> for g in (1.0, 1.1, 1.05):
      ...     _, state = tx.update(jnp.array([g]), state)
      >>> updates, state = tx.update(jnp.array([50.0]), state)
      >>> print(bool(updates[0] < 1.2), int(state.clipped_steps))
      True 1

    Source: Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training, 2025,
    arXiv 2504.02507, with all defaults. We differ: (1) `max_consecutive_steps` outliers
    in a row become the statistics: after a lasting rise of 10 deviations the published
    rule clips every step for ever, as sigma falls to 0. (2) sigma is at least 2% of mu.
    (3) A non-finite step is zeros and changes no statistic; in the published code one
    NaN switches clipping off for good. (4) No constant cap by default. (5) The variance
    grows by alpha (1 - alpha) (x - mu)^2; measured from the new mean it is 3% low.
    """
    _check.positive("zclip", z_threshold=z_threshold, clip_factor=clip_factor)
    _check.positive("zclip", max_norm=1.0 if max_norm is None else max_norm)
    _check.fraction("zclip", decay=decay)
    _check.at_least("zclip", 1, warmup_steps=warmup_steps)
    _check.at_least("zclip", 1, max_consecutive_steps=max_consecutive_steps)
    _leaves.one_of("zclip", ("reciprocal", "mean", "max"), mode=mode)

    def judge(norm: jax.Array, state: ZClipState) -> tuple[jax.Array, ...]:
        mean, deviation = state.mean, jnp.sqrt(state.variance)
        if not parity:
            deviation = jnp.maximum(deviation, DEVIATION_FLOOR * mean)
        z = (norm - mean) / (deviation + eps)
        if mode == "reciprocal":
            target = mean + z_threshold * deviation / (z / z_threshold)
            target = target * clip_factor
        else:
            target = mean + deviation * (z_threshold if mode == "max" else 0.0)
        far = mean + z_threshold * deviation
        outlier = norm > far if mode == "max" else z > z_threshold
        outlier &= state.collected_steps >= warmup_steps
        return z, outlier, jnp.where(outlier, target, norm), far

    def learn(x: jax.Array, state: ZClipState) -> tuple[jax.Array, jax.Array]:
        n = state.collected_steps.astype(x.dtype)
        # In the warm-up the plain mean and variance of what was collected so far.
        plain = state.mean + (x - state.mean) / (n + 1)
        spread = (x - state.mean) * (x - plain)
        plain_variance = (n * state.variance + spread) / (n + 1)
        mean = decay * state.mean + (1 - decay) * x
        spread = jnp.square(x - mean) if parity else (x - state.mean) * (x - mean)
        variance = decay * state.variance + (1 - decay) * spread
        warm = state.collected_steps < warmup_steps
        return jnp.where(warm, plain, mean), jnp.where(warm, plain_variance, variance)

    def advance(
        norm: jax.Array, x: jax.Array, outlier: jax.Array, state: ZClipState
    ) -> ZClipState:
        mean, variance = learn(x, state)
        if freeze_on_outlier:
            mean = jnp.where(outlier, state.mean, mean)
            variance = jnp.where(outlier, state.variance, variance)
        run = jnp.where(outlier, state.outliers_in_a_row + 1, 0)
        size = jnp.maximum(run, 1).astype(norm.dtype)
        run_mean = state.run_mean + (norm - state.run_mean) / size
        spread = (norm - state.run_mean) * (norm - run_mean)
        run_mean = jnp.where(outlier, run_mean, 0)
        run_squares = jnp.where(outlier, state.run_squares + spread, 0)
        shift = (run >= max_consecutive_steps) & (not parity)
        warm = state.collected_steps < warmup_steps
        return state._replace(
            mean=jnp.where(shift, run_mean, mean),
            variance=jnp.where(shift, run_squares / size, variance),
            collected_steps=_leaves.one_more(state.collected_steps, warm),
            outliers_in_a_row=jnp.where(shift, 0, run),
            run_mean=jnp.where(shift, 0, run_mean),
            run_squares=jnp.where(shift, 0, run_squares),
            level_shifts=_leaves.one_more(state.level_shifts, shift),
        )

    def init(params: Any) -> ZClipState:
        zero = jnp.zeros([], _leaves.statistics_dtype(params))
        none = _leaves.zero_int()
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(
            ZClipState(
                zero,
                zero,
                none,
                none,
                zero,
                zero,
                none,
                zero,
                one,
                zero,
                zero,
                none,
                none,
            )
        )

    def update(
        updates: Any,
        state: ZClipState,
        params: Any = None,
        *,
        norms: Any = None,
        scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, ZClipState]:
        del params, extra_args
        dtype = state.mean.dtype
        if parity:
            norm = _published_norm(updates, dtype)
        else:
            norm = _norms.total_norm(_norms.leaf_norms(updates, norms)).astype(dtype)
            norm = _scaling.unscaled(norm, scale)
        z, outlier, x, far = judge(norm, state)
        warm = state.collected_steps < warmup_steps
        capped = x if max_norm is None else jnp.minimum(x, max_norm)
        # An official quirk: the cap is not part of what the statistics learn.
        new = advance(norm, x, outlier, state)
        if parity:
            finite = jnp.asarray(True)
            safe = jnp.where(norm > capped, capped / (norm + DIVISOR_EPS), 1.0)
            updates = _scaling.multiply(updates, safe)
            factor = safe
        else:
            finite = jnp.isfinite(norm)
            factor = jnp.where(finite, _scaling.ratio(capped, norm), 0)
            updates = _scaling.scale_tree(updates, factor, finite)
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        limit = jnp.where(outlier, capped, jnp.where(warm, 0, far))
        return updates, new._replace(
            z_score=jnp.where(finite, jnp.where(warm, 0, z), state.z_score),
            clip_factor=factor.astype(jnp.float32),
            norm=jnp.where(finite, norm, state.norm),
            threshold=jnp.where(finite, limit, state.threshold),
            clipped_steps=_leaves.one_more(state.clipped_steps, finite & (factor < 1)),
            nonfinite_steps=_leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _published_norm(tree: Any, dtype: Any) -> jax.Array:
    """The norm as the published code rounds it: each step in the first leaf's dtype."""
    leaves = _leaves.measured(tree)
    total = jnp.zeros([], dtype)
    if not leaves:
        return total
    info = jnp.finfo(leaves[0].dtype)

    def rounded(x: jax.Array) -> jax.Array:
        # A cast there and back may be optimised away; this is not.
        return jax.lax.reduce_precision(x, info.nexp, info.nmant)

    for norm in rounded(_norms.naive_norms(tree, dtype)):
        total = rounded(total + rounded(jnp.square(norm)))
    return rounded(jnp.sqrt(total))
