"""Every process decides the same, though only one saw the fault and kept the notes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def test_both_processes_roll_back_skip_and_resume_alike(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(HERE))
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "two_processes.py", port, str(i), tmp_path],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        ends = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], ends
    one, two = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    assert one["first"] == two["first"] and one["second"] == two["second"]
    # Killed three steps after the rollback: its window is in no checkpoint yet, and
    # the second process has lost its disk.
    assert one["first"][0][-3:] == [[20, 41], [21, 42], [22, 43]]
    assert one["second"][0][1:] == [[i, i + 21] for i in range(20, 60)]
    assert one["second"][1] == 60.0
    kinds = [kind for _, kind in one["events"]]
    assert kinds.count("rollback") == 1 and kinds.count("resume") == 1
