"""Which layer departs from its siblings, and which replica from the others.

Signals of a group (the same tensor of like layers, or the same number on all replicas)
are compared with each other at one step, on their logarithm, with no memory:

  r_i = x_i - median(x),  s = max(1.4826 median |r|, floor),  z_i = r_i / s

The median of few members is rough, so a group of fewer than four has no say.
"""

from __future__ import annotations

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
    table = _table(tuple(groups))
    padded = jnp.concatenate([x, jnp.full([1], jnp.nan, x.dtype)])[table]
    member = jnp.isfinite(padded)
    median = _median(padded, member)
    away = padded - median[:, None]
    spread = _MAD_TO_SD * _median(jnp.abs(away), member)
    scale = jnp.maximum(spread, floor)
    speaks = member & (jnp.sum(member, axis=1) >= _FEWEST)[:, None]
    # Back from the table of groups to the order of the signals.
    apart = jnp.zeros([x.shape[0] + 1], x.dtype)
    apart = apart.at[table].set(jnp.where(speaks, away, 0.0))[:-1]
    score = jnp.zeros([x.shape[0] + 1], x.dtype)
    score = score.at[table].set(jnp.where(speaks, away / scale[:, None], 0.0))[:-1]
    far = jnp.abs(apart) > jnp.log(jnp.asarray(ratio, x.dtype))
    return Agreement(score, apart, far & (jnp.abs(score) > threshold))


def _table(groups: tuple[int, ...]) -> np.ndarray:
    """Positions of the members of each group, padded with one past the last."""
    kinds = sorted(set(groups))
    members = [[i for i, g in enumerate(groups) if g == kind] for kind in kinds]
    widest = max(map(len, members), default=0)
    padded = [m + [len(groups)] * (widest - len(m)) for m in members]
    return np.array(padded, np.int32).reshape(len(kinds), widest)


def _median(x: jax.Array, member: jax.Array) -> jax.Array:
    """Median of the members in each row, by sorting: the others stand at the end."""
    ordered = jnp.sort(jnp.where(member, x, jnp.inf), axis=1)
    size = jnp.maximum(jnp.sum(member, axis=1), 1)
    low = jnp.take_along_axis(ordered, ((size - 1) // 2)[:, None], axis=1)
    high = jnp.take_along_axis(ordered, (size // 2)[:, None], axis=1)
    middle = (low + high)[:, 0] / 2
    return jnp.where(jnp.isfinite(middle), middle, 0.0)
