"""AutoClip: clips to a percentile of the gradient norms seen so far."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms, _scaling, _scopes
from stabil.transforms._window import Window

# torch.nn.utils.clip_grad_norm_, which the published codes call, adds this to the norm.
DIVISOR_EPS = 1e-6


class AutoClipState(NamedTuple):
    """State of `autoclip`.

    Attributes:
      history: `Window` of the norms before clipping, float32 `[rows, window]`; a row is
        the whole tree, or a tensor.
      clip_factor: float32; the smallest factor of any row, 0 on a non-finite step.
      norm: float32; joint L2 norm before clipping, of the newest finite step.
      threshold: float32; the smallest percentile of any row; 0 while there is none.
      clipped_steps: int32; finite steps that were scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    history: Window
    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def autoclip(
    *,
    percentile: float = 10.0,
    window: int = 1000,
    include_current: bool = True,
    scope: Literal["global", "tensor"] = "global",
    stacked: _leaves.Paths = (),
    exclude: _leaves.Paths = (),
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clips the gradient to a percentile of its own recent norms.

    Append n_t to the history G_h;  eta_c = p-th percentile of G_h (linear
    interpolation);  g <- g * min(1, eta_c / n_t).
    Quiet gradients do not pass unchanged: at p = 10 up to 90% of the steps are clipped;
    with a percentile of 99 the rule acts on spikes.

    Place: first in the chain. Cost: one read of the gradient, one reduction over
    devices, one sort of `window` numbers a row a step (about 1 ms for 1000 on a CPU);
    `window` floats a row of memory. Does not: tell spikes from ordinary
    steps, or name the tensor that spiked.

    Args:
      percentile: p; in [0, 100]. 10 in the paper.
      window: newest norms that are kept; steps, >= 1.
      include_current: whether n_t is in the history that it is held against.
      scope: "global" for one history of the joint norm, "tensor" for one a tensor.
      stacked: patterns or predicate on slash paths; with scope "tensor", such leaves
        `[layers, ...]` count as one tensor a layer.
      exclude: patterns or predicate; such leaves are neither measured nor clipped.
      parity: True follows the published code's arithmetic: eta_c / (n_t + 1e-6), and a
        NaN stays in the history.

    Returns:
      Transformation; updates keep shape and dtype. `update` takes the optional
      keywords `norms` (per-leaf norms of this very input, float32 `[leaves]`; leave it
      out behind another rule that scales) and `scale` (loss scale:
      the history holds norms divided by it). State: `AutoClipState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = autoclip(percentile=50.0)
      >>> state = tx.init(jnp.ones(1))
      >>> for n in (1.0, 1.0, 9.0):
      ...     updates, state = tx.update(jnp.array([n]), state)
      >>> print(updates)
      [1.]

    Source: Seetharaman et al., AutoClip: Adaptive Gradient Clipping for Source
    Separation Networks, 2020, arXiv 2007.14469. We differ: (1) the newest `window`
    norms instead of all, so memory is fixed and late norms are followed. The authors
    keep all, or 10,000 in their TensorFlow version; 1000 is the autoclip package's
    number. (2) A non-finite step is zeros and is not stored; there one NaN turns every
    later gradient into NaN. (3) A norm at or under eta_c passes bit-identical. The
    package autoclip 0.2.1 is `include_current=False` with its own numbers.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"autoclip: needed 0 <= percentile <= 100, got {percentile!r}")
    _check.at_least("autoclip", 1, window=window)
    _leaves.one_of("autoclip", ("global", "tensor"), scope=scope)

    def init(params: Any) -> AutoClipState:
        layout = _norms.Layout(params, stacked, exclude)
        rows = 1 if scope == "global" else layout.total
        zero, none = jnp.zeros([], layout.dtype), _leaves.zero_int()
        history = Window.empty(rows, window, dtype=layout.dtype)
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(AutoClipState(history, one, zero, zero, none, none))

    def limits(rows: jax.Array, history: Window) -> tuple[Window, jax.Array]:
        """The history with the newest norms, and the limit of each row."""
        finite = jnp.all(jnp.isfinite(rows)) | parity
        newest = history.push(rows, finite)
        used = newest if include_current else history
        eta = used.percentile(percentile)
        if parity:
            # A sort moves NaN behind everything; the published percentile is NaN.
            bad = jnp.any(used.valid() & jnp.isnan(used.values), axis=-1)
            eta = jnp.where(bad, jnp.nan, eta)
        return newest, jnp.where(used.filled > 0, eta, jnp.inf)

    def update(
        updates: Any,
        state: AutoClipState,
        params: Any = None,
        *,
        norms: Any = None,
        scale: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, AutoClipState]:
        del params, extra_args
        layout = _norms.Layout(updates, stacked, exclude)
        dtype = state.norm.dtype
        rows, total = _scopes.measure(
            updates, layout, scope, dtype, plain=parity, norms=norms, scale=scale
        )
        history, eta = limits(rows, state.history)
        finite = jnp.isfinite(total) | parity
        if parity:
            factors = jnp.minimum(eta / (rows + DIVISOR_EPS), 1.0)
        else:
            factors = _scaling.ratio(eta, rows)
        updates = _scopes.shrink(updates, layout, factors, finite, plain=parity)
        least = jnp.min(factors, initial=1.0)
        lowest = jnp.min(eta) if eta.size else jnp.zeros([], dtype)
        lowest = jnp.where(jnp.isinf(lowest), 0, lowest)
        return updates, AutoClipState(
            history,
            jnp.where(finite, least, 0).astype(jnp.float32),
            jnp.where(finite, total, state.norm),
            jnp.where(finite, lowest, state.threshold),
            _leaves.one_more(state.clipped_steps, finite & (least < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)
