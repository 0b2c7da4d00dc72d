"""Tells parameters that something other than the optimizer has changed.

A flipped bit, a faulty copy or an overwritten buffer leaves a finite parameter that no
update has made. What such a leaf puts out need not jump: a norm behind it hides it, and
a bias starts from nothing. Its own size jumps.

  damaged  <=>  r_t > 2 r + 8 c  or  r_t < r / 4 and r_t < r - 8 c

with r_t the root mean square of a sample of the leaf, r the last one that was believed
and c the largest of its recent changes, which fades by 2 % a step. A leaf is judged
once it has had a size for two steps, for a fall after 20. At the first step it is
judged by its size at `init`, and more carefully, since people put other parameters in;
at the second, where no change is known, by the sizes of all leaves:

  damaged  <=>  r_0 > 20 r_init > 0, while no other leaf's size has changed at all
  damaged  <=>  r_1 > 20 r_0 > 0, and above four times the largest leaf before

An update can do this too, where a learning rate leaps and a leaf is small; so the
refusal of finite sizes is bounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.vocabulary import Cause, Severity, Verdict

_ARMED_AFTER, _SETTLED_AFTER = 2, 20  # steps
_RECENT = 0.98
_LEAP = 8.0
_FALL = 0.25
_FIRST_LEAP, _OVER_ALL = 20.0, 4.0
_UNTOUCHED = 1e-5  # relative; another program adds up in another order


class ParameterSizes(NamedTuple):
    """What is remembered of G parameter leaves.

    Attributes:
      size: float32 `[G]`, the last believed root mean square of the leaf's sample; NaN
        before the first, where `init` saw only zeros or no values.
      change: float32 `[G]`, the largest recent change of `size`.
      sized_steps: int32 `[G]`, steps with a size above 0, up to 20.
      refused_in_a_row: int32 scalar, steps in a row that were refused for finite sizes.
    """

    size: jax.Array
    change: jax.Array
    sized_steps: jax.Array
    refused_in_a_row: jax.Array

    @classmethod
    def of(cls, params: Any) -> ParameterSizes:
        """No step was seen yet; every field has its own buffer."""
        leaves = [x for x in jax.tree.leaves(params) if _tree.is_measured(x)]
        size = jnp.full([len(leaves)], jnp.nan, jnp.float32)
        if leaves and not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            size = _sizes_at_init(leaves)
        return cls(
            size,
            jnp.zeros([len(leaves)], jnp.float32),
            jnp.zeros([len(leaves)], jnp.int32),
            jnp.zeros([], jnp.int32),
        )


def watch_parameters(
    state: ParameterSizes, params: Any, *, max_consecutive_steps: int
) -> tuple[jax.Array, jax.Array, ParameterSizes]:
    """Judges the parameters that a step was computed with.

    Args:
      state: what was seen so far.
      params: the parameters, or None where the caller has none: nothing is judged.
      max_consecutive_steps: refusals in a row before finite sizes are believed.

    Returns:
      Leaves bool `[G]` that are damaged, leaves bool `[G]` that are not finite, and the
      next state.
    """
    leaves = [x for x in jax.tree.leaves(params) if _tree.is_measured(x)]
    if len(leaves) != state.size.shape[0] or not leaves:
        nothing = jnp.zeros(state.size.shape, bool)
        return nothing, nothing, state
    x = _sizes(leaves)
    bad = jnp.isnan(x)
    moved = jnp.abs(x - state.size)
    armed = (state.sized_steps >= _ARMED_AFTER) & (state.size > 0)
    is_first = (state.sized_steps == 0) & (state.size > 0)
    leapt = armed & (moved > state.size + _LEAP * state.change)
    settled = state.sized_steps >= _SETTLED_AFTER
    fallen = (x < _FALL * state.size) & (moved > _LEAP * state.change)
    leapt |= settled & fallen
    is_second = (state.sized_steps == 1) & (x > _FIRST_LEAP * state.size)
    leapt |= is_second & (x > _OVER_ALL * jnp.nanmax(state.size))
    leapt = (leapt | is_first & _leapt_alone(state.size, x)) & ~bad
    patient = state.refused_in_a_row + 1 < max_consecutive_steps
    damaged = leapt & patient
    kept = bad | damaged
    # The first size is no change, and a leap that is believed after all is none.
    change = jnp.where(leapt | is_first | jnp.isnan(moved), 0.0, moved)
    sized = state.sized_steps + (x > 0).astype(jnp.int32)
    return (
        damaged,
        bad,
        ParameterSizes(
            size=jnp.where(kept, state.size, x),
            change=jnp.where(
                kept, state.change, jnp.maximum(_RECENT * state.change, change)
            ),
            sized_steps=jnp.where(
                kept, state.sized_steps, jnp.minimum(sized, _SETTLED_AFTER)
            ),
            refused_in_a_row=jnp.where(
                jnp.any(damaged), state.refused_in_a_row + 1, 0
            ).astype(jnp.int32),
        ),
    )


def _leapt_alone(before: jax.Array, now: jax.Array) -> jax.Array:
    """Leaves bool `[G]`: the one that leapt while all others stayed what they were."""
    same = jnp.abs(now - before) <= _UNTOUCHED * before
    same |= jnp.isnan(before) & (now == 0)
    alone = (jnp.sum(~same) == 1) & jnp.any(same & (now > 0))
    return alone & ~same & (now > _FIRST_LEAP * before)


@jax.jit
def _sizes_at_init(leaves: list[Any]) -> jax.Array:
    x = _sizes(leaves)
    return jnp.where(x > 0, x, jnp.nan)


def _sizes(leaves: list[Any]) -> jax.Array:
    """Root mean squares float32 `[G]`; NaN for a leaf that is not finite."""
    return jnp.sqrt(jnp.stack([_mean_square(leaf) for leaf in leaves]))


def with_parameters(verdict: Verdict, damaged: jax.Array, bad: jax.Array) -> Verdict:
    """The verdict of a step whose parameters were judged too.

    Parameters are named before all that follows from them. Their names stand at the end
    of `Vitals.signals`; `first` counts them from there: -2 is the last name.
    """
    if damaged.shape[0] == 0:
        return verdict
    wrong = damaged | bad
    any_wrong = jnp.any(wrong)
    flags = verdict.flags
    for cause, leaves in (
        (Cause.NONFINITE_PARAMETER, bad),
        (Cause.PARAMETER_LEAP, damaged),
    ):
        flags |= jnp.where(jnp.any(leaves), jnp.int32(cause), jnp.int32(0))
    at = jnp.argmax(wrong).astype(jnp.int32) - jnp.int32(wrong.shape[0] + 1)
    block = jnp.int32(Severity.BLOCK)
    return verdict._replace(
        flags=flags,
        severity=jnp.where(any_wrong, block, verdict.severity),
        first=jnp.where(any_wrong, at, verdict.first),
    )


def _mean_square(leaf: Any) -> jax.Array:
    """Of a few columns; NaN exactly when one of their entries is not finite."""
    x = _tree.columns(leaf)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    total = jnp.zeros([], jnp.float32)
    for part in parts:
        v = part.astype(jnp.float32)
        total += jnp.sum(v * v + (v - v))
    return total / max(x.size, 1)
