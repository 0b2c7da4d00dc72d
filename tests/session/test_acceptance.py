"""What a run must get from stabil, from end to end, on one small probed model.

2,000 steps of a language model: `pytest -m slow tests/session/test_acceptance.py`.
"""

import math
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_run import FakeKeeper

import stabil
from stabil.checkpoints import Keeper
from stabil.cli import _demo_data, _demo_model
from stabil.session import Session
from stabil.telemetry import read_events
from stabil.testing import inject

LAYERS = ("layer_0", "layer_1", "layer_2")


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in LAYERS[:-1]:
            x = nn.relu(nn.Dense(16, name=name)(x))
        return nn.Dense(1, name=LAYERS[-1])(x)[:, 0]


TX = stabil.guard(optax.adam(1e-3))
PROBED = stabil.probe(Mlp(), where="**")


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam is not clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mean_square(y, target):
    return jnp.mean(jnp.square(y - target))


@jax.jit
def train_step(state, batch, controls):
    params, opt_state = state
    x, target = batch

    def loss_of(params):
        y, readings = PROBED.apply({"params": params}, x)
        return mean_square(y, target), readings

    (loss, readings), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    seen = dict(loss=loss, readings=readings, controls=controls)
    updates, opt_state = TX.update(grads, opt_state, params, **seen)
    params = optax.apply_updates(params, updates)
    vitals = stabil.vitals(opt_state, params=params, readings=readings)
    return (params, opt_state), vitals


@pytest.fixture(scope="module")
def params():
    return jax.jit(Mlp().init)(jax.random.key(0), jnp.zeros([1, 4]))["params"]


def batch_for_step(i):
    x = np.random.default_rng(i).normal(size=(64, 4)).astype(np.float32)
    return x, np.sin(x[:, 0]) + 0.3 * x[:, 1]


def train(folder, params, steps, keeper=None, harm=None, **settings):
    """Trains under a session; the final state and the session."""
    keeper = FakeKeeper(save_every=20) if keeper is None else keeper
    settings = dict(checkpoints=keeper, total_steps=steps, progress=False) | settings
    with Session(folder / "run", **settings) as session:
        state = params, TX.init(params)
        for step, batch in session.steps(state, batch_for_step):
            state = harm(step, state) if harm else state
            state, vitals = train_step(state, batch, session.controls)
            state = session.end_step(state, vitals)
    return state, session


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


class Sink:
    def __init__(self):
        self.rows = []

    def write_scalars(self, step, scalars):
        self.rows.append((step, dict(scalars)))


class Inbox:
    def __init__(self):
        self.texts = []

    def send(self, title, text, severity):
        self.texts.append(text)


def once(fault):
    """Harms the parameters at one step, once: not again after a rollback."""
    struck = []

    def harm(step, state):
        if step != fault.step or struck:
            return state
        struck.append(step)
        return inject.parameters((fault,), step, state[0]), state[1]

    return harm


