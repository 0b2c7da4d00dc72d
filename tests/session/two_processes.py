"""One of two processes of a run whose second one gets corrupt data."""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from fake_run import FakeKeeper
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stabil.policy import Ladder
from stabil.session import Session
from stabil.telemetry import read_events
from stabil.vocabulary import Cause, Measures, Severity, Tally, Verdict, Vitals


@jax.jit
def train_step(state, batch):
    loss = jnp.mean(batch)  # over both processes
    ok = jnp.isfinite(loss)
    flags = jnp.where(ok, 0, int(Cause.NONFINITE_LOSS)).astype(jnp.int32)
    severity = jnp.where(ok, 0, int(Severity.BLOCK)).astype(jnp.int32)
    verdict = Verdict.clear()._replace(flags=flags, severity=severity)
    measures = Measures.unmeasured()._replace(loss=loss)
    vitals = Vitals(verdict, Tally.zero(), measures, None, ())
    return jnp.where(ok, state + 1, state), vitals


def batch_for_step(i, process):
    split = NamedSharding(Mesh(np.asarray(jax.devices()), "x"), PartitionSpec("x"))
    mine = np.full([1], np.nan if process == 1 and 37 <= i < 41 else 1.0, np.float32)
    return jax.make_array_from_process_local_data(split, mine)


def run(folder, process, name, keeper, total, turns=None):
    session = Session(
        # Disks of their own, and nothing on the second one after a restart.
        folder / f"{name}-{process}" if process else folder / "run",
        checkpoints=keeper,
        policy=Ladder(),
        total_steps=total,
        progress=False,
    )
    batches = functools.partial(batch_for_step, process=process)
    ran = []
    with session:
        state = jnp.float32(0)
        for step, batch in session.steps(state, batches):
            ran.append([step, session._turns._open[1]])
            state, vitals = train_step(state, batch)
            state = session.end_step(state, vitals)
            if len(ran) == turns:
                break
        told = agreed(session, process)
    return ran, float(state), told


def agreed(session, process):
    """What each process measures or hears for itself, and all must take alike."""
    pace = session._watch.pace
    pace.load_seconds, pace.is_measured = 10.0 + process, True
    costs = session._watch.rescue.price({"before": 60, "p": 0.1 * process}, 70)
    session._ending.listen(())
    session._ending.asked = process == 1  # a signal reached the second one alone
    leaves = [session._ending.asks(step) for step in (15, 16, 17)]
    session._ending.asked = False
    return [costs | {"step_seconds": costs["step_seconds"] > 0}, leaves]


def main(port, process, folder):
    process, folder = int(process), pathlib.Path(folder)
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    keeper = FakeKeeper(save_every=10)
    first = run(folder, process, "first", keeper, 60, turns=44)
    second = run(folder, process, "second", keeper, 60)
    events = [[e.step, e.action] for e in read_events(folder / "run") if not process]
    print(json.dumps({"first": first, "second": second, "events": events}))


if __name__ == "__main__":
    main(*sys.argv[1:])
