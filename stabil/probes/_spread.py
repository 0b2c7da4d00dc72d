"""Readings of tensors that may be spread over devices, and their one gathering.

A value is what is known of one tensor on one device: the packed quantities of what the
device holds, whether it is the first of those that hold the same part (1, 0, or
`SAME`), and the packed quantities of the groups that tell places, of the whole tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes import _read, _reduce, _shards
from stabil.probes._jaxprs import varying
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

    @property
    def parted(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of what a device holds, and of the whole tensor."""
        local = tuple(g for g in self.groups if not SUMS[g].placed)
        placed = tuple(g for g in self.groups if SUMS[g].placed)
        return local, (*_reduce.COUNTS, *placed) if placed else ()

    @property
    def owner_at(self) -> int:
        return _reduce.width(self.parted[0])

    def read(self, x: jax.Array) -> Any:
        """What `conclude` needs to know of a tensor."""
        if self.due is False:
            return None
        x = _read.as_real(lax.stop_gradient(x))
        if not _is_spread(x):
            return _read.read(x, self.groups, self.due)
        local, placed = self.parted
        rows = max(ROWS, -(-x.size // _reduce.LONGEST_ROW))
        read = functools.partial(_read_part, groups=local, rows=rows)
        quick, slow = _read.split(local)
        more = _reduce.width(slow) if slow else 0
        before = _reduce.width(quick) + 1 + more
        out = (before + _reduce.lines(quick) * (rows + 1),)

        def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            more = _reduce.accumulate(x, placed) if placed else jnp.zeros([0, 0])
            return _shards.on_shards(read, x, out=out), more

        if self.due is None:
            return both(x)
        shapes = jax.eval_shape(both, x)
        nan = functools.partial(jnp.full, fill_value=jnp.nan, dtype=jnp.float32)
        return lax.cond(
            self.due, both, lambda _: tuple(nan(s.shape) for s in shapes), x
        )

    def conclude(self, found: list[Any]) -> jax.Array:
        """The values of several tensors, float32 `[tensors, width]`."""
        if self.due is False:
            values = jnp.broadcast_to(self.nothing(), [len(found), self.nothing().size])
            return jnp.full_like(values, jnp.nan)
        whole = [i for i, f in enumerate(found) if isinstance(f, _read.Reading)]
        parts = [i for i, f in enumerate(found) if not isinstance(f, _read.Reading)]
        local, placed = self.parted
        told: list[jax.Array] = []
        if whole:
            packed = _read.conclude([found[i] for i in whole], self.groups)
            n, q = _reduce.unpack(packed, self.groups)
            own = jnp.full_like(n, SAME)[:, None]
            sides = [
                _reduce.pack(n, {g: q[g] for g in s}) for s in (local, placed) if s
            ]
            told += [jnp.concatenate([sides[0], own, *sides[1:]], axis=1)]
        by_rows: dict[int, list[int]] = {}
        for i in parts:
            by_rows.setdefault(found[i][0].shape[0], []).append(i)
        for same in by_rows.values():
            stack = jnp.stack([found[i][0] for i in same])
            conclude = functools.partial(_conclude_parts, groups=local)
            out = (len(same), self.owner_at + 1)
            values = _shards.on_shards(conclude, stack, out=out)
            if placed:
                more = _read.settle_alike([found[i][1] for i in same], placed)
                values = jnp.concatenate([values, more], axis=1)
            told.append(values)
        order = [*whole, *(i for same in by_rows.values() for i in same)]
        return _read.in_order(told, order)

    def nothing(self) -> jax.Array:
        """The value of a tensor without entries."""
        local, placed = self.parted
        more = [_reduce.nothing(placed)] if placed else []
        return jnp.concatenate([_reduce.nothing(local), jnp.full([1], SAME), *more])

    def merge(self, values: jax.Array) -> jax.Array:
        """From the values `[parts, ..., width]` of parts of a tensor to the whole's."""
        local, placed = self.parted
        at = self.owner_at
        one = _reduce.merge_packed(values[..., :at], local)
        own = jnp.max(values[..., at : at + 1], axis=0)
        if not placed:
            return jnp.concatenate([one, own], axis=-1)
        more = _reduce.merge_packed(values[..., at + 1 :], placed)
        return jnp.concatenate([one, own, more], axis=-1)

    def gather(
        self, values: jax.Array, per_device: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Packed quantities of `[rows, width]` values, over all devices and of each."""
        alone = self.due is False or _shards.devices() == 1
        if alone or varying(jax.typeof(values)):
            packed = self._packed(values)
            return packed, packed[None] if per_device else None
        mesh = _shards.explicit_mesh(values)
        more = per_device and mesh is None
        merge = functools.partial(_merge_parts, spread=self, more=more)
        out = (1 + more * _shards.devices(), *values.shape)
        told = self._packed(_shards.on_shards(merge, values, out=out))
        if not per_device:
            return told[0], None
        if mesh is None:
            return told[0], told[1:]
        return told[0], self._packed(_shards.stack_shards(values, mesh))

    def _packed(self, values: jax.Array) -> jax.Array:
        local, placed = self.parted
        at = self.owner_at
        n, parts = _reduce.unpack(values[..., :at], local)
        if placed:
            parts = {**parts, **_reduce.unpack(values[..., at + 1 :], placed)[1]}
        return _reduce.pack(n, parts)


def _is_spread(x: jax.Array) -> bool:
    """Whether other devices may hold other parts of a tensor."""
    aval = jax.typeof(x)
    if _shards.devices() == 1 or not x.size or varying(aval):
        return False
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    in_type = mesh is not None and not mesh.empty and mesh.explicit_axes
    return not in_type or _shards.explicit_mesh(x) is not None


def _read_part(
    axes: tuple[str, ...], cut: tuple[str, ...], x: jax.Array, *, groups: Any, rows: int
) -> jax.Array:
    """What was read of a part: told, owner, of other groups, sums; flat."""
    owner = jnp.float32(1 if axes else SAME)
    for axis in axes:
        if axis not in cut:
            owner = jnp.where(lax.axis_index(axis) == 0, owner, 0)
    quick, slow = _read.split(groups)
    found = _read.read_in_rows(x, quick, rows)
    more = [_reduce.settle(_reduce.accumulate(x, slow)[None], slow)[0]] if slow else []
    told = jnp.stack([*found.told, owner])
    return jnp.concatenate([told, *more, found.sums.reshape(-1)])


def _conclude_parts(
    axes: tuple[str, ...], cut: tuple[str, ...], flat: jax.Array, *, groups: Any
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
    cut: tuple[str, ...],
    values: jax.Array,
    *,
    spread: Spread,
    more: bool,
) -> jax.Array:
    """The values of the whole, then, with `more`, those of each device."""
    at = spread.owner_at
    mine = values[:, : at + 1]
    every = lax.all_gather(mine, axes) if axes else mine[None]
    # One device of those that hold the same; NaN did not run.
    first = (jnp.arange(len(every)) == 0)[:, None, None]
    own = jnp.where(every[..., at:] == SAME, first, every[..., at:] != 0)
    none = _reduce.nothing(spread.parted[0])
    packed = jnp.where(own, every[..., :at], none)
    whole = _reduce.merge_packed(packed, spread.parted[0])
    told = jnp.concatenate([whole, values[:, at:]], axis=1)[None]
    if not more:
        return told
    rest = jnp.broadcast_to(
        values[:, at + 1 :], (len(every), *values[:, at + 1 :].shape)
    )
    fill = jnp.full((_shards.devices() - len(every), *values.shape), jnp.nan)
    return jnp.concatenate([told, jnp.concatenate([every, rest], axis=2), fill])
