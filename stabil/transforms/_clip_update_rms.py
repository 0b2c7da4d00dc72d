"""Update clipping: an RMS above 1 divides the step of its tensor; and StableAdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil.transforms import _check, _leaves, _norms, _scaling


class ClipUpdateRmsState(NamedTuple):
    """State of `clip_update_rms`; scalars of the newest step and two counters.

    Attributes:
      clip_factor: float32; the smallest factor of any tensor, 0 when the step was not
        finite.
      norm: float32; the largest RMS of any tensor before clipping, of the newest
        finite step.
      threshold: float32; d.
      clipped_steps: int32; finite steps in which a tensor was scaled down.
      nonfinite_steps: int32; steps given out as zeros.
    """

    clip_factor: jax.Array
    norm: jax.Array
    threshold: jax.Array
    clipped_steps: jax.Array
    nonfinite_steps: jax.Array


def clip_update_rms(
    threshold: float = 1.0,
    *,
    stacked: _leaves.Paths = (),
    exclude: _leaves.Paths = (),
    parity: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Divides a tensor's update by its RMS where that exceeds `threshold`.

    Per tensor: U <- U / max(1, RMS(U) / d), RMS(U) = sqrt(mean(U^2)).
    Quiet gradients pass unchanged.

    Place: after the preconditioner, before the learning rate; after `scale_by_adam` it
    sees m / sqrt(v), and is then not StableAdamW, whose RMS is that of g / sqrt(v): for
    that use `stable_adamw`. Cost: one read of the update, one stacked reduction over
    devices. Does not: notice one huge coordinate in a large tensor.

    Args:
      threshold: d; dimensionless behind a preconditioner, > 0.
      stacked: patterns (`blocks/*`) or predicate on slash paths; such leaves are
        `[layers, ...]` and have an RMS a layer.
      exclude: patterns or predicate; such leaves pass unclipped.
      parity: True multiplies every tensor, as Optax does: a NaN makes its tensor NaN.

    Returns:
      Transformation; updates keep shape and dtype. State: `ClipUpdateRmsState`.

    Raises:
      ValueError: a hyperparameter is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clip_update_rms(1.0)
      >>> u = {"a": jnp.full(4, 2.0), "b": jnp.full(4, 0.5)}
      >>> updates, _ = tx.update(u, tx.init(u))
      >>> print(updates["a"], updates["b"])
      [1. 1. 1. 1.] [0.5 0.5 0.5 0.5]

    Source: Shazeer and Stern, Adafactor, 2018, arXiv 1804.04235, section 6, d = 1. We
    differ: (1) a non-finite step is zeros for the whole tree and is counted. (2) An
    update under the limit stays bit-identical. (3) Stacked layers have their own RMS.
    """
    _check.positive("clip_update_rms", threshold=threshold)

    def init(params: Any) -> ClipUpdateRmsState:
        zero, none = jnp.zeros([], _leaves.statistics_dtype(params)), _leaves.zero_int()
        one = jnp.ones([], jnp.float32)
        return _leaves.separate(
            ClipUpdateRmsState(one, zero, one * threshold, none, none)
        )

    def update(
        updates: Any, state: ClipUpdateRmsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ClipUpdateRmsState]:
        del params, extra_args
        layout = _norms.Layout(updates, stacked, exclude)
        if parity:
            norms = layout.gather(
                updates, lambda x, axes: jnp.sqrt(_norms.squares(x, layout.dtype, axes))
            )
        else:
            norms = layout.norms(updates)
        rms = norms / layout.gather(updates, _root_size)
        finite = jnp.all(jnp.isfinite(rms)) | parity
        if parity:
            rows = 1 / jnp.maximum(rms / threshold, 1.0)
            updates = _scaling.multiply(updates, layout.scatter(updates, rows))
        else:
            rows = _scaling.ratio(jnp.asarray(threshold, rms.dtype), rms)
            updates = _scaling.select_rows(
                updates, layout.scatter(updates, rows), finite
            )
        least = jnp.min(rows, initial=1.0)
        largest = jnp.max(rms, initial=0.0).astype(state.norm.dtype)
        return updates, ClipUpdateRmsState(
            jnp.where(finite, least, 0).astype(jnp.float32),
            jnp.where(finite, largest, state.norm),
            state.threshold,
            _leaves.one_more(state.clipped_steps, finite & (least < 1)),
            _leaves.one_more(state.nonfinite_steps, ~finite),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _root_size(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    entries = 1
    for axis in axes:
        entries *= x.shape[axis]
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    dtype = _leaves.statistics_dtype(x)
    return jnp.full(kept, float(entries), dtype) ** 0.5
