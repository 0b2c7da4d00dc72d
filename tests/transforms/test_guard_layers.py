"""What the guard says of layers and devices: named, in proportion, and once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stabil
from stabil.vocabulary import Cause, Severity

pytestmark = pytest.mark.usefixtures("standard_promotion")
STEPS, EVENT, BLOCKS, DEVICES = 300, 120, 5, 4
NAMES = (*(f"block_{i}/mlp" for i in range(BLOCKS)), "attention_logits")
STATISTICS = ("absmax", "std", "kurtosis", "stable_rank", "float16_overflow")
PARAMS = {f"block_{i}": {"kernel": jnp.ones(3)} for i in range(BLOCKS)}


def stream() -> dict[str, np.ndarray]:
    """A healthy run: gradients, losses, and readings of rows and devices."""
    rng = np.random.default_rng(7)
    noise = lambda *shape: np.exp(0.05 * rng.normal(size=shape))  # noqa: E731
    rows = noise(STEPS, len(NAMES), len(STATISTICS)) * [1.0, 0.3, 3.0, 40.0, 0.0]
    own = np.exp(rng.normal(size=(BLOCKS, 1)))
    return {
        "grads": own * noise(STEPS, BLOCKS, 3),
        "loss": 2.0 * noise(STEPS),
        "rows": rows,
        "shards": rows[:, None] * noise(STEPS, DEVICES, 1, 1),
    }


def healthy(run):
    pass


def layer_departs(run):
    run["grads"][EVENT:, 3] *= np.exp(np.linspace(0, 6, STEPS - EVENT))[:, None]


def layer_dies(run):
    run["grads"][EVENT:, 2] = 0.0


def variance_collapses(run):
    run["rows"][EVENT:, 1, 1] *= 1e-4


def tail_grows_heavy(run):
    run["rows"][EVENT, 4, 2] *= 40


def rank_falls(run):
    run["rows"][EVENT:, 0, 3] *= np.geomspace(1, 0.1, STEPS - EVENT)


def logits_grow(run):
    run["rows"][EVENT:, 5, 0] *= np.geomspace(1, 20, STEPS - EVENT)


def format_overflows(run):
    run["rows"][EVENT : EVENT + 30, 2, 4] = 0.01


def device_departs(run):
    run["shards"][EVENT:, 2, 1, 0] *= 10


# Scenario: its causes, its worst severity, and the signal that is named first.
EXPECTED = {
    healthy: ((), Severity.OK, None),
    layer_departs: (
        ("layer_disagreement",),
        Severity.WARN,
        "grads/block_3/kernel",
    ),
    layer_dies: (("dead_layer",), Severity.WARN, "grads/block_2/kernel"),
    variance_collapses: (("dead_layer",), Severity.WARN, "activations/block_1/mlp"),
    tail_grows_heavy: (
        ("activation_shift",),
        Severity.WATCH,
        "activations/block_4/mlp",
    ),
    rank_falls: (("activation_shift",), Severity.WATCH, "activations/block_0/mlp"),
    logits_grow: (("activation_limit",), Severity.WARN, "activations/attention_logits"),
    format_overflows: (("dtype_range",), Severity.WATCH, "activations/block_2/mlp"),
    device_departs: (("replica_disagreement",), Severity.WARN, "devices/2"),
}


@functools.cache
def run_all():
    """Verdicts and clips of every scenario, played side by side in one program."""
    tx = stabil.guard(optax.sgd(1e-3), clip=None, max_readings=len(NAMES))

    def step(state, inputs):
        readings = stabil.Readings(inputs["rows"], NAMES, STATISTICS, inputs["shards"])
        grads = {f"block_{i}": {"kernel": g} for i, g in enumerate(inputs["grads"])}
        _, state = tx.update(
            grads, state, PARAMS, loss=inputs["loss"], readings=readings
        )
        v = stabil.vitals(state, params=PARAMS, readings=readings)
        return state, v

    def play(run):
        state, seen = jax.lax.scan(step, tx.init(PARAMS), run)
        return seen.verdict, stabil.vitals(state), seen

    runs = []
    for edit in EXPECTED:
        runs.append(stream())
        edit(runs[-1])
    stacked = {
        k: jnp.asarray(np.stack([r[k] for r in runs]), jnp.float32) for k in runs[0]
    }
    verdict, last, seen = jax.jit(jax.vmap(play))(stacked)
    return jax.device_get((verdict, last)), seen.signals


@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda f: f.__name__)
def test_what_departs_is_named_in_proportion(scenario):
    causes, worst, first = EXPECTED[scenario]
    (verdict, _), signals = run_all()
    at = list(EXPECTED).index(scenario)
    severity, flags = verdict.severity[at], verdict.flags[at]
    wanted = sum(int(Cause[c.upper()]) for c in causes)
    spoke = np.flatnonzero(flags & wanted)
    assert severity.max() == worst
    assert not np.any(severity[:EVENT])
    if not causes:
        assert not np.any(flags)
        return
    worst_at = spoke[np.argmax(severity[spoke])]
    assert signals[verdict.first[at][worst_at]] == first
    # An event and not a siren: few steps speak of it.
    assert 1 <= len(spoke) <= 6


def test_shadow_thresholds_are_counted_and_do_nothing():
    (_, last), _ = run_all()
    steps = last.shadow.steps
    assert steps.shape == (len(EXPECTED), 3, 5)
    assert np.all(np.diff(steps, axis=1) <= 0)  # a higher threshold fires less
    quiet = list(EXPECTED).index(healthy)
    assert np.all(steps[quiet, 1:] == 0)
    departed = list(EXPECTED).index(layer_departs)
    assert steps[departed, 0, 2] > steps[quiet, 0, 2]
    one = last.shadow._replace(thresholds=last.shadow.thresholds[0], steps=steps[0])
    assert one.scalars()["shadow/activations/over_12"] == 0
