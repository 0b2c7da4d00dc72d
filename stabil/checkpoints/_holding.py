"""Digests of the leaves of a state that is being saved or read."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from stabil.checkpoints import _digest, _leaves, _processes
from stabil.checkpoints._digest import Digest

# A piece of an array, the shape of the whole, the index of the piece's first element.
Part = tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    # The loops of a digest let go of the interpreter; two threads fill two cores.
    return concurrent.futures.ThreadPoolExecutor(2, "stabil-digest")


def _on_host(x: jax.Array) -> bool:
    return all(d.platform == "cpu" for d in x.sharding.device_set)


def _data(value: Any) -> Any:
    is_key = isinstance(value, jax.Array) and _leaves.is_key(value)
    return jax.random.key_data(value) if is_key else value


def _parts(value: Any) -> list[Part]:
    """What this process answers for of a value in host memory, without a copy."""
    if isinstance(value, np.ndarray) and _processes.is_first():
        return [(value, value.shape, (0,) * value.ndim)]
    if not isinstance(value, jax.Array):
        return []
    return [
        (
            np.asarray(shard.data),
            value.shape,
            tuple(s.start or 0 for s in shard.index),
        )
        for shard in value.addressable_shards
        if shard.replica_id == 0
    ]


def _digest_of(parts: list[Part], finite: bool) -> Digest:
    total = _digest.ZERO
    for part in parts:
        total += _digest.digest_part(*part, finite=finite)
    return total


class Arrivals:
    """Digests of arrays that are being read, begun while others are still to come.

    A context manager: its threads end with it. Arrays on an accelerator are left to
    `hold`, which has one program for all of them.
    """

    def __init__(self) -> None:
        self._pool = _pool()
        # The array is kept beside its digest, so that its id stays its own.
        self._seen: dict[int, tuple[Any, concurrent.futures.Future[Digest]]] = {}

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, arrays: Iterable[jax.Array]) -> None:
        """Begins with the digests of arrays that have come."""
        for array in arrays:
            value = _data(array)
            if _on_host(value):
                job = self._pool.submit(_digest_of, _parts(value), False)
                self._seen[id(array)] = array, job

    def of(self, value: Any) -> Digest | None:
        """The digest of an array that was taken, waited for; None for any other."""
        _, job = self._seen.get(id(value), (None, None))
        return None if job is None else job.result()


def hold(
    values: list[Any], finite: bool = True, arrivals: Arrivals | None = None
) -> Callable[[], list[Digest]]:
    """Takes hold of the bytes of a state, so that they can be read after a donation.

    Arrays in host memory are kept by reference, which costs nothing and makes XLA
    copy instead of overwriting while they are held. Arrays on an accelerator are
    digested where they are; the work is queued before any later step.

    Args:
      values: leaves as they go to disk.
      finite: whether to count what is not finite.
      arrivals: has the digests of some of them, which do not count it.
    Returns:
      A function for another thread that gives one digest a leaf, in order; with
      several processes that of the parts that this one holds.
    """
    parts: list[list[Part]] = []
    known: dict[int, Digest] = {}
    remote: dict[int, jax.Array] = {}
    for n, value in enumerate(values):
        found = None if arrivals is None else arrivals.of(value)
        value = _data(value)
        parts.append([])
        if found is not None:
            known[n] = found
        elif isinstance(value, jax.Array) and not _on_host(value):
            # Of the whole array, wherever its parts are: one process says it.
            remote[n] = value
        else:
            parts[n] = _parts(value)
    table = _digest.digest_on_device(list(remote.values())) if remote else None

    def digests() -> list[Digest]:
        with _pool() as pool:
            found = list(pool.map(lambda held: _digest_of(held, finite), parts))
        parts.clear()
        if table is not None:
            for n, row in zip(remote, np.asarray(table), strict=True):
                if _processes.is_first():
                    found[n] = Digest(*(int(v) for v in row))
        for n, digest in known.items():
            found[n] = digest
        return found

    return digests
