"""Digests of what has come while the rest is still being read."""

import jax
import jax.numpy as jnp
import numpy as np

from stabil.checkpoints import Keeper, _digest, _holding, _store


def test_arrays_are_digested_once_and_as_they_come(tmp_path, monkeypatch):
    """Three groups; a second pass at the end would double the digests."""
    state = {f"w{i}": jnp.full((100, 100), i, jnp.float32) for i in range(9)}
    state |= {"key": jax.random.key(3), "plain": np.arange(5.0), "n": 3}
    monkeypatch.setattr(_store, "_SMALLEST_GROUP", 120_000)
    groups, digests = [], []
    take, part = _holding.Arrivals.take, _digest.digest_part

    def taking(self, arrays):
        groups.append(len(arrays))
        take(self, arrays)

    def digesting(x, *arguments, **options):
        digests.append(x.nbytes)
        return part(x, *arguments, **options)

    with Keeper(tmp_path / "run") as keeper:
        keeper.save(1, state)
        keeper.wait()
        monkeypatch.setattr(_holding.Arrivals, "take", taking)
        monkeypatch.setattr(_digest, "digest_part", digesting)
        back = keeper.restore(state, step=1).state
    for name, value in state.items():
        assert np.all(back[name] == value)
    assert len(groups) > 2 and sum(groups) == 10
    assert sorted(digests) == [8, 40] + [40_000] * 9


def test_an_array_of_the_same_bytes_is_not_taken_for_the_one_that_came():
    x, y = jnp.arange(3.0), jnp.arange(3.0)
    with _holding.Arrivals() as arrivals:
        arrivals.take([x])
        assert arrivals.of(y) is None and arrivals.of(x) == _holding.hold([y])()[0]
