"""Content digests of arrays: one number however the array is laid out.

Words are the bits of an array's elements in C order, 32 at a time; a narrower
element fills one word. Word `w` at position `i = 65536 * b + j` is mixed,
`m = mix(w)`, and a digest is the pair, modulo 2**32,

  first  = sum of m * (odd(j) * odd(b + 65536))
  second = sum of m * odd(b + 131072)

where `odd(n) = mix(n * 0x9E3779B1) | 1`. `mix` is a bijection and every weight is odd,
so a change of a single word always shows. Sums modulo 2**32 do not depend on their
order: the digest is the same for every sharding, mesh and number of processes, and
parts of an array add up.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 1 << 16
_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x2C1B3C6D
_GOLDEN = 0x9E3779B1
# Up to this many runs are walked one by one; more are handled in chunks of elements.
_FEW_RUNS = 64
_CHUNK = 1 << 18
# Blocks that a compiled program takes at once: enough to hide the cost of its call.
_STRIDE = 16
# XLA reads memory where it lies if that begins at a multiple of this, in bytes.
ALIGNMENT = 64


class Digest(NamedTuple):
    """The digest of an array or of a part of it.

    Attributes:
      first: position-weighted sum, in [0, 2**32).
      second: block-weighted sum, in [0, 2**32).
      nonfinite: entries that are NaN or infinite; 0 for integers.
    """

    first: int
    second: int
    nonfinite: int

    def __add__(self, other: Digest) -> Digest:  # type: ignore[override]
        return Digest(
            (self.first + other.first) & _MASK,
            (self.second + other.second) & _MASK,
            self.nonfinite + other.nonfinite,
        )


ZERO = Digest(0, 0, 0)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_MULTIPLIER)
    return x ^ (x >> np.uint32(12))


def _odd(n: Any) -> Any:
    return _mix(n * np.uint32(_GOLDEN)) | np.uint32(1)


@functools.cache
def _weights() -> np.ndarray:
    """Rows: by position in a block, by block for `first`, by block for `second`."""
    with np.errstate(over="ignore"):
        return _odd(np.arange(3 * BLOCK, dtype=np.uint32)).reshape(3, BLOCK)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


def _bits(flat: np.ndarray) -> np.ndarray:
    """A contiguous vector as unsigned integers of at most 4 bytes."""
    size = flat.dtype.itemsize
    if flat.dtype.name in ("int2", "int4", "uint2", "uint4"):
        flat = flat.astype(np.int8)
    return flat.view({1: np.uint8, 2: np.uint16}.get(size, np.uint32))


def _words(flat: np.ndarray) -> np.ndarray:
    """The words of a contiguous vector; a view where an element has 4 bytes or more."""
    return _bits(flat).astype(np.uint32, copy=False)


def count_nonfinite(flat: np.ndarray) -> int:
    """Entries that are NaN or infinite; 0 for integers."""
    if not _is_float(flat.dtype):
        return 0
    with np.errstate(all="ignore"):
        # The sum is many times faster than a test of each entry; it may overflow.
        if flat.dtype.itemsize >= 4 and np.isfinite(np.add.reduce(flat)):
            return 0
        return int(flat.size - np.count_nonzero(np.isfinite(flat)))


@functools.cache
def _host() -> tuple[jax.Device, jax.Array] | None:
    """The host as a device, with the weights by position; None if JAX has none."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    return device, jax.device_put(_weights()[0], device)


@jax.jit
def _block_sums(words: jax.Array, within: jax.Array) -> jax.Array:
    """Sums of `mix(w) * within` and of `mix(w)`, uint32 `[2, blocks]`."""
    m = _mix(words.astype(jnp.uint32))
    zero = jnp.uint32(0)

    def add(x: Any, y: Any) -> Any:
        return x[0] + y[0], x[1] + y[1]

    # Both in one loop over the words, which two calls of `jnp.sum` are not.
    return jnp.stack(jax.lax.reduce((m * within, m), (zero, zero), add, (1,)))


def _compiled_sums(words: np.ndarray) -> np.ndarray | None:
    """`_block_sums` of whole blocks, where they lie; None where JAX would copy them.

    Two to three times cheaper than NumPy, which makes a loop of each operation.
    """
    host = _host()
    if host is None or words.ctypes.data % ALIGNMENT:
        return None
    device, within = host
    blocks = words.reshape(-1, BLOCK)
    return np.asarray(
        _block_sums(jax.device_put(blocks, device, may_alias=True), within)
    )


