"""Which layer departs from its siblings, and which replica from the others.

Signals of a group (the same tensor of like layers, or the same number on all replicas)
are compared with each other at one step, on their logarithm, with no memory:

  r_i = x_i - median(x),  s = max(1.4826 median |r|, floor),  z_i = r_i / s

The median of few members is rough, so a group of fewer than four has no say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MAD_TO_SD = 1.482602218505602  # 1 / Phi^-1(3/4)
_FEWEST = 4


class Agreement(NamedTuple):
    """How far each signal stands from the other members of its group.

    Attributes:
      score: float32 `[S]`, robust standard deviations above (or below) the median of
        the group; 0 where there is no group to compare with.
      ratio: float32 `[S]`, log of the value over the median of the group; 0 likewise.
      departs: bool `[S]`, whether score and ratio are both beyond their thresholds.
    """

    score: jax.Array
    ratio: jax.Array
    departs: jax.Array


def groups_of(names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of groups, one per name; names that differ in digits alone are siblings.

    Examples:
      >>> groups_of(["block_0/mlp", "block_0/attn", "block_1/mlp", "head"])
      (0, 1, 0, 2)
    """
    kinds: dict[str, int] = {}
    numbers = []
    for name in names:
        kind = "".join("#" if c.isdigit() else c for c in name)
        while "##" in kind:
            kind = kind.replace("##", "#")
        numbers.append(kinds.setdefault(kind, len(kinds)))
    return tuple(numbers)


def agree(
    values: jax.Array,
    groups: Sequence[int],
    *,
    threshold: float = 8.0,
    ratio: float = 4.0,
    floor: float = 0.1,
) -> Agreement:
    """Compares every signal with the other members of its group.

    Args:
      values: float32 `[S]`, positive; others and those that are not finite are left
        out and do not depart.
      groups: one number per signal, static; see `groups_of`.
      threshold: robust standard deviations beyond which a member departs.
      ratio: times the group's median (or a part of it) that it must be apart too.
      floor: smallest standard deviation to believe; on the logarithm, so 0.1 is 10 %.

    Examples:
      >>> values = jnp.array([1.0, 1.1, 0.9, 1.0, 30.0, 7.0])
      >>> print(agree(values, (0, 0, 0, 0, 0, 1)).departs)
      [False False False False  True False]
    """
    usable = jnp.isfinite(values) & (values > 0)
    x = jnp.where(usable, jnp.log(jnp.where(usable, values, 1.0)), jnp.nan)
    return stand(x, groups, threshold=threshold, ratio=ratio, floor=floor)


def stand(
    x: jax.Array,
    groups: Sequence[int],
    *,
    threshold: float = 8.0,
    ratio: float = 4.0,
    floor: float = 0.1,
) -> Agreement:
    """What `agree` says of logarithms `[..., S]`; those not finite are left out."""
    far = math.log(ratio)
    table = _table(tuple(groups))
    if table.size == 0:
        nothing = jnp.zeros(x.shape, x.dtype)
        return Agreement(nothing, nothing, jnp.zeros(x.shape, bool))
    gap = jnp.full((*x.shape[:-1], 1), jnp.nan, x.dtype)
    padded = jnp.concatenate([x, gap], axis=-1)[..., table]
    member = jnp.isfinite(padded)
    away = padded - _median(padded, member)[..., None]
    spread = _MAD_TO_SD * _median(jnp.abs(away), member)
    scale = jnp.maximum(spread, floor)[..., None]
    speaks = member & (jnp.sum(member, axis=-1) >= _FEWEST)[..., None]

    def back(cells: jax.Array) -> jax.Array:
        """From the table of groups to the order of the signals."""
        spread_out = jnp.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
        return spread_out.at[..., table].set(jnp.where(speaks, cells, 0.0))[..., :-1]

    apart = back(away)
    score = back(away / scale)
    return Agreement(
        score, apart, (jnp.abs(apart) > far) & (jnp.abs(score) > threshold)
    )


def has_siblings(groups: Sequence[int]) -> bool:
    """Whether any group is large enough to speak."""
    return _table(tuple(groups)).size > 0


def _table(groups: tuple[int, ...]) -> np.ndarray:
    """Positions of the members of each group, padded with one past the last.

    Groups that are too small to speak have no row.
    """
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    large = [at for _, at in sorted(members.items()) if len(at) >= _FEWEST]
    widest = max(map(len, large), default=0)
    padded = [at + [len(groups)] * (widest - len(at)) for at in large]
    return np.array(padded, np.int32).reshape(len(large), widest)


def _median(x: jax.Array, member: jax.Array) -> jax.Array:
    """Median of the members in the last axis, by sorting: the others stand at the end.

    0 where there is none.
    """
    ordered = jnp.sort(jnp.where(member, x, jnp.inf), axis=-1)
    size = jnp.maximum(jnp.sum(member, axis=-1), 1)
    low = jnp.take_along_axis(ordered, ((size - 1) // 2)[..., None], axis=-1)
    high = jnp.take_along_axis(ordered, (size // 2)[..., None], axis=-1)
    middle = (low + high)[..., 0] / 2
    return jnp.where(jnp.isfinite(middle), middle, 0.0)