def test_a_hundred_steps_on_a_subset_give_sane_readings(tmp_path, params):
    sink = Sink()
    _, session = train(tmp_path, params, 100, sinks=[sink])
    assert [step for step, _ in sink.rows] == list(range(100))
    assert session.summary()["lost_scalars"] == 0
    for step, row in sink.rows:
        unknown = {name for name, value in row.items() if not math.isfinite(value)}
        assert unknown <= ({"updates/rms"} if step == 0 else set())
        for name in LAYERS:
            rms = row[f"activations/{name}/rms"]
            assert 0 < rms <= row[f"activations/{name}/absmax"] < 100
            assert row[f"activations/{name}/nan_count"] == 0
        assert row["grads/global_norm"] > 0
    losses = [row["loss"] for _, row in sink.rows]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert set(session.summary()["actions"]) <= {"start", "end", "log", "clip"}


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_times_100_raise_the_alarm_name_the_layer_and_are_undone(
    tmp_path, params, layer
):
    inbox, states = Inbox(), {}
    weights = inject.Fault(
        kind="scale", place="parameters", step=65, where=f"{layer}/kernel", size=100.0
    )
    strike = once(weights)

    def harm(step, state):
        states.setdefault(step, jax.device_get(state[0]))
        return strike(step, state)

    with Keeper(tmp_path / "ck", save_every=20) as keeper:
        state, session = train(tmp_path, params, 100, keeper, harm, alerts=[inbox])
        tags = keeper.steps()
    alarms = [e for e in read_events(tmp_path / "run") if e.severity != "ok"]
    assert (alarms[0].step, alarms[0].layer) == (65, f"params/{layer}/kernel")
    assert f"in params/{layer}/kernel at step 65" in inbox.texts[0]
    # The rollback lands before the anomaly, on the state that was saved then.
    (back,) = [e for e in alarms if e.action == "rollback"]
    target = back.numbers["to_step"]
    assert target <= 65 and tags[target] == "healthy"
    assert session.summary()["next_step"] == 100
    clean, _ = train(tmp_path / "clean", params, 100)
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(clean[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)


def test_rollback_lands_on_a_snapshot_where_that_is_the_newest_healthy_state(
    tmp_path, params
):
    weights = inject.Fault(
        kind="scale", place="parameters", step=65, where="layer_1/kernel", size=100.0
    )
    with Keeper(tmp_path / "ck", save_every=1000, snapshot_every=20) as keeper:
        state, session = train(tmp_path, params, 100, keeper, once(weights))
        assert keeper.steps() == {0: "healthy", 100: "healthy"}
    (back,) = [e for e in read_events(tmp_path / "run") if e.action == "rollback"]
    assert back.numbers["to_step"] == 40
    assert session.summary()["next_step"] == 100
    clean, _ = train(tmp_path / "clean", params, 100)
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(clean[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)


def test_alerts_obey_the_cool_down(tmp_path, params):
    inbox = Inbox()

    def harm(step, state):
        # One bad step in five: each is blocked, and none brings the ladder out.
        bad = inject.Fault(kind="nan", place="parameters", step=step, where="layer_1")
        if step not in (30, 35, 40, 45):
            return state
        kept.append(state)
        return inject.parameters((bad,), step, state[0]), state[1]

    kept = []
    with Session(
        tmp_path / "run", total_steps=60, alerts=[inbox], progress=False
    ) as session:
        state = params, TX.init(params)
        for step, batch in session.steps(state, batch_for_step):
            state, vitals = train_step(harm(step, state), batch, session.controls)
            state = session.end_step(kept.pop() if kept else state, vitals)
    summary = session.summary()
    assert summary["blocked"] == 4 and summary["lost_alerts"] == 0
    skips = [text for text in inbox.texts if ": skip" in text]
    assert len(skips) == 2  # the first, and the rest at the end of the run
    assert skips[1].endswith("2 more since the last message, steps 35 to 40.")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_monitor_never_kills_the_training_and_recovers(tmp_path, params):
    """Threads of the monitor that something kills in the middle of a run."""

    class Doomed(Sink):
        def write_scalars(self, step, scalars):
            if step == 20:
                sys.exit("killed")
            super().write_scalars(step, scalars)

    class DoomedInbox(Inbox):
        def send(self, title, text, severity):
            if not self.texts:
                self.texts.append("")
                sys.exit("killed")
            super().send(title, text, severity)

    def harm(step, state):
        if step in (30, 50):
            session = sessions[0]
            channel = session._reporter.desk._channels[0]
            session._reporter.desk.notify(
                stabil.telemetry.Event(action="skip", step=step, cause=str(step))
            )
            assert channel.flush() or step == 30
        return state

    sink, inbox, sessions = Doomed(), DoomedInbox(), []
    settings = dict(checkpoints=FakeKeeper(20), total_steps=60, progress=False)
    with Session(tmp_path / "run", sinks=[sink], alerts=[inbox], **settings) as session:
        sessions.append(session)
        state = params, TX.init(params)
        for step, batch in session.steps(state, batch_for_step):
            state, vitals = train_step(harm(step, state), batch, session.controls)
            state = session.end_step(state, vitals)
    clean, _ = train(tmp_path / "clean", params, 60)
    assert_same(state, clean)
    assert [step for step, _ in sink.rows] == [s for s in range(60) if s != 20]
    assert session.summary()["lost_scalars"] == 1
    assert session.summary()["lost_alerts"] == 1 and len(inbox.texts) == 2


@pytest.mark.bits
def test_the_default_policy_leaves_a_healthy_run_bit_equal(tmp_path, params):
    with Keeper(tmp_path / "ck", save_every=80) as keeper:
        protected, session = train(tmp_path, params, 200, keeper)
    bare = params, TX.init(params)
    for i in range(200):
        bare, _ = train_step(bare, batch_for_step(i), stabil.Controls.untouched())
    assert_same(protected, bare)
    assert session.summary()["clipped"] == session.summary()["blocked"] == 0


@pytest.mark.slow
def test_two_thousand_steps_of_a_language_model_are_bit_equal_to_bare_adamw(tmp_path):
    """The whole session against a loop that has never heard of stabil."""
    size = _demo_model.Size(layers=2, width=16, heads=2, context=16, batch=16)
    corpus, model = _demo_data.read_corpus(), _demo_model.Gpt(size)
    probed, adamw = stabil.probe(model, where="**"), _demo_model.adamw(size, 2000)
    tx = stabil.guard(adamw)

    def loss_of(params, apply, tokens):
        logits, readings = apply({"params": params}, tokens[:, :-1])
        return _demo_model.cross_entropy(logits, tokens[:, 1:]), readings

    @jax.jit
    def step_fn(state, batch, controls):
        params, opt_state = state
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, readings), grads = grad(params, probed.apply, batch["tokens"])
        seen = dict(loss=loss, readings=readings, controls=controls)
        updates, opt_state = tx.update(grads, opt_state, params, **seen)
        params = optax.apply_updates(params, updates)
        vitals = stabil.vitals(opt_state, params=params, readings=readings)
        return (params, opt_state), vitals

    @jax.jit
    def plain_step(state, batch):
        params, opt_state = state
        apply = lambda *args: (model.apply(*args), None)  # noqa: E731
        grads, _ = jax.grad(loss_of, has_aux=True)(params, apply, batch["tokens"])
        updates, opt_state = adamw.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    start = jax.jit(model.init)(jax.random.key(0), jnp.zeros([1, 16], jnp.int32))
    data = lambda i: _demo_data.batch_at(corpus, size, 0, i)  # noqa: E731
    state, bare = ((start["params"], t.init(start["params"])) for t in (tx, adamw))
    with Keeper(tmp_path / "ck", save_every=500) as keeper:
        with Session(
            tmp_path / "run", checkpoints=keeper, total_steps=2000, progress=False
        ) as session:
            for _, batch in session.steps(state, data):
                state, vitals = step_fn(state, batch, session.controls)
                state = session.end_step(state, vitals)
    for i in range(2000):
        bare = plain_step(bare, data(i))
    assert_same((state[0], state[1].inner_state), bare)
    assert session.summary()["clipped"] == session.summary()["blocked"] == 0
