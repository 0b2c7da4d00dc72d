"""One more save before the end."""

import signal
import threading

import jax.numpy as jnp
import pytest

from stabil.checkpoints import Keeper


@pytest.fixture
def heard():
    """Counts the signals that reach the handler from before."""
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGUSR1, before)


def state(step):
    return {"w": jnp.full(3, step, jnp.float32)}


def test_a_signal_asks_for_one_more_save(tmp_path, heard):
    with Keeper(tmp_path, save_every=100) as keeper:
        keeper.watch_signals([signal.SIGUSR1])
        assert keeper.save(1, state(1)) and not keeper.save(2, state(2))
        assert keeper.interrupted is None
        signal.raise_signal(signal.SIGUSR1)
        assert keeper.interrupted == "SIGUSR1" and keeper.due(3)
        assert keeper.save(3, state(3))
        # It was waited for: the step is on the disk.
        assert keeper.steps() == {1: "pending", 3: "pending"}
        assert not keeper.due(4) and heard == []
        # Who does not want to wait says it again.
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


def test_the_old_handlers_come_back(tmp_path, heard):
    before = signal.getsignal(signal.SIGUSR1)
    with Keeper(tmp_path / "a") as keeper:
        keeper.watch_signals([signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(KeyError), Keeper(tmp_path / "b") as keeper:
        keeper.watch_signals([signal.SIGUSR1])
        raise KeyError
    assert signal.getsignal(signal.SIGUSR1) == before


def test_another_thread_is_refused(tmp_path):
    keeper, errors = Keeper(tmp_path), []

    def call():
        try:
            keeper.watch_signals()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="worker")
    thread.start()
    thread.join()
    assert errors == [
        "needed the main thread, the only one in which Python takes signals, got "
        "worker: "
        "call watch_signals there"
    ]
