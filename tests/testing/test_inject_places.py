"""Faults in trees: batch, loss, gradients, parameters, moments."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stabil.testing import inject

TREE = {
    "block_0": {"mlp": {"kernel": jnp.full([4, 8], 0.5), "bias": jnp.full([8], 0.5)}},
    "block_1": {"mlp": {"kernel": jnp.full([4, 8], 0.5), "bias": jnp.full([8], 0.5)}},
    "fast_mlp": {"kernel": jnp.full([4], 0.5)},
}


def fault(**fields):
    return inject.Fault(**{"kind": "scale", "place": "gradients", "step": 3} | fields)


def changed(before, after):
    """Paths of the leaves that differ; NaN differs from everything."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, old), new in pairs
        if not np.array_equal(np.asarray(old), np.asarray(new))
    ]


@pytest.mark.parametrize(
    ("where", "struck"),
    [
        ("block_1/mlp/kernel", ["block_1/mlp/kernel"]),
        ("mlp/kernel", ["block_0/mlp/kernel", "block_1/mlp/kernel"]),
        ("block_0", ["block_0/mlp/bias", "block_0/mlp/kernel"]),
        ("fast_mlp", ["fast_mlp/kernel"]),
    ],
)
def test_where_meets_whole_components(where, struck):
    assert changed(TREE, inject.gradients((fault(where=where),), 3, TREE)) == struck


def test_empty_where_strikes_every_leaf():
    assert len(changed(TREE, inject.gradients((fault(),), 3, TREE))) == 5


@pytest.mark.parametrize("step", [0, 2, 5, 100])
def test_a_step_without_fault_hands_back_the_same_object(step):
    assert inject.gradients((fault(duration=2),), step, TREE) is TREE


IN_TREES = [
    p for p in inject.PLACES if p not in inject.HOST_KINDS and p != "activations"
]


@pytest.mark.parametrize("place", IN_TREES)
def test_a_fault_strikes_its_own_place_alone(place):
    function = getattr(inject, place)
    for other in IN_TREES:
        struck = function((fault(place=other, where="block_0"),), 3, TREE) is not TREE
        assert struck == (other == place)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("nan", None, np.nan),
        ("inf", None, np.inf),
        ("scale", None, 500.0),
        ("scale", -2.0, -1.0),
        ("bit_flip", 31, -0.5),
        ("bit_flip", None, 2.0**127),
    ],
)
def test_kinds_in_float32(kind, size, expected):
    out = inject.loss(
        (fault(kind=kind, place="loss", size=size),), 3, jnp.full([], 0.5)
    )
    np.testing.assert_array_equal(out, np.float32(expected))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32])
@pytest.mark.parametrize("kind", inject.KINDS)
def test_shape_and_dtype_stay(kind, dtype):
    x = jnp.ones([3, 5], dtype)
    if dtype == jnp.int32 and kind in ("nan", "inf", "scale"):
        return
    size = 9.0 if kind == "garbage" else None
    out = inject.gradients((fault(kind=kind, size=size),), 3, x)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert not np.array_equal(np.asarray(out), np.asarray(x))


def test_garbage_has_the_asked_spread_and_bound():
    wild = fault(kind="garbage", size=50.0)
    floats = np.asarray(inject.gradients((wild,), 3, jnp.zeros([10_000])))
    assert 48 < floats.std() < 52
    tokens = inject.gradients((wild,), 3, np.zeros([10_000], np.uint8))
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8
    assert tokens.min() == 0 and tokens.max() == 49


@pytest.mark.parametrize("entries", [1, 7, 31])
def test_entries_counts_distinct_coordinates(entries):
    out = inject.gradients((fault(entries=entries),), 3, jnp.ones([4, 8]))
    assert int((np.asarray(out) == 1000).sum()) == entries


def test_draws_depend_on_seed_step_and_leaf_and_nothing_else():
    burst = fault(kind="garbage", duration=9)
    x = {"a": jnp.zeros([16]), "b": jnp.zeros([16])}
    first = inject.gradients((burst,), 3, x)
    np.random.seed(7)
    again = inject.gradients((burst,), 3, x)
    assert changed(first, again) == []
    assert changed(first, inject.gradients((burst,), 4, x)) == ["a", "b"]
    other = fault(kind="garbage", duration=9, seed=1)
    assert changed(first, inject.gradients((other,), 3, x)) == ["a", "b"]
    assert not np.array_equal(first["a"], first["b"])


def test_another_process_plants_the_same():
    code = (
        "import jax.numpy as jnp\n"
        "from stabil.testing import inject\n"
        "f = inject.Fault(kind='garbage', place='gradients', step=3, entries=4)\n"
        "print(inject.gradients((f,), 3, {'w': jnp.zeros([32])})['w'].tolist())"
    )
    env = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "99", "PATH": ""}
    there = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    here = fault(kind="garbage", entries=4)
    here = inject.gradients((here,), 3, {"w": jnp.zeros([32])})["w"]
    assert there.stdout.strip() == str(here.tolist())


