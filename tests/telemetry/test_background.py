"""A thread for foreign work: it outlives whatever kills it."""

import sys

import pytest

from stabil.telemetry._background import Background


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["put", "flush", "close"])
def test_a_killed_thread_is_started_again_and_loses_what_it_had_in_hand(call):
    seen = []

    def work(items):
        if "die" in items:
            sys.exit("killed")  # ends the thread, and passes every `except Exception`
        seen.extend(items)

    background = Background(work, name="doomed", batch=1, every_seconds=0.01)
    background.put("die")
    background._thread.join(10)
    assert not background._thread.is_alive()
    with background._changed:  # as if put in the moment of death
        background._items.append(1)
        background._taken += 1
    if call == "put":
        assert background.put(2)
    if call != "close":
        assert background.flush()
    assert background.close()
    assert seen == ([1, 2] if call == "put" else [1])
    assert (background.failed, background.revivals) == (1, 1)
