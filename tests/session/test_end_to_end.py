"""A real run: guard, probe-free linear model, session and keeper on the disk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import stabil
from stabil.checkpoints import Keeper, _points
from stabil.session import NnxState, Session, apply_gradients, update_nnx
from stabil.telemetry import read_events

TX = stabil.guard(optax.adam(0.03))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam is not clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - y))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch, controls):
    params, opt_state = state["params"], state["opt_state"]
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = TX.update(
        grads, opt_state, params, loss=loss, controls=controls
    )
    params = optax.apply_updates(params, updates)
    vitals = stabil.vitals(opt_state, params=params)
    return {"params": params, "opt_state": opt_state}, vitals


def first_state():
    params = {"w": jnp.zeros(4), "b": jnp.zeros([])}
    return {"params": params, "opt_state": TX.init(params)}


def batch_for_step(i):
    rng = np.random.default_rng(i)
    x = rng.normal(size=(16, 4)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(x @ np.arange(4, dtype=np.float32) + 1)


def corrupt(bad):
    def batch(i):
        x, y = batch_for_step(i)
        return (x * jnp.nan, y) if i in bad else (x, y)

    return batch


def run(folder, batches, total_steps=100, until=None, harm=None):
    """Trains with everything on; the state, the session's summary, the tags."""
    with Keeper(folder / "run" / "checkpoints", save_every=20) as keeper:
        with Session(
            folder / "run", checkpoints=keeper, total_steps=total_steps, progress=False
        ) as session:
            state = first_state()
            for step, batch in session.steps(state, batches):
                if harm:
                    state = harm(step, state)
                state, vitals = train_step(state, batch, session.controls)
                state = session.end_step(state, vitals)
                if step == until:
                    break
        return jax.device_get(state), session.summary(), keeper.steps()


def reference(batches, total_steps=100):
    """The same steps in a bare loop."""
    state = first_state()
    for i in range(total_steps):
        state, _ = train_step(state, batches(i), stabil.Controls.untouched())
    return jax.device_get(state)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.bits
def test_a_healthy_run_is_bit_equal_to_a_bare_loop(tmp_path):
    state, summary, tags = run(tmp_path, batch_for_step)
    assert_same(state, reference(batch_for_step))
    assert set(summary["actions"]) <= {"start", "end", "clip", "log"}
    assert tags[100] == "healthy" and summary["rollbacks"] == 0


def test_rollback_and_resume_do_not_compile_the_step_again(tmp_path):
    before = train_step._cache_size()
    run(tmp_path, corrupt({37, 38, 39}), total_steps=60, until=45)
    run(tmp_path, corrupt({37, 38, 39}), total_steps=60)
    assert train_step._cache_size() - before <= (before == 0)


def test_one_bad_batch_costs_one_step(tmp_path):
    state, summary, _ = run(tmp_path, corrupt({45}))
    assert (summary["blocked"], summary["steps_lost"]) == (1, 1)
    assert_same(state["params"], reference(corrupt({45}))["params"])
    (event,) = [e for e in read_events(tmp_path / "run") if e.action == "skip"]
    assert (event.step, event.data_index) == (45, 45)
    assert event.cause == "nonfinite_loss,nonfinite_gradient"


def test_a_burst_rolls_back_and_ends_as_a_run_without_that_data(tmp_path):
    state, summary, tags = run(tmp_path, corrupt(set(range(57, 64))))
    assert summary["rollbacks"] == 1
    ((first, last),) = summary["skipped_data"]
    assert first <= 57 and last >= 59
    gap = last - first + 1
    clean = reference(
        lambda i: corrupt(set(range(57, 64)))(i if i < first else i + gap)
    )
    assert_same(state["params"], clean["params"])
    assert np.all(np.isfinite(state["params"]["w"]))
    assert tags[100] == "healthy"


def test_parameters_that_turn_nan_are_restored_and_named(tmp_path):
    def harm(step, state):
        if step != 66 or harmed:
            return state
        harmed.append(step)
        w = state["params"]["w"].at[2].set(jnp.nan)
        return state | {"params": state["params"] | {"w": w}}

    harmed = []
    state, summary, _ = run(tmp_path, batch_for_step, harm=harm)
    assert np.all(np.isfinite(state["params"]["w"])) and summary["rollbacks"] == 1
    (event,) = [e for e in read_events(tmp_path / "run") if e.action == "rollback"]
    assert event.text.startswith("params/w is not finite") and event.step == 66