@pytest.mark.parametrize("kind", inject.KINDS)
def test_one_compile_serves_all_steps_and_equals_the_step_between(kind):
    schedule = (fault(kind=kind, duration=2, entries=3, where="block_0"),)
    traces = 0

    @jax.jit
    def inside(step, tree):
        nonlocal traces
        traces += 1
        return inject.gradients(schedule, step, tree)

    for step in range(1, 7):
        between = inject.gradients(schedule, step, TREE)
        after = inside(jnp.int32(step), TREE)
        same = jax.tree.map(
            lambda a, b: np.array_equal(a, b, equal_nan=True), between, after
        )
        assert all(jax.tree.leaves(same))
        assert bool(changed(TREE, after)) == (step in (3, 4))
    assert traces == 1


def test_works_in_scan_and_vmap():
    schedule = (fault(kind="nan", entries=1),)

    def body(carry, step):
        return carry, inject.gradients(schedule, step, jnp.ones([4]))

    _, scanned = jax.lax.scan(body, 0, jnp.arange(6))
    mapped = jax.vmap(lambda s: inject.gradients(schedule, s, jnp.ones([4])))(
        jnp.arange(6)
    )
    for out in (scanned, mapped):
        bad = np.isnan(np.asarray(out)).sum(1)
        assert bad.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.bits
def test_an_idle_schedule_leaves_training_bit_equal():
    tx = optax.adamw(1e-2)
    schedule = (fault(step=10_000), fault(place="loss", step=10_000))

    def step(schedule):
        def body(carry, i):
            params, opt_state = carry

            def objective(p):
                x = jnp.sin(jnp.arange(12.0) * (i + 1).astype(jnp.float32))
                return jnp.sum(jnp.square(jnp.tanh(x.reshape(3, 4) @ p) - 0.3))

            loss, grads = jax.value_and_grad(objective)(params)
            loss = inject.loss(schedule, i, loss)
            grads = inject.gradients(schedule, i, grads)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(50)))

    params = jnp.linspace(-1, 1, 20).reshape(4, 5)
    start = (params, tx.init(params))
    assert changed(step(())(start), step(schedule)(start)) == []


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    ],
    ids=["adamw", "chain", "multi_steps", "inject_hyperparams"],
)
def test_moments_of_any_optax_state(tx):
    garbage = fault(
        kind="garbage", place="moments", where="mu/block_1/mlp/kernel", size=10.0
    )
    before = tx.init(TREE)
    (struck,) = changed(before, inject.moments((garbage,), 3, before))
    assert struck.endswith("mu/block_1/mlp/kernel")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "zero"},
            "needed kind to be one of nan, inf, bit_flip, scale, garbage, got 'zero'",
        ),
        (
            {"place": "gradient"},
            "needed place to be one of batch, activations, loss, gradients, "
            "parameters, moments, checkpoint, process, disk, alerts, got 'gradient'",
        ),
        ({"step": -1}, "needed step to be an integer of at least 0, got -1"),
        ({"step": 1.5}, "needed step to be an integer of at least 0, got 1.5"),
        ({"duration": 0}, "needed duration to be an integer of at least 1, got 0"),
        ({"entries": -2}, "needed entries to be an integer of at least 0, got -2"),
        (
            {"kind": "bit_flip", "size": 0.5},
            "needed size to be an integer of at least 0 for a bit_flip, the bit's "
            "position, got 0.5",
        ),
        (
            {"place": "moments"},
            "needed where=, the moment to strike, got ''; write the end of its path "
            "in the optimizer's state, for example where='mu/mlp/kernel'",
        ),
    ],
)
def test_a_bad_fault_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fault(**fields)


def test_a_leaf_that_does_not_exist():
    message = (
        "needed a leaf of the gradients whose path holds 'block_7', got none; the "
        "leaves are block_0/mlp/bias, block_0/mlp/kernel, block_1/mlp/bias, "
        "block_1/mlp/kernel, fast_mlp/kernel"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.gradients((fault(where="block_7"),), 3, TREE)
    with pytest.raises(ValueError) as caught:
        jax.jit(lambda s: inject.gradients((fault(where="block_7"),), s, TREE))(0)
    assert str(caught.value) == message


def test_a_leaf_that_does_not_take_the_kind():
    message = (
        "needed a leaf that nan can strike, got tokens (uint8); integers take "
        "bit_flip and garbage, complex numbers all but bit_flip, floats every kind"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.batch(
            (fault(kind="nan", place="batch"),), 3, {"tokens": np.zeros(2, np.uint8)}
        )


def test_integer_garbage_needs_a_bound():
    message = (
        "needed size=, the exclusive upper bound of garbage in uint8 entries, got "
        "None; write the size of the vocabulary, for example size=256"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.batch((fault(kind="garbage", place="batch"),), 3, np.zeros(2, np.uint8))


def test_a_bit_beyond_the_entry():
    message = "needed size= below 16, a bit of float16, got 16; the lowest bit is 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.loss(
            (fault(kind="bit_flip", place="loss", size=16),),
            3,
            jnp.ones([], jnp.float16),
        )


def test_a_schedule_of_something_else():
    message = (
        "needed a schedule of stabil.testing.inject.Fault, got dict; write "
        "inject.Fault(kind=..., place=..., step=...)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        inject.loss(({"kind": "nan"},), 3, jnp.ones([]))


def test_a_fault_reads_as_a_sentence():
    assert str(fault(where="mlp")) == "scale in gradients mlp at step 3"
    assert str(fault(duration=4)) == "scale in gradients at steps 3 to 6"
