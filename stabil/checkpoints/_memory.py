"""A ring of copies of the state in host memory: the first place to go back to.

The copies are explicit. `jax.device_get` on a CPU is a view, and a ring of views makes
XLA refuse to reuse donated buffers for as long as it is held.

A restore on a CPU copies nothing: it lends the ring's memory to the state. XLA owns no
lent memory, so a step that donates the state works on a copy, and the ring does not
write into what it has lent. So a snapshot may be restored again.

There are no digests. A restore lends memory in a hundredth of the time that a pass over
it takes, and memory that changes by itself changes the state that trains as well.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stabil.checkpoints import _digest, _leaves
from stabil.checkpoints._leaves import Leaf

# Pieces of an array by the index of their first element.
Pieces = dict[tuple[int, ...], np.ndarray]


@dataclasses.dataclass
class Snapshot:
    """A state in host memory.

    `values` holds what is not an array: the value of a Python leaf, the implementation
    of a PRNG key. `pieces` holds None for Python leaves. `lent` says that a restored
    state may still use the memory.
    """

    step: int
    leaves: list[Leaf]
    values: list[Any]
    pieces: list[Pieces | None]
    extra: str
    statistics: set[tuple[str, ...]]
    positions: dict[str, Any]
    tag: str = "pending"
    lent: bool = False

    def nonfinite(self) -> list[str]:
        """Names of the leaves that hold NaN or infinite entries."""
        bad = []
        for leaf, value, pieces in zip(
            self.leaves, self.values, self.pieces, strict=True
        ):
            if leaf.path in self.statistics:
                continue
            if pieces is None:
                count = leaf.dtype == "float" and not np.isfinite(value)
            else:
                count = sum(
                    _digest.count_nonfinite(p.reshape(-1)) for p in pieces.values()
                )
            if count:
                bad.append(leaf.name)
        return bad


def _shards(leaf: Leaf, value: Any) -> Pieces:
    if leaf.kind == "key":
        value = jax.random.key_data(value)
    if not isinstance(value, jax.Array):
        return {(0,) * np.ndim(value): np.asarray(value)}
    # On one process, one copy of each distinct part; a replica is not copied again.
    return {
        tuple(s.start or 0 for s in shard.index): np.asarray(shard.data)
        for shard in value.addressable_shards
    }


def _copy(source: Pieces, slot: Pieces | None) -> Pieces:
    """Copies pieces, into the memory of a dropped snapshot where that fits."""
    copied = {}
    for start, piece in source.items():
        old = slot.get(start) if slot else None
        if old is None or old.shape != piece.shape or old.dtype != piece.dtype:
            old = _aligned(piece.shape, piece.dtype)
        np.copyto(old, piece)
        copied[start] = old
    return copied


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _digest.ALIGNMENT, np.uint8)
    at = -raw.ctypes.data % _digest.ALIGNMENT
    return raw[at : at + size].view(dtype).reshape(shape)


def _assemble(pieces: Pieces, shape: tuple[int, ...]) -> np.ndarray:
    first = next(iter(pieces.values()))
    if len(pieces) == 1:
        return np.array(first)
    whole = np.empty(shape, first.dtype)
    for start, piece in pieces.items():
        where = zip(start, piece.shape, strict=True)
        whole[tuple(slice(s, s + n) for s, n in where)] = piece
    return whole


class Ring:
    """Keeps the last `size` snapshots.

    Args:
      size: snapshots kept; host memory of that many states; >= 0.
    """

    def __init__(self, size: int):
        self._size = size
        self._kept: list[Snapshot] = []
        # Forgotten snapshots, whose memory the next ones take over.
        self._spare: list[Snapshot] = []

    def take(
        self, step: int, state: Any, extra: dict[str, Any], positions: dict[str, Any]
    ) -> None:
        """Copies a state, dropping the oldest snapshot when the ring is full."""
        leaves, values, _ = _leaves.flatten(state)
        if not self._size:
            return
        self.drop_after(step - 1)
        while len(self._kept) >= self._size:
            self._forget(self._kept.pop(0))
        slot = self._spare.pop() if self._spare else None
        if slot is not None and slot.leaves != leaves:
            slot = None
        pieces: list[Pieces | None] = []
        for n, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if leaf.kind == "python":
                pieces.append(None)
            else:
                pieces.append(
                    _copy(_shards(leaf, value), slot.pieces[n] if slot else None)
                )
        other = [_not_array(x, v) for x, v in zip(leaves, values, strict=True)]
        text, statistics = json.dumps(extra), _leaves.statistics(state)
        self._kept.append(
            Snapshot(step, leaves, other, pieces, text, statistics, positions)
        )

    def _forget(self, snapshot: Snapshot) -> None:
        if not snapshot.lent and len(self._kept) + len(self._spare) < self._size:
            self._spare.append(snapshot)

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return next((s for s in self._kept if s.step == step), None)

    @property
    def newest(self) -> int | None:
        """Step of the newest snapshot."""
        return self._kept[-1].step if self._kept else None

    def healthy(self, before: int | None = None) -> list[int]:
        """Steps of the healthy snapshots, newest first."""
        steps = [s.step for s in self._kept if s.tag == "healthy"]
        return sorted((s for s in steps if before is None or s < before), reverse=True)

    def drop_after(self, step: int) -> None:
        """Forgets every snapshot that is newer than a step."""
        newer = [s for s in self._kept if s.step > step]
        self._kept = [s for s in self._kept if s.step <= step]
        for snapshot in newer:
            self._forget(snapshot)

    def restore(self, snapshot: Snapshot, abstract_state: Any) -> Any:
        """A state from the memory of the snapshot, which stays as it is.

        Raises:
          StructureError: the snapshot holds other leaves.
        """
        wanted, targets, treedef = _leaves.flatten(abstract_state)
        _leaves.compare(snapshot.step, snapshot.leaves, wanted)
        at = {leaf.path: n for n, leaf in enumerate(snapshot.leaves)}
        order = [at[leaf.path] for leaf in wanted]
        values: list[Any] = [None] * len(wanted)
        snapshot.lent = True
        whole: dict[int, tuple[np.ndarray, Any]] = {}
        for i, (n, target) in enumerate(zip(order, targets, strict=True)):
            saved, pieces = snapshot.leaves[n], snapshot.pieces[n]
            if pieces is None:
                values[i] = snapshot.values[n]
            elif saved.kind in ("numpy", "empty"):
                values[i] = _assemble(pieces, saved.shape)
            elif saved.kind == "key":
                values[i] = _key(saved, pieces, snapshot.values[n], target)
            elif len(pieces) == 1 and _sharding(target).is_fully_addressable:
                whole[i] = next(iter(pieces.values())), _sharding(target)
            else:
                values[i] = _from_parts(saved, pieces, target)
        if whole:
            arrays, shardings = zip(*whole.values(), strict=True)
            # One call for all is several times faster.
            placed = jax.device_put(list(arrays), list(shardings), may_alias=True)
            for i, value in zip(whole, placed, strict=True):
                values[i] = value
        restored = [
            _leaves.from_disk(snapshot.leaves[n], target, value)
            for n, target, value in zip(order, targets, values, strict=True)
        ]
        return jax.tree.unflatten(treedef, restored)


def _not_array(leaf: Leaf, value: Any) -> Any:
    if leaf.kind == "key":
        return jax.random.key_impl(value)
    return value if leaf.kind == "python" else None


def _sharding(target: Any) -> jax.sharding.Sharding:
    found = getattr(target, "sharding", None)
    return found or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _key(saved: Leaf, pieces: Pieces, implementation: Any, target: Any) -> jax.Array:
    tail = next(iter(pieces.values())).shape[-1]
    data = jnp.asarray(_assemble(pieces, (*saved.shape, tail)))
    keys = jax.random.wrap_key_data(data, impl=implementation)
    return jax.device_put(keys, _sharding(target))


def _from_parts(saved: Leaf, pieces: Pieces, target: Any) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or ()
        start = tuple(s.start or 0 for s in index)
        piece = pieces.get(start)
        extent = tuple(
            len(range(*s.indices(n))) for s, n in zip(index, saved.shape, strict=True)
        )
        if piece is not None and piece.shape == extent:
            return piece
        return _assemble(pieces, saved.shape)[index]

    return jax.make_array_from_callback(saved.shape, _sharding(target), part)
