"""One of two processes that save, judge, roll back and restore together.

python two_worker.py PROCESS PORT FOLDER SCENARIO
"""

import os
import signal
import sys

if __name__ == "__main__":  # before JAX looks
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def make_state(mesh, step):
    def place(x, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

    x = np.arange(64.0, dtype=np.float32).reshape(8, 8) * step
    return {
        "rows": place(x, "a"),
        "columns": place(x, None, "a"),
        "everywhere": place(x),
        "n": place(np.int32(step)),
        "host": np.arange(step, step + 5),
        "epoch": step,
    }


def equal(state, expected):
    for name, x in expected.items():
        if isinstance(x, jax.Array):
            for a, b in zip(
                state[name].addressable_shards, x.addressable_shards, strict=True
            ):
                np.testing.assert_array_equal(a.data, b.data)
        else:
            np.testing.assert_array_equal(state[name], x)


class Data:
    """An iterator with a state, which is another one on each process."""

    def __init__(self, at=-1):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def together(keeper, mesh):
    state = lambda step: make_state(mesh, step)  # noqa: E731
    for step in (10, 20):
        data = Data(step + jax.process_index())
        extra = {"data": step}
        assert keeper.save(step, state(step), extra=extra, data=data, force=True)
        keeper.wait()
    assert keeper.mark(10, "healthy") == "healthy"
    equal(keeper.restore(state(0)).state, state(10))
    data = Data()
    back = keeper.rollback(state(0), 20, "spike", data=data)
    assert back.step == 10 and back.extra == {"data": 10}
    assert data.at == 10 + jax.process_index()
    equal(back.state, state(10))
    keeper.snapshot(15, state(15))
    keeper.mark(15, "healthy")
    back = keeper.rollback(state(0), 20)
    assert (back.step, back.source) == (15, "memory")
    equal(back.state, state(15))
    keeper.save(20, state(20), force=True)
    assert keeper.mark(20, "healthy") in ("pending", "healthy")
    keeper.wait()
    assert keeper.steps() == {10: "healthy", 20: "healthy"}
    # One process alone has the alarm and the NaN; all of them hear of it.
    ill = state(30)
    bad = jnp.where(jax.process_index() == 1, jnp.nan, 0.0)
    shards = [
        jax.device_put(s.data + bad, s.device) for s in ill["rows"].addressable_shards
    ]
    ill["rows"] = jax.make_array_from_single_device_arrays(
        (8, 8), ill["rows"].sharding, shards
    )
    keeper.save(30, ill, force=True)
    keeper.wait()
    assert keeper.tag(30) == "suspect"


class Numbers(Data):
    """Gives numbers in turn, other ones on each process."""

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at


def session_goes_on(folder, mesh):
    """Each process's iterator goes on where it stood, not where the first one's did."""
    from stabil.session import Session
    from stabil.vocabulary import Measures, Tally, Verdict, Vitals

    vitals = Vitals(Verdict.clear(), Tally.zero(), Measures.unmeasured(), None, ())
    begin, seen = 100 * jax.process_index(), []
    for total in (4, 8):
        numbers = Numbers(begin if total == 4 else -1)
        with (
            Keeper(f"{folder}-kept", save_every=3) as keeper,
            Session(
                f"{folder}-log{jax.process_index()}",
                checkpoints=keeper,
                total_steps=total,
                progress=False,
            ) as session,
        ):
            state = session.resume(make_state(mesh, 1), numbers)
            for _, number in session.steps(state, numbers):
                seen.append(number)
                state = session.end_step(state, vitals)
    assert seen == [begin + n for n in range(1, 9)], seen


def damaged(keeper, mesh):
    """Step 20 has a flipped bit in what process 1 reads."""
    restored = keeper.restore(make_state(mesh, 0))
    assert restored.step == 10 and "step 20 was passed over" in restored.notes[0]
    equal(restored.state, make_state(mesh, 10))


def dies(keeper, mesh):
    """The second process is killed when its bytes are due."""
    from stabil.checkpoints import _points

    keeper.restore(make_state(mesh, 0))

    def reached(point):
        if jax.process_index() == 1 and point == "save_begun":
            os.kill(os.getpid(), signal.SIGKILL)

    _points.reached = reached
    keeper.save(40, make_state(mesh, 40), force=True)
    keeper.wait()


if __name__ == "__main__":
    process, port, folder, scenario = int(sys.argv[1]), *sys.argv[2:5]
    jax.distributed.initialize(
        f"localhost:{port}", 2, process, heartbeat_timeout_seconds=10
    )
    from stabil.checkpoints import Keeper

    far = f"file://{folder}-far" if scenario == "together" else None
    mesh = Mesh(np.array(jax.devices()), ("a",))
    with Keeper(folder, save_every=10, remote=far) as keeper:
        globals()[scenario](keeper, mesh)
    if scenario == "together":
        session_goes_on(folder, mesh)
    print("done", scenario, process, flush=True)
