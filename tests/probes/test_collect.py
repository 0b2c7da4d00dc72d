"""Taps through every transformation: same bits, forward and backward rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stabil.probes import collect, tap

X = jnp.array([0.5, -1.0, 2.0, 0.25])
W = jnp.stack([jnp.eye(4) * i for i in (1.0, 2.0, 3.0)])


def layer(x, w):
    return tap(jnp.tanh(w @ x), "layer"), None


def unrolled(w, x):
    for i in range(3):
        x = layer(x, w[i])[0]
    return x.sum()


def scanned(w, x):
    return jax.lax.scan(layer, x, w)[0].sum()


def checkpointed(w, x):
    return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()


def checkpointed_by_policy(w, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()


def branching(w, x):
    yes, no = (lambda v: tap(2 * v, "yes")), (lambda v: tap(3 * v, "no"))
    return jax.lax.cond(x[0] > 0, yes, no, x).sum()


def jitted(w, x):
    f = jax.jit(lambda v: tap(jnp.sin(v), "f"))
    return f(f(x)).sum()


def batched(w, x):
    return jax.vmap(lambda m: tap(m @ x, "v"))(w).sum()


@jax.custom_vjp
def with_vjp(x):
    return tap(2 * x, "inside")


with_vjp.defvjp(
    lambda x: (tap(2 * x, "inside"), None), lambda _, g: (tap(5 * g, "rule"),)
)


@jax.custom_jvp
def with_jvp(x):
    return tap(2 * x, "inside")


with_jvp.defjvp(lambda p, t: (with_jvp(*p), 5 * t[0]))


def custom_vjp(w, x):
    return tap(with_vjp(x), "out").sum()


def custom_jvp(w, x):
    return tap(with_jvp(x), "out").sum()


LAYERS = ("layer[0]", "layer[1]", "layer[2]")
LAYERS_BACK = ("layer[2]@grad", "layer[1]@grad", "layer[0]@grad")
CASES = {
    unrolled: (
        ("layer", "layer#2", "layer#3"),
        ("layer#3@grad", "layer#2@grad", "layer@grad"),
    ),
    scanned: (LAYERS, LAYERS_BACK),
    checkpointed: (LAYERS, LAYERS_BACK),
    checkpointed_by_policy: (LAYERS, LAYERS_BACK),
    branching: (("no", "yes"), ("no@grad", "yes@grad")),
    jitted: (("f", "f#2"), ("f#2@grad", "f@grad")),
    batched: (("v",), ("v@grad",)),
    custom_vjp: (("inside", "out"), ("out@grad", "rule")),
    custom_jvp: (("inside", "out"), ("out@grad",)),
}


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fn", list(CASES), ids=lambda f: f.__name__)
def test_forward_and_backward_rows(fn):
    forward, backward = CASES[fn]

    @jax.jit
    def run(w, x):
        step = jax.value_and_grad(fn, argnums=(0, 1))
        inside = jax.value_and_grad(collect(fn), argnums=(0, 1), has_aux=True)
        both = collect(step, backward=True, stats="all")(w, x)
        return step(w, x), both, inside(w, x)

    want, (got, both), ((value, inner), grads) = run(W, X)
    assert_same(got, want)
    assert_same((value, grads), want)
    assert inner.names == forward
    assert both.names == forward + backward
    np.testing.assert_array_equal(both["absmax"][: len(forward)], inner["absmax"])


def test_the_coming_checkpoint_leaves_the_same_rows():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has one checkpoint alone")
    step = jax.value_and_grad(checkpointed, argnums=(0, 1))
    jax.config.update("jax_remat3", True)
    try:
        want = jax.jit(step)(W, X)
        got, readings = jax.jit(collect(step, backward=True))(W, X)
    finally:
        jax.config.update("jax_remat3", False)
    assert_same(got, want)
    assert readings.names == LAYERS + LAYERS_BACK


def test_values_of_scanned_layers_and_their_cotangents():
    step = collect(jax.grad(scanned), backward=True, stats="absmax")
    _, readings = jax.jit(step)(W, X)
    c, states = np.asarray(X, np.float64), []
    for w in np.asarray(W, np.float64):
        c = np.tanh(w @ c)
        states.append(c)
    g, cotangents = np.ones(4), []
    for w, c in zip(np.asarray(W)[::-1], states[::-1], strict=True):
        cotangents.append(g)
        g = w.T @ (g * (1 - c**2))
    want = [np.abs(v).max() for v in (*states, *cotangents)]
    np.testing.assert_allclose(readings["absmax"], want, rtol=1e-6)


def test_a_branch_that_did_not_run_is_nan_and_not_counted():
    _, readings = jax.jit(collect(branching))(W, X)
    assert np.isnan(readings.values[0]).all()
    assert readings["nan_count"][1] == 0 and readings["absmax"][1] == 4.0


def test_while_tells_the_last_turn():
    def loop(n, x):
        return jax.lax.fori_loop(0, n, lambda _, v: tap(2 * v, "turn"), x)

    run = jax.jit(collect(loop, stats="absmax"))
    assert run(3, X)[1]["absmax"] == 16.0
    assert np.isnan(run(0, X)[1]["absmax"])


def test_accumulated_gradients_have_rows_by_micro_batch_and_layer():
    def step(w, batch):
        def micro(total, x):
            return total + jax.grad(scanned)(w, x), None

        return jax.lax.scan(micro, jnp.zeros_like(w), batch)[0]

    batch = jnp.stack([X, 2 * X])
    got, readings = jax.jit(collect(step, backward=True))(W, batch)
    np.testing.assert_array_equal(got, jax.jit(step)(W, batch))
    one = tuple(f"layer[0,{i}]" for i in range(3))
    back = tuple(f"layer[0,{i}]@grad" for i in (2, 1, 0))
    assert readings.names[:6] == one + back
    assert readings.names[6] == "layer[1,0]" and len(readings.names) == 12


def test_forward_mode():
    def push(x):
        return jax.jvp(lambda v: scanned(W, v), (x,), (x,))

    got, readings = jax.jit(collect(push))(X)
    assert_same(got, jax.jit(push)(X))
    assert readings.names == LAYERS


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_the_whole_tensor_is_told(rng, check_vma):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = rng.normal(size=(8, 16)).astype(np.float32)
    x[3, 5] = np.nan

    def local(x):
        total = tap(jax.lax.psum(jnp.nan_to_num(x), "data"), "total")
        return tap(2 * x, "doubled") + total

    f = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    got, readings = jax.jit(collect(f, stats="all"))(x)
    np.testing.assert_array_equal(got, jax.jit(f)(x))
    assert readings.names == ("total", "doubled")
    # Without the check nobody knows that the model axis holds copies.
    assert readings["nan_count"][1] == (1 if check_vma else 2)
    np.testing.assert_allclose(readings["std"][1], np.nanstd(2 * x), rtol=1e-6)
    np.testing.assert_allclose(readings["absmax"][1], np.nanmax(np.abs(2 * x)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data"), P("data", None, "model"), P(None, "data")])
def test_sharded_tensors_are_told_whole(rng, kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    x = rng.normal(size=(8, 4, 96)).astype(np.float32) + 5
    x[3, 1, 7] = np.inf
    stats = ("all", "kurtosis") if spec == P("data", None, "model") else "all"

    @jax.jit
    def run(x):
        return collect(lambda x: tap(2 * x, "v"), stats=stats)(x)

    with jax.set_mesh(mesh):
        got, readings = run(jax.device_put(x, jax.NamedSharding(mesh, spec)))
    want = run(x)
    np.testing.assert_array_equal(got, 2 * x)
    values, whole = np.asarray(readings.values), np.asarray(want[1].values)
    np.testing.assert_allclose(values[:, :9], whole[:, :9], rtol=1e-6)
    # The kurtosis is a difference from 3.
    np.testing.assert_allclose(values[:, 9:], whole[:, 9:], atol=1e-5)


def test_shardings_of_an_inner_jit_survive():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("data"))

    @jax.jit
    def outer(x):
        inner = jax.jit(lambda v: tap(2 * v, "v"), out_shardings=sharding)
        return inner(x)

    got, readings = jax.jit(collect(outer))(jnp.ones((8, 4)))
    assert got.sharding.is_equivalent_to(sharding, 2)
    assert readings["absmax"] == 2.0


def test_names_for_the_profiler_survive():
    def f(x):
        with jax.named_scope("outer"):
            return jax.lax.scan(named, x, W)[0]

    def named(x, w):
        with jax.named_scope("inner"):
            return tap(jnp.tanh(w @ x), "v"), None

    text = jax.jit(collect(f)).lower(X).as_text(debug_info=True)
    for name in ("outer/(scan|while)", '"inner/tanh"', '"inner/stabil/'):
        assert re.search(name, text)


def test_the_context_of_an_operation_survives():
    def f(x):
        with set_xla_metadata(mark="kept"):
            x = jax.lax.scan(lambda x, w: (tap(jnp.sin(w @ x), "v"), None), x, W)[0]
        return jnp.cos(x)

    text = jax.jit(collect(f)).lower(X).as_text()
    assert re.search(r'stablehlo.sine .*mark = "kept"', text)
    assert not re.search(r'stablehlo.cosine .*mark = "kept"', text)


def test_a_step_traced_before_is_still_seen():
    @jax.jit
    def step(x):
        return tap(2 * x, "v")

    step(X)
    _, readings = collect(step)(X)
    assert readings.names == ("v",)


def test_uncollected_taps_leave_no_trace_in_the_program():
    plain = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(2 * x))))
    tapped = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(tap(2 * x, "v")))))
    texts = [f.lower(X).compile().as_text() for f in (plain, tapped)]
    bare = [re.sub(r", metadata=\{[^}]*\}", "", t.split("FileNames")[0]) for t in texts]
    count = [len(re.findall(r" = f32\S* (?!parameter)\S+\(", t)) for t in bare]
    assert count[0] == count[1]
    np.testing.assert_array_equal(plain(X), tapped(X))


def test_one_trace_and_no_transfer_per_call():
    traces = []

    def step(x):
        traces.append(1)
        return tap(2 * x, "v")

    run = jax.jit(collect(step))
    run(X)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            run(X)
    assert len(traces) == 1


def test_python_scalars_and_other_objects_stay_what_they_are():
    def f(x, scale, *, training):
        assert isinstance(scale, float) and training is True
        return {"y": tap(x * scale, "y"), "note": "text", "none": None, "n": 3}

    out, _ = collect(f)(X, 2.0, training=True)
    assert out["note"] == "text" and out["none"] is None and out["n"] == 3
    np.testing.assert_array_equal(out["y"], 2 * X)


def test_where_picks_taps_and_pytrees_have_a_row_per_leaf():
    def f(x):
        tree = tap({"a": x, "b": (2 * x, jnp.arange(3))}, "tree")
        return tap(tree["a"], "other")

    _, readings = collect(f, where="tr*")(X)
    assert readings.names == ("tree:a", "tree:b/0")


def test_a_tap_that_cannot_be_read_is_named():
    @jax.custom_batching.custom_vmap
    def rule(x):
        return tap(2 * x, "hidden")

    rule.def_vmap(lambda size, batched, x: (2 * x, batched[0]))
    text = (
        "no statistics from hidden (in custom_vmap_call): values cannot be brought out "
        "of there; tap the result of that call instead, for example "
        "y = stabil.tap(call(x), 'name')"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        out, readings = collect(rule)(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert readings.names == ()


def test_pattern_that_matches_no_tap():
    text = (
        "needed `where` patterns that match a place in the program, got 'mlp'; "
        "places: layer; write for example where='**/mlp*', or where='**' for "
        "everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        collect(scanned, where="mlp")(W, X)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: tap(X, 3),
            "needed `name` as a slash path, got 3; write for example "
            "stabil.tap(x, 'encoder/layer_3')",
        ),
        (
            lambda: collect(3),
            "needed a function to collect from, got 3; write for example "
            "stabil.collect(train_step)",
        ),
    ],
)
def test_refuses_wrong_types(call, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        call()
