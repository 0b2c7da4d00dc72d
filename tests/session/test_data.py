"""Batches are found by absolute position, whatever the source can do."""

import json
import re

import pytest

from stabil.session._data import Data


class Grain:
    """An iterator with state, as Grain's are; `as_bytes` for its older kind."""

    def __init__(self, size=1000, as_bytes=False):
        self.next, self.size, self.as_bytes = 0, size, as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.size:
            raise StopIteration
        self.next += 1
        return (self.next - 1) * 10

    def get_state(self):
        state = {"next": self.next}
        return json.dumps(state).encode() if self.as_bytes else state

    def set_state(self, state):
        state = json.loads(state) if isinstance(state, bytes) else state
        self.next = state["next"]


SOURCES = {
    "function": lambda: lambda i: i * 10,
    "stateful": Grain,
    "bytes": lambda: Grain(as_bytes=True),
    "plain": lambda: [i * 10 for i in range(1000)],
}


@pytest.fixture(params=SOURCES)
def make(request):
    return SOURCES[request.param]


def test_windows_are_left_out_and_positions_stay_absolute(make):
    data = Data(make())
    data.skip(2, 4)
    data.skip(5, 5)
    data.skip(8, 9)
    drawn = [data.draw() for _ in range(6)]
    assert drawn == [(i, i * 10) for i in (0, 1, 6, 7, 10, 11)]


def test_a_new_process_goes_on_at_the_exact_position(make):
    data = Data(make())
    data.skip(3, 5)
    for _ in range(5):
        data.draw()
    state = json.loads(json.dumps(data.get_state()))
    later = Data(make())
    later.skip(9, 11)  # learnt from a note that is newer than the checkpoint
    later.set_state(state)
    assert [later.draw() for _ in range(3)] == [(8, 80), (12, 120), (13, 130)]
    assert sorted(later.windows) == [(3, 5), (9, 11)]


def test_a_window_that_reaches_back_is_no_obstacle(make):
    data = Data(make())
    for _ in range(10):
        data.draw()
    data.skip(5, 12)
    assert data.draw() == (13, 130)


def test_sources_with_a_position_can_go_back():
    for make in (SOURCES["function"], SOURCES["stateful"]):
        data = Data(make())
        data.draw()
        state = data.get_state()
        for _ in range(5):
            data.draw()
        data.set_state(state)
        assert data.draw() == (1, 10)


def test_grain_itself_goes_on_at_the_exact_position():
    grain = pytest.importorskip("grain")
    make = lambda: grain.MapDataset.range(1000).map(lambda x: x * 10)  # noqa: E731
    for source in (lambda: make().to_iter_dataset(), lambda: iter(make())):
        data = Data(source())
        data.skip(3, 5)
        drawn = [int(data.draw()[1]) for _ in range(5)]
        state = json.loads(json.dumps(data.get_state()))
        later = Data(source())
        later.skip(9, 11)
        later.set_state(state)
        assert data.kind == "stateful"
        assert drawn == [0, 10, 20, 60, 70]
        assert [int(later.draw()[1]) for _ in range(2)] == [80, 120]


def test_a_plain_iterable_cannot_go_back_and_says_so():
    data = Data([1, 2, 3])
    state = data.get_state()
    data.draw()
    text = (
        "needed data from position 0, but the source is at 1 and cannot go back; hand "
        "session.steps a function data_index -> batch or an iterator with get_state "
        "and set_state"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        data.set_state(state)


def test_the_end_of_the_data_is_the_end(make):
    data = Data(make())
    data.skip(3, 2000)
    drawn = []
    with pytest.raises(StopIteration):
        while data.kind != "function" or len(drawn) < 3:
            drawn.append(data.draw()[0])
        raise StopIteration  # a function has no end
    assert drawn == [0, 1, 2]


def test_another_source_goes_on_with_the_numbers():
    data = Data([1, 2, 3])
    data.draw()
    data.skip(4, 4)
    data.use([7, 8])
    assert data.draw() == (1, 7) and data.windows == [(4, 4)]


def test_what_is_no_data_is_refused():
    text = (
        "needed a function data_index -> batch or an iterable of batches, got int; "
        "write session.steps(state, lambda i: ...)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        Data(3)