def digest_run(flat: np.ndarray, start: int, finite: bool = True) -> Digest:
    """Digest of consecutive elements of an array in C order.

    Args:
      flat: vector of any numeric dtype, contiguous.
      start: position of its first element in the whole array, elements.
      finite: whether to count what is not finite; else 0.
    """
    per = max(flat.dtype.itemsize // 4, 1)
    first = second = nonfinite = 0
    mixed, scratch = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    at, (within, by_first, by_second) = 0, _weights()
    while at < flat.size:
        position = (start + at) * per
        j, b = position % BLOCK, (position // BLOCK) & (BLOCK - 1)
        taken = _STRIDE * BLOCK // per
        if j == 0 and flat.size - at >= taken:
            part = flat[at : at + taken]
            sums = _compiled_sums(_bits(part))
            if sums is not None:
                these = np.arange(b, b + _STRIDE) & (BLOCK - 1)
                first += int(sums[0] @ by_first[these])
                second += int(sums[1] @ by_second[these])
                nonfinite += count_nonfinite(part) if finite else 0
                at += taken
                continue
        taken = min((BLOCK - j) // per, flat.size - at)
        part = flat[at : at + taken]
        words = _words(part)
        m, s = mixed[: words.size], scratch[: words.size]
        np.right_shift(words, np.uint32(15), out=s)
        np.bitwise_xor(s, words, out=m)
        np.multiply(m, np.uint32(_MULTIPLIER), out=m)
        np.right_shift(m, np.uint32(12), out=s)
        np.bitwise_xor(s, m, out=m)
        second += int(np.add.reduce(m, dtype=np.uint32)) * int(by_second[b])
        np.multiply(m, within[j : j + words.size], out=m)
        first += int(np.add.reduce(m, dtype=np.uint32)) * int(by_first[b])
        nonfinite += count_nonfinite(part) if finite else 0
        at += taken
    return Digest(first & _MASK, second & _MASK, nonfinite)


def digest_part(
    part: np.ndarray,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    finite: bool = True,
) -> Digest:
    """Digest of a rectangular part of an array.

    Args:
      part: the part, any numeric dtype.
      shape: shape of the whole array.
      start: index of the part's first element in the whole array.
      finite: as for `digest_run`.
    """
    # Trailing axes that the part holds whole make one run of the whole array.
    axis = len(shape)
    while axis > 0 and part.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)
    offsets = np.zeros([], np.uint64)
    for a in range(len(shape)):
        stride = int(np.prod(shape[a + 1 :], dtype=np.int64))
        along = np.arange(part.shape[a] if a < axis else 1, dtype=np.uint64)
        steps = (along + np.uint64(start[a])) * np.uint64(stride)
        offsets = offsets[..., None] + steps if a < axis else offsets + steps
    offsets = offsets.reshape(-1)
    runs = part.reshape(offsets.size, -1) if part.size else part.reshape(0, 0)
    total = ZERO
    if offsets.size <= _FEW_RUNS:
        for run, offset in zip(runs, offsets, strict=False):
            total += digest_run(np.ascontiguousarray(run), int(offset), finite)
        return total
    rows = max(_CHUNK // runs.shape[1], 1)
    for at in range(0, len(runs), rows):
        chunk = slice(at, at + rows)
        total += _digest_scattered(runs[chunk], offsets[chunk], finite)
    return total


def _digest_scattered(runs: np.ndarray, offsets: np.ndarray, finite: bool) -> Digest:
    """Digest of many short runs of one length, each at its own offset in elements."""
    flat = np.ascontiguousarray(runs).reshape(-1)
    per = max(flat.dtype.itemsize // 4, 1)
    words = _words(flat).reshape(len(runs), -1)
    i = offsets[:, None] * np.uint64(per) + np.arange(words.shape[1], dtype=np.uint64)
    j, b = i % BLOCK, (i // BLOCK) % BLOCK
    within, by_first, by_second = _weights()
    with np.errstate(over="ignore"):
        m = _mix(words)
        first, second = m * within[j] * by_first[b], m * by_second[b]
    return Digest(
        int(np.add.reduce(first, axis=None, dtype=np.uint32)),
        int(np.add.reduce(second, axis=None, dtype=np.uint32)),
        count_nonfinite(flat) if finite else 0,
    )


def _device_words(x: jax.Array) -> jax.Array:
    """Bits of an array as uint32 with a last axis of words an element."""
    if jnp.iscomplexobj(x):
        return jnp.concatenate([_device_words(x.real), _device_words(x.imag)], -1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)[..., None]
    if x.dtype in (jnp.int4, jnp.uint4):
        x = x.astype(jnp.int8)
    size = x.dtype.itemsize
    if size == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)[..., None]


@jax.jit
def digest_on_device(arrays: list[jax.Array]) -> jax.Array:
    """Digests of arrays where they live, uint32 `[arrays, 3]`, not waited for.

    Columns are the fields of `Digest`. One pass over each array; on an accelerator it
    costs a read of its memory, on a CPU `digest_part` is faster.
    """
    rows = []
    for x in arrays:
        words = _device_words(x)
        i = jnp.zeros(words.shape, jnp.uint32)
        stride = 1
        for axis in reversed(range(words.ndim)):
            along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
            i += along * np.uint32(stride & _MASK)
            stride *= words.shape[axis]
        j, b = i & np.uint32(BLOCK - 1), i >> np.uint32(16)
        m = _mix(words)
        first = jnp.sum(m * _odd(j) * _odd(b + np.uint32(BLOCK)), dtype=jnp.uint32)
        second = jnp.sum(m * _odd(b + np.uint32(2 * BLOCK)), dtype=jnp.uint32)
        bad = jnp.zeros([], jnp.uint32)
        if _is_float(x.dtype):
            bad = jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32)
        rows.append(jnp.stack([first, second, bad]))
    return jnp.stack(rows)
