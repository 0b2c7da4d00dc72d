"""A dial: one compile for every fault, and the same strikes as its fault."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stabil
from stabil.testing import inject

TREE = {
    "a": {"kernel": jnp.full([4, 8], 0.5), "bias": jnp.full([8], 0.5)},
    "b": {"kernel": jnp.full([4, 8], 0.5), "steps": jnp.zeros([], jnp.int32)},
}
NAMES = inject.names_in("gradients", TREE)


@jax.jit
def strike(dial, step):
    return inject.gradients(dial, step, TREE)


def fault(**fields):
    return inject.Fault(**{"kind": "scale", "place": "gradients", "step": 3} | fields)


def leaves(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda p: jax.tree_util.keystr(p, simple=True, separator="/")  # noqa: E731
    return {name(path): np.asarray(leaf) for path, leaf in pairs}


@pytest.mark.parametrize("kind", inject.KINDS)
@pytest.mark.parametrize("where", ["a", "b/kernel"])
def test_it_strikes_what_its_fault_strikes(kind, where):
    planted = fault(kind=kind, where=where, duration=2, size=4)
    dial = inject.Dial.of(planted, NAMES)
    for step in (2, 3, 4, 5):
        due = inject.gradients((planted,), step, TREE)
        pairs = zip(leaves(due).items(), leaves(strike(dial, step)).values())  # noqa: B905
        for (name, expected), found in pairs:
            assert found.dtype == expected.dtype and found.shape == expected.shape
            if kind == "garbage" and not np.array_equal(expected, leaves(TREE)[name]):
                assert not np.array_equal(found, leaves(TREE)[name])
            else:
                np.testing.assert_array_equal(found, expected)
    assert strike._cache_size() == 1


@pytest.mark.parametrize("entries", [1, 5])
def test_entries_are_counted_in_each_leaf(entries):
    struck = strike(inject.Dial.of(fault(where="a", entries=entries), NAMES), 3)
    for name, before in leaves(TREE).items():
        expected = entries if name.startswith("a/") else 0
        assert int((leaves(struck)[name] != before).sum()) == expected


def test_seed_and_step_decide_the_draws():
    def drawn(seed, step):
        planted = fault(kind="garbage", where="a", duration=9, seed=seed)
        return leaves(strike(inject.Dial.of(planted, NAMES), step))["a/kernel"]

    np.testing.assert_array_equal(drawn(1, 4), drawn(1, 4))
    assert not np.array_equal(drawn(1, 4), drawn(2, 4))
    assert not np.array_equal(drawn(1, 4), drawn(1, 5))


def test_without_a_fault_it_is_idle():
    for step in (0, 3):
        out = leaves(strike(inject.Dial.of(None, NAMES), step))
        for name, before in leaves(TREE).items():
            np.testing.assert_array_equal(out[name], before)


def test_garbage_in_integers_stays_below_its_size():
    tokens = {"tokens": jnp.zeros([1000], jnp.uint8)}
    planted = fault(kind="garbage", place="batch", size=9.0)
    dial = inject.Dial.of(planted, inject.names_in("batch", tokens))
    out = np.asarray(inject.batch(dial, 3, tokens)["tokens"])
    assert out.dtype == np.uint8 and out.max() == 8


def test_a_module_is_struck_below_a_probe():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="down")(nn.relu(nn.Dense(4, name="up")(x)))

    x = jnp.ones([2, 4])
    params = Model().init(jax.random.key(0), x)
    probed = stabil.probe(Model(), where="**")
    names = inject.names_in("activations", ("up", "down", ""))

    @jax.jit
    def run(dial, step):
        with inject.activations(dial, step):
            return probed.apply(params, x)[1]

    for where, hit in (("down", ["down", "Model"]), ("up", ["up", "down", "Model"])):
        planted = fault(kind="nan", place="activations", where=where)
        readings = run(inject.Dial.of(planted, names), 3)
        bad = np.asarray(readings["nan_count"]) > 0
        assert [n for n, b in zip(readings.names, bad, strict=True) if b] == hit
    assert not np.asarray(run(inject.Dial.of(None, names), 3)["nan_count"]).any()
    assert run._cache_size() == 1


def test_what_it_refuses():
    message = (
        "needed a name that scale in gradients c at step 3 strikes, got 4 names and "
        "none of them; take them from inject.names_in(place, tree)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.Dial.of(fault(where="c"), NAMES)
    message = (
        "needed a fault of whole arrays for a dial, got scale in gradients on device 1 "
        "at step 3; plant it with a schedule, between steps"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inject.Dial.of(fault(device=1), NAMES)


def test_garbage_has_the_asked_spread_and_no_pattern():
    grads = {"w": jnp.zeros([20_000])}
    planted = fault(kind="garbage", size=50.0)
    dial = inject.Dial.of(planted, inject.names_in("gradients", grads))
    x = np.asarray(inject.gradients(dial, 3, grads)["w"])
    assert abs(x.std() - 50) < 1 and abs(x.mean()) < 1.5
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.03
    assert len(np.unique(x)) > 18_000
