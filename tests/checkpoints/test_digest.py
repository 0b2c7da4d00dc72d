"""Digests: sensitive to every bit, blind to the layout, the same on host and device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil.checkpoints import _digest

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint8",
    "int8",
    "bool",
    "complex64",
    "int4",
    "float8_e4m3fn",
]


def whole(x):
    x = np.asarray(x)
    return _digest.digest_part(x, x.shape, (0,) * x.ndim)


def mix(x):
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) % 2**32
    return x ^ (x >> 12)


def by_hand(words):
    """The formula of the module's docstring in Python integers."""
    odd = lambda n: mix(n * 0x9E3779B1 % 2**32) | 1  # noqa: E731
    first = second = 0
    for b in range(len(words) // 65536 + 1):
        block = words[65536 * b : 65536 * (b + 1)].tolist()
        first += odd(b + 65536) * sum(mix(w) * odd(j) for j, w in enumerate(block))
        second += odd(b + 131072) * sum(map(mix, block))
    return first % 2**32, second % 2**32


def sample(rng, dtype, shape):
    x = rng.integers(0, 256, shape)
    return jnp.asarray(x % 2 == 0 if dtype == "bool" else x % 5).astype(dtype)


def test_follows_the_formula(rng):
    x = rng.standard_normal((3, 31, 710)).astype(np.float32)
    assert whole(x)[:2] == by_hand(x.reshape(-1).view(np.uint32))
    x = rng.standard_normal(66_000).astype(np.float16)
    assert whole(x)[:2] == by_hand(x.view(np.uint16))
    x = rng.standard_normal(33_000)
    assert whole(x)[:2] == by_hand(x.view(np.uint32))


def test_host_and_device_agree(rng):
    # One program for all: to compile it is what this test costs.
    arrays = [sample(rng, d, (2, 3, 4)) for d in DTYPES]
    arrays += [sample(rng, d, ()) for d in ("float32", "int4")]
    arrays += [sample(rng, d, (3, 50_000)) for d in ("float32", "bfloat16")]
    table = np.asarray(_digest.digest_on_device(arrays))
    for x, row in zip(arrays, table, strict=True):
        assert whole(x) == tuple(int(v) for v in row)


@pytest.mark.parametrize(
    "spec", [("a", None), (None, "a"), ("a", "b"), (None, ("a", "b"))]
)
def test_parts_add_up_to_the_whole(rng, spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    arrays = [sample(rng, d, (2_000, 80)) for d in ("float32", "bfloat16", "complex64")]
    sharded = [jax.device_put(x, sharding) for x in arrays]
    on_device = np.asarray(_digest.digest_on_device(sharded))
    for x, y, row in zip(arrays, sharded, on_device, strict=True):
        total = _digest.ZERO
        for shard in y.addressable_shards:
            if shard.replica_id == 0:
                start = tuple(s.start or 0 for s in shard.index)
                total += _digest.digest_part(np.asarray(shard.data), y.shape, start)
        assert total == whole(x) == tuple(int(v) for v in row)


def test_every_single_bit_shows(rng):
    x = rng.standard_normal(64).astype(np.float32)
    seen = {whole(x)[0]}
    for bit in range(64 * 32):
        y = x.view(np.uint8).copy()
        y[bit // 8] ^= 1 << bit % 8
        with np.errstate(all="ignore"):
            seen.add(whole(y.view(np.float32))[0])
    assert len(seen) == 64 * 32 + 1


def test_structured_damage_shows(rng):
    """Swaps of rows and pages, pairs of sign flips, zeroed pages, shifted contents."""
    x = rng.standard_normal((512, 1024)).astype(np.float32)
    clean = whole(x)[:2]
    for trial in range(50):
        a, b = rng.choice(512, 2, replace=False)
        swapped = x.copy()
        swapped[[a, b]] = swapped[[b, a]]
        signs = x.copy()
        signs[a, b] *= -1
        signs[b, a] *= -1
        zeroed = x.copy()
        zeroed[a] = 0
        for damaged in (swapped, signs, zeroed, np.roll(x, trial + 1)):
            assert whole(damaged)[:2] != clean


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_counts_what_is_not_finite(dtype):
    x = np.zeros((3, 70_000), jnp.dtype(dtype))
    x[0, 0], x[1, 65_000], x[2, -1] = np.nan, np.inf, -np.inf
    assert whole(x).nonfinite == 3
    assert int(_digest.digest_on_device([jnp.asarray(x)])[0, 2]) == 3


def test_a_sum_that_overflows_is_not_taken_for_infinite():
    assert whole(np.full(100, 3e38, np.float32)).nonfinite == 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "bool"])
def test_many_blocks_at_once_are_as_many_one_by_one(rng, dtype, monkeypatch):
    x = np.zeros(3_000_000, jnp.dtype(dtype))
    x[:] = rng.integers(0, 200, x.size)
    x = x[-x.ctypes.data % 64 // x.dtype.itemsize :]  # where XLA can read it
    taken, compiled = [], _digest._compiled_sums
    monkeypatch.setattr(
        _digest, "_compiled_sums", lambda w: taken.append(w.size) or compiled(w)
    )
    found = [_digest.digest_run(x, start) for start in (0, 3 * _digest.BLOCK)]
    assert set(taken) == {16 * _digest.BLOCK}
    monkeypatch.setattr(_digest, "_compiled_sums", lambda words: None)
    assert found == [_digest.digest_run(x, start) for start in (0, 3 * _digest.BLOCK)]