@pytest.mark.parametrize("point", ["orbax_committed", "manifest_written"])
def test_a_kill_before_the_first_tag_is_no_end(tmp_path, monkeypatch, point):
    """The first state is on the disk, whole or half made, and nobody has judged it."""

    def killed(name):
        if name == point:
            raise SystemExit

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(_points, "reached", killed)
        keeper = Keeper(tmp_path / "steps", save_every=2)
        Session(run, checkpoints=keeper).steps(first_state(), batch_for_step)
        keeper._saver._job.wait()
    keeper = Keeper(tmp_path / "steps", save_every=2)
    half_made = point == "orbax_committed"
    assert keeper.steps() == ({} if half_made else {0: "pending"})
    with Session(run, checkpoints=keeper, total_steps=4) as session:
        state = first_state()
        for _, batch in session.steps(state, batch_for_step):
            state, vitals = train_step(state, batch, session.controls)
            state = session.end_step(state, vitals)
    assert keeper.steps() == {0: "healthy", 2: "healthy", 4: "healthy"}


@pytest.mark.parametrize("bad", [set(), {35, 36, 37}])
def test_a_stopped_run_resumes_and_ends_bit_equal(tmp_path, bad):
    whole, _, _ = run(tmp_path / "whole", corrupt(bad))
    run(tmp_path / "parts", corrupt(bad), until=53)
    state, summary, _ = run(tmp_path / "parts", corrupt(bad))
    assert "resume" in summary["actions"]
    assert_same(state, whole)


class Normed(nnx.Module):
    """A model with statistics of its batches, which a bad batch would spoil."""

    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(self.norm(x))[:, 0]


def test_an_nnx_model_rolls_back_and_resumes(tmp_path):
    traces = []

    @nnx.jit
    def step_fn(model, optimizer, batch, controls):
        traces.append(1)
        x, y = batch
        kept = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        return update_nnx(
            optimizer, model, grads, loss=loss, controls=controls, kept=kept
        )

    for total in (40, 60):
        model = Normed()
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        held, batches = NnxState(model, optimizer), corrupt({25, 26, 27})
        with (
            Keeper(tmp_path / "ck", save_every=20) as keeper,
            Session(
                tmp_path / "run", checkpoints=keeper, total_steps=total, progress=False
            ) as session,
        ):
            held.put(session.resume(held.get(), batches))
            for _, batch in session.steps(held.get(), batches):
                vitals = step_fn(model, optimizer, batch, session.controls)
                held.end_step(session, vitals)
    events = read_events(tmp_path / "run")
    kinds = [e.action for e in events]
    assert kinds.count("rollback") == 1 and kinds.count("resume") == 1
    # Blocked steps have left the statistics alone, so nothing was found damaged.
    assert all("not finite, so that" not in e.text for e in events)
    assert np.all(np.isfinite(model.norm.mean[...])) and len(traces) == 1
    assert int(optimizer.step[...]) == 60
    assert events[kinds.index("skip")].layer == "loss"


def test_a_flax_train_state_rolls_back_and_resumes(tmp_path):
    @jax.jit
    def step_fn(state, batch, controls):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, *batch)
        return apply_gradients(state, grads, loss=loss, controls=controls)

    def make():
        params = first_state()["params"]
        state = TrainState.create(apply_fn=None, params=params, tx=TX)
        return state.replace(step=jnp.int32(0))  # a Python int compiles twice

    for total in (40, 80):
        with (
            Keeper(tmp_path / "ck", save_every=20) as keeper,
            Session(
                tmp_path / "run", checkpoints=keeper, total_steps=total, progress=False
            ) as session,
        ):
            state = make()
            for _, batch in session.steps(state, corrupt({25, 26, 27})):
                state, vitals = step_fn(state, batch, session.controls)
                state = session.end_step(state, vitals)
    assert isinstance(state, TrainState) and int(state.step) == 80
    assert step_fn._cache_size() == 1
    assert np.all(np.isfinite(state.params["w"]))
