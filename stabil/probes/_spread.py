"""Readings of tensors that may be spread over devices, and their one gathering.

A value is what is known of one tensor on one device: the packed quantities of what the
device holds, and whether it is the first of those that hold the same part (1, 0, or
`SAME`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes import _places, _read, _reduce, _shards
from stabil.probes._captured import Captured
from stabil.probes._jaxprs import varying
from stabil.probes._shards import Cut
from stabil.probes._sums import SUMS

SAME = 2.0  # in place of 1 and 0: every device has the value of the whole
ROWS = 512  # of a part of a tensor, whatever its size


@dataclasses.dataclass(frozen=True)
class Spread:
    """How to read tensors for `groups`, at steps that are `due`.

    Attributes:
      groups: names of `SUMS`, as of `_reduce.groups_of`.
      due: bool scalar, whether to read at all; None is always; a Python False never.
    """

    groups: tuple[str, ...]
    due: jax.Array | bool | None = None

    def read(self, x: jax.Array) -> Any:
        """What `conclude` needs to know of a tensor."""
        if self.due is False:
            return None
        x = _read.as_real(lax.stop_gradient(x))
        if not _is_spread(x):
            return _read.read(x, self.groups, self.due)
        rows = max(ROWS, -(-x.size // _reduce.LONGEST_ROW))
        captured = Captured(self.groups)
        read = functools.partial(
            _read_part, groups=self.groups, rows=rows, captured=captured
        )
        quick, slow = _read.split(self.groups)
        more = _reduce.width(slow) if slow else 0
        before = _reduce.width(quick) + 1 + more
        out = (before + _reduce.lines(quick) * (rows + 1),)
        same = tuple(captured.arrays)
        run = functools.partial(_shards.on_shards, read, out=out, same=same)
        if self.due is None:
            return run(x)
        nan = jnp.full(out, jnp.nan, jnp.float32)
        return lax.cond(self.due, run, lambda _: nan, x)

    def conclude(self, found: list[Any]) -> jax.Array:
        """The values of several tensors, float32 `[tensors, width]`."""
        if self.due is False:
            values = jnp.broadcast_to(self.nothing(), [len(found), self.nothing().size])
            return jnp.full_like(values, jnp.nan)
        whole = [i for i, f in enumerate(found) if isinstance(f, _read.Reading)]
        parts = [i for i, f in enumerate(found) if not isinstance(f, _read.Reading)]
        told: list[jax.Array] = []
        if whole:
            packed = _read.conclude([found[i] for i in whole], self.groups)
            own = jnp.full_like(packed[:, :1], SAME)
            told += [jnp.concatenate([packed, own], axis=1)]
        by_rows: dict[int, list[int]] = {}
        for i in parts:
            by_rows.setdefault(found[i].shape[0], []).append(i)
        for same in by_rows.values():
            stack = jnp.stack([found[i] for i in same])
            conclude = functools.partial(_conclude_parts, groups=self.groups)
            out = (len(same), _reduce.width(self.groups) + 1)
            told += [_shards.on_shards(conclude, stack, out=out)]
        order = [*whole, *(i for same in by_rows.values() for i in same)]
        return _read.in_order(told, order)

    def nothing(self) -> jax.Array:
        """The value of a tensor without entries."""
        return jnp.append(_reduce.nothing(self.groups), SAME)

    def merge(self, values: jax.Array) -> jax.Array:
        """From the values `[parts, ..., width]` of parts of a tensor to the whole's."""
        one = _reduce.merge_packed(values[..., :-1], self.groups)
        return jnp.concatenate([one, jnp.max(values[..., -1:], axis=0)], axis=-1)

    def gather(
        self, values: jax.Array, per_device: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Packed quantities of `[rows, width]` values, over all devices and of each."""
        alone = self.due is False or _shards.devices() == 1
        if alone or varying(jax.typeof(values)):
            packed = values[..., :-1]
            return packed, packed[None] if per_device else None
        mesh = _shards.explicit_mesh(values)
        more = per_device and mesh is None
        merge = functools.partial(_merge_parts, groups=self.groups, more=more)
        out = (1 + more * _shards.devices(), *values[:, :-1].shape)
        told = _shards.on_shards(merge, values, out=out)
        if not per_device:
            return told[0], None
        if mesh is None:
            return told[0], told[1:]
        return told[0], _shards.stack_shards(values, mesh)[..., :-1]


def _is_spread(x: jax.Array) -> bool:
    """Whether other devices may hold other parts of a tensor."""
    aval = jax.typeof(x)
    if _shards.devices() == 1 or not x.size or varying(aval):
        return False
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    in_type = mesh is not None and not mesh.empty and mesh.explicit_axes
    return not in_type or _shards.explicit_mesh(x) is not None


def _read_part(
    axes: tuple[str, ...],
    cut: Cut,
    x: jax.Array,
    *same: jax.Array,
    groups: Any,
    rows: int,
    captured: Captured,
) -> jax.Array:
    """What was read of a part: told, owner, of other groups, sums; flat."""
    owner = jnp.float32(1 if axes else SAME)
    for axis in axes:
        if not any(axis in along for along in cut):
            owner = jnp.where(lax.axis_index(axis) == 0, owner, 0)
    quick, slow = _read.split(groups)
    found = _read.read_in_rows(x, quick, rows)
    told = [jnp.stack([*found.told, owner])]
    if slow:
        with captured.given(same):
            more = _reduce.settle(_reduce.accumulate(x, slow)[None], slow)[0]
        whole = functools.partial(_shards.in_whole, shape=x.shape, cut=cut)
        size = x.size * _shards.parts_of(cut)
        told += [_placed(more, slow, lambda q: _places.within(q, whole, size))]
    return jnp.concatenate([*told, found.sums.reshape(-1)])


def _placed(
    packed: jax.Array, groups: tuple[str, ...], change: Callable[[Any], Any]
) -> jax.Array:
    """Packed quantities, those that tell places changed."""
    n, parts = _reduce.unpack(packed, groups)
    new = {g: change(parts[g]) for g in groups if SUMS[g].placed}
    return _reduce.pack(n, {**parts, **new})


def _conclude_parts(
    axes: tuple[str, ...], cut: Cut, flat: jax.Array, *, groups: Any
) -> jax.Array:
    quick, slow = _read.split(groups)
    at, lines = _reduce.width(quick), _reduce.lines(quick)
    end = at + 1 + (_reduce.width(slow) if slow else 0)
    sums = flat[:, end:].reshape(len(flat), lines, -1)
    settle = functools.partial(_reduce.settle, groups=quick)
    n, parts = _reduce.unpack(_read.choose(flat[:, :at], sums, settle), quick)
    more = _reduce.unpack(flat[:, at + 1 : end], slow)[1] if slow else {}
    packed = _reduce.pack(n, {**more, **parts})
    return jnp.concatenate([packed, flat[:, at : at + 1]], axis=1)


def _merge_parts(
    axes: tuple[str, ...],
    cut: Cut,
    values: jax.Array,
    *,
    groups: tuple[str, ...],
    more: bool,
) -> jax.Array:
    """What is known of the whole, then, with `more`, what each device told."""
    every = lax.all_gather(values, axes) if axes else values[None]
    packed, owner = every[..., :-1], every[..., -1:]
    # One device of those that hold the same; NaN did not run.
    first = (jnp.arange(len(every)) == 0)[:, None, None]
    own = jnp.where(owner == SAME, first, owner != 0)
    parts = _placed(packed, groups, _places.side_by_side)
    parts = jnp.where(own, parts, _reduce.nothing(groups))
    told = _reduce.merge_packed(parts, groups)[None]
    if not more:
        return told
    fill = jnp.full((_shards.devices() - len(every), *told.shape[1:]), jnp.nan)
    return jnp.concatenate([told, packed, fill])
