"""Where the data stand is kept with the step."""

import json
import re

import jax.numpy as jnp
import pytest

from stabil.checkpoints import Keeper

STATE = {"w": jnp.ones(3)}


class Stand:
    """An iterator with state, as Grain's are; `as_bytes` for its older kind."""

    def __init__(self, as_bytes=False):
        self.at, self.as_bytes = 0, as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at - 1

    def get_state(self):
        state = {"next_index": self.at}
        return json.dumps(state).encode() if self.as_bytes else state

    def set_state(self, state):
        state = json.loads(state) if isinstance(state, bytes) else state
        self.at = state["next_index"]


def grain_dataset():
    grain = pytest.importorskip("grain")
    return iter(grain.MapDataset.range(1000).shuffle(seed=3).to_iter_dataset())


def grain_loader():
    grain = pytest.importorskip("grain")
    source = grain.sources.RangeDataSource(0, 1000, 1)
    sampler = grain.samplers.IndexSampler(1000, seed=3, shuffle=True, num_epochs=1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))


@pytest.mark.parametrize(
    "make", [Stand, lambda: Stand(as_bytes=True), grain_dataset, grain_loader]
)
def test_an_iterator_goes_back_with_its_step(tmp_path, make):
    data, expected = make(), make()
    for _ in range(7):
        next(expected)
    rest = [int(next(expected)) for _ in range(5)]
    keeper = Keeper(tmp_path, keep_in_memory=1)
    for _ in range(7):
        next(data)
    keeper.save(7, STATE, data=data)
    # What is drawn while the save runs is not in it.
    assert [int(next(data)) for _ in range(5)] == rest
    keeper.snapshot(12, STATE, data=data)
    keeper.wait()
    keeper.mark(7, "healthy")
    keeper.mark(12, "healthy")
    after = int(next(data))
    back = keeper.rollback(STATE, 20, data=data)
    assert (back.step, back.source, int(next(data))) == (12, "memory", after)
    back = keeper.rollback(STATE, 12, data=data)
    assert (back.step, [int(next(data)) for _ in range(5)]) == (7, rest)
    # And in another process.
    fresh = make()
    Keeper(tmp_path).restore(STATE, data=fresh)
    assert [int(next(fresh)) for _ in range(5)] == rest


def test_refuses(tmp_path):
    keeper = Keeper(tmp_path)
    text = (
        "needed data as an iterator with get_state and set_state, got list: pass "
        "iter(dataset), or keep a position of your own in extra={...}"
    )
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        keeper.save(1, STATE, data=[1, 2])
    keeper.save(1, STATE)
    keeper.wait()
    text = (
        "needed a position of the data in step 1 for each of 1 processes, got none: "
        "restore without data=, and set the iterator yourself"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        keeper.restore(STATE, step=1, data=Stand())
