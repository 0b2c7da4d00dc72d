"""AdaGC: clips every tensor against the running norm of its own clipped gradient."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms, _scopes
from stabil.transforms._adagc_rules import AdaGCState, Rule


# Ten arguments: the four constants of the paper, eps of its code, three that say what
# a tensor is, the escape and the switch.
def adagc(
    *,
    lambda_rel: float = 1.04,
    lambda_abs: float = 1.0,
    decay: float = 0.99,
    warmup_steps: int = 100,
    eps: float = 1e-6,
    scope: Literal["tensor", "global"] = "tensor",
    stacked: _leaves.Paths = (),
    exclude: _leaves.Paths = (),
    max_consecutive_steps: int = 100,
    parity: Literal["official", "pytorch_optimizer"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Holds each tensor's gradient norm to `lambda_rel` times its running norm.

    In the first T_start steps: h = min(lambda_abs / ||g||, 1) for the whole tree, and
    gamma_i <- min(gamma_i, ||h g_i||). Then, per tensor:
    h_i = min(lambda_rel * gamma_i / ||g_i||, 1);  g_i <- h_i g_i;
    gamma_i <- beta gamma_i + (1 - beta) ||h_i g_i||.
    Quiet gradients do not pass unchanged: with the default lambda_rel half to four
    fifths of the steps are scaled (watch `clipped_share`), which Adam cancels and SGD
    does not; from 1.5 on the rule acts on spikes.

    Place: first in the chain. Cost: one read of the gradient, one stacked reduction
    over devices, four scalars a row; the product runs on clipped steps only. Does not:
    leave ordinary steps alone, or follow a falling norm faster than beta does.

    Args:
      lambda_rel: largest ratio of a norm to its gamma; > 0. 1.05 in version 1.
      lambda_abs: global limit in the warm-up; unit of the gradient, > 0.
      decay: beta, memory of gamma, per step; in [0, 1). 0.98 in version 1.
      warmup_steps: T_start; >= 0.
      eps: used by the parity rules only; here no division needs it.
      scope: "tensor", or "global" for one gamma of the joint norm.
      stacked: patterns (`blocks/*`) or predicate on slash paths; such leaves are
        `[layers, ...]`, as `scan` over layers makes them, and count as one tensor a
        layer.
      exclude: patterns or predicate; such leaves are neither measured nor clipped.
      max_consecutive_steps: steps in a row that cut a row to less than half, after
        which its gamma restarts at the least norm of that run; >= 1. The default is
        as many as the warm-up takes the first minimum over.
      parity: "official" or "pytorch_optimizer" follows that code to the letter.

    Returns:
      Transformation; updates keep shape and dtype. `update` takes the optional
      keywords `norms` (per-leaf norms of this very input, float32 `[leaves]`; leave it
      out behind another rule that scales) and `scale` (loss scale:
      gamma and limits are those of the gradient divided by it). State: `AdaGCState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = adagc(warmup_steps=1, lambda_rel=2.0)
      >>> g = {"a": jnp.ones(1), "b": jnp.full(1, 0.1)}
      >>> _, state = tx.update(g, tx.init(g))
      >>> print(tx.update({"a": jnp.ones(1), "b": jnp.ones(1)}, state)[0]["a"])
      [1.]

    Source: Wang et al., AdaGC: Enhancing LLM Pretraining Stability via Adaptive
    Gradient Clipping, 2025, arXiv 2502.11034; defaults of the released code
    (lambda_rel 1.04, beta 0.99, T_start 100, lambda_abs 1). We differ: (1) a norm of
    exactly 0 never enters gamma; in the released code one such norm in the warm-up
    makes the tensor's gradient 0 for ever. (2) The escape of `max_consecutive_steps`;
    the released rule takes 5,660 clipped steps to follow a norm times 10. (3) A
    non-finite step is zeros and changes no statistic; there it switches the tensor's
    clipping off for good. (4) A scaled norm is exactly at its limit; there 1e-6 below.
    """
    _check.positive("adagc", lambda_rel=lambda_rel, lambda_abs=lambda_abs)
    _check.fraction("adagc", decay=decay)
    _check.at_least("adagc", 0, warmup_steps=warmup_steps)
    _check.at_least("adagc", 1, max_consecutive_steps=max_consecutive_steps)
    _leaves.one_of("adagc", ("tensor", "global"), scope=scope)
    _leaves.one_of("adagc", (None, "official", "pytorch_optimizer"), parity=parity)
    rule = Rule(lambda_rel, lambda_abs, decay, eps)

    def init(params: Any) -> AdaGCState:
        layout = _norms.Layout(params, stacked, exclude)
        rows, dtype = (1 if scope == "global" else layout.total), layout.dtype
        zero, none = jnp.zeros([], dtype), _leaves.zero_int()
        row, one = jnp.zeros([rows], dtype), jnp.ones([], jnp.float32)
        counters = jnp.zeros([rows], jnp.int32)
        return _leaves.separate(
            AdaGCState(
                row,
                row > 0,
                counters,
                row,
                none,
                none,
                one,
                zero,
                zero,
                one * 0,
                none,
                none,
            )
        )

    def update(
        updates: Any,
        state: AdaGCState,
        params: Any = None,
        *,
        norms: Any = None,
        scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, AdaGCState]:
        del params, extra_args
        layout = _norms.Layout(updates, stacked, exclude)
        dtype = state.gamma.dtype
        plain = parity is not None
        rows, total = _scopes.measure(
            updates, layout, scope, dtype, plain=plain, norms=norms, scale=scale
        )
        warm = state.steps < warmup_steps - (parity == "pytorch_optimizer")
        if parity == "official":
            factors, new, limit = rule.official(rows, total, warm, state, scope)
        elif parity:
            factors, new, limit = rule.pytorch_optimizer(rows, total, warm, state)
        else:
            factors, new, limit = rule.cured(
                rows, total, warm, state, max_consecutive_steps
            )
        finite = jnp.isfinite(total) | plain
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        updates = _scopes.shrink(updates, layout, factors, finite, plain=plain)
        least = jnp.min(factors, initial=1.0)
        lowest = jnp.min(limit) if limit.size else jnp.zeros([], dtype)
        share = jnp.sum(factors < 1).astype(jnp.float32) / max(factors.size, 1)
        return updates, new._replace(
            steps=_leaves.one_more(state.steps, finite),
            clip_factor=jnp.where(finite, least, 0).astype(jnp.float32),
            norm=jnp.where(finite, total, state.norm),
            threshold=jnp.where(finite, lowest, state.threshold),
            clipped_share=jnp.where(finite, share, 0),
            clipped_steps=_leaves.one_more(state.clipped_steps, finite & (least < 1)),
            nonfinite_steps=_leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)
