"""Two processes on one machine save and go back together, and one restores alone."""

import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil.checkpoints import Keeper, verify

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from two_worker import Data  # noqa: E402

WORKER = pathlib.Path(__file__).parent / "two_worker.py"


def run(folder, scenario, timeout=150):
    """Exit codes and output of both; neither outlives this."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    logs = [folder.with_name(f"{scenario}{n}.log") for n in range(2)]
    both = []
    try:
        for n, log in enumerate(logs):
            command = [sys.executable, WORKER, str(n), str(port), folder, scenario]
            # Into a file: a full pipe would stop one of them, and so the other.
            with open(log, "w") as file:
                both.append(subprocess.Popen(command, stdout=file, stderr=file))
        codes = [process.wait(timeout) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return codes, [log.read_text() for log in logs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two processes: 10 and 20 healthy, 30 suspect."""
    path = tmp_path_factory.mktemp("two") / "run"
    codes, said = run(path, "together")
    assert codes == [0, 0], "\n".join(s[-3000:] for s in said)
    return path


def test_one_process_restores_what_two_saved(folder, tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("b",))
    by = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    shape = lambda s, d, *spec: jax.ShapeDtypeStruct(  # noqa: E731
        s, d, sharding=by(*spec)
    )
    target = {
        "rows": shape((8, 8), np.float32, None, "b"),
        "columns": shape((8, 8), np.float32, "b"),
        "everywhere": shape((8, 8), np.float32, "b"),
        "n": shape((), np.int32),
        "host": np.arange(5),
        "epoch": 0,
    }
    keeper = Keeper(folder)
    assert keeper.steps() == {10: "healthy", 20: "healthy", 30: "suspect"}
    restored = keeper.restore(target)
    assert restored.step == 20 and restored.notes == ()
    expected = np.arange(64.0, dtype=np.float32).reshape(8, 8) * 20
    for name in ("rows", "columns", "everywhere"):
        np.testing.assert_array_equal(restored.state[name], expected)
        assert restored.state[name].sharding == target[name].sharding
    assert restored.state["epoch"] == 20 and restored.state["host"][0] == 20
    assert all(found.ok for found in verify(folder))
    far = Keeper(tmp_path / "other", remote=f"file://{folder}-far")
    assert far.steps() == {20: "healthy"}
    np.testing.assert_array_equal(far.restore(target).state["rows"], expected)
    text = "needed a position of the data in step 10 for each of 1 processes, got those"
    with pytest.raises(ValueError, match=f"^{text} of 2 processes: "):
        keeper.restore(target, step=10, data=Data())


def test_damage_sends_both_to_the_same_older_step(folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for path in (copy / "20" / "state").rglob("d/*"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(bytes(raw))
    codes, said = run(copy, "damaged")
    assert codes == [0, 0], "\n".join(s[-3000:] for s in said)
    assert Keeper(copy).steps()[20] == "suspect"


@pytest.mark.slow
def test_a_process_that_dies_in_a_save_does_not_hang_the_other(folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    start = time.monotonic()
    codes, said = run(copy, "dies")
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert time.monotonic() - start < 140
    keeper = Keeper(copy)
    assert 40 not in keeper.steps() and keeper.newest_healthy() == 20
