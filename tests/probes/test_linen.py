"""Probed Linen models: the same model, and a row for each module."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

from stabil.probes import collect, probe, tap
from stabil.vocabulary import Controls

X = np.random.default_rng(7).normal(size=(4, 8)).astype(np.float32)
LIFTED = {"params": 0}
BLOCK = ("up", "down")


class Block(nn.Module):
    """A small residual block."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(16, name="up", dtype=self.dtype)(x))
        return x + nn.Dense(x.shape[-1], name="down", dtype=self.dtype)(h)


class Layer(nn.Module):
    """A block with a carry, for scan."""

    @nn.compact
    def __call__(self, x, _=None):
        return Block(name="block")(x), None


class Net(nn.Module):
    """Runs a function of the module and its input."""

    body: callable

    @nn.compact
    def __call__(self, x):
        return self.body(self, x)


def _scan(layer, axes=None, **kwargs):
    axes = LIFTED if axes is None else axes
    rngs = {"params": True}
    return nn.scan(layer, variable_axes=axes, split_rngs=rngs, length=3, **kwargs)


def _two(block):
    return Net(lambda _, x: block(name="b1")(block(name="b0")(x)))


def _twice(block):
    def body(_, x):
        shared = block(name="b")
        return shared(shared(x))

    return Net(body)


def _experts(_, x):
    lifted = nn.vmap(Block, variable_axes=LIFTED, split_rngs={"params": True})
    return lifted(name="experts")(x)


def _negative(variables):
    return jax.tree.map(jnp.negative, variables)


class Noted(nn.Module):
    """A layer that keeps notes of its own, and boxes its parameter."""

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.with_partitioning(nn.initializers.ones_init(), ("model",))
        x = x * self.param("scale", init, (8,))
        nn.Dense(8, name="unused")(x)
        self.sow("intermediates", "note", jnp.sum(x))
        return x, None


def noted(_, x, axes=None):
    metadata = {nn.PARTITION_NAME: "layer"}
    return _scan(Noted, axes, metadata_params=metadata)(name="n")(x, None)[0]


class Branches(nn.Module):
    """Different modules on the two sides of a condition."""

    def setup(self):
        self.first = nn.Dense(8)
        self.second = nn.Dense(8)

    def __call__(self, x):
        if self.is_initializing():
            return self.first(x) + self.second(x)
        return nn.cond(
            x[0, 0] > 0,
            lambda m, x: m.first(x),
            lambda m, x: m.second(m.second(x)),
            self,
            x,
        )


class CustomGradient(nn.Module):
    """A module with a derivative rule of its own."""

    @nn.compact
    def __call__(self, x):
        def forward(module, x):
            return nn.vjp(lambda m, x: m(x), module, x)

        def backward(vjp, g):
            grads, g = vjp(g)
            return jax.tree.map(lambda v: 2 * v, grads), g

        rule = nn.custom_vjp(lambda m, x: m(x), forward, backward)
        return rule(nn.Dense(8), x)


class Nested(nn.Module):
    """A functional apply inside a module."""

    @nn.compact
    def __call__(self, x):
        block = Block(parent=None)
        return block.apply(self.param("inner", lambda key: block.init(key, x)), x)


class ScannedApply(nn.Module):
    """A functional apply inside a plain scan, over stacked parameters."""

    @nn.compact
    def __call__(self, x):
        block = Block(parent=None)

        def make(key):
            return jax.vmap(lambda k: block.init(k, x))(jax.random.split(key, 3))

        stacked = self.param("stacked", make)
        return jax.lax.scan(lambda x, v: (block.apply(v, x), None), x, stacked)[0]


class Remat(nn.Module):
    """A checkpointed method."""

    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


TWO = (*(f"b0/{n}" for n in BLOCK), "b0", *(f"b1/{n}" for n in BLOCK), "b1", "Net")
TWICE = (*(f"b/{n}" for n in BLOCK), "b", *(f"b/{n}#2" for n in BLOCK), "b#2", "Net")


def _layers():
    per = (*(f"layers/block/{n}" for n in BLOCK), "layers/block", "layers")
    return (*(f"{name}[{i}]" for i in range(3) for name in per), "Net")


REMAT_SCAN = tuple(
    f"{name}[{i},{j}]"
    for i in range(2)
    for j in range(2)
    for name in (*(f"r/{n}" for n in BLOCK), "r")
)
MODELS = {
    "plain": (_two(Block), TWO),
    "jit": (_two(nn.jit(Block)), TWO),
    "remat": (_two(nn.remat(Block)), TWO),
    "remat with a policy": (
        _two(nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)),
        TWO,
    ),
    "shared": (_twice(Block), TWICE),
    "shared jit": (_twice(nn.jit(Block)), TWICE),
    "scan": (Net(lambda _, x: _scan(Layer)(name="layers")(x, None)[0]), _layers()),
    "scan of remat": (
        Net(lambda _, x: _scan(nn.remat(Layer))(name="layers")(x, None)[0]),
        _layers(),
    ),
    "remat_scan": (
        Net(lambda _, x: nn.remat_scan(Block, lengths=(2, 2))(name="r")(x)),
        (*REMAT_SCAN, "Net"),
    ),
    "vmap": (
        Net(_experts),
        (*(f"experts/{n}" for n in BLOCK), "experts", "Net"),
    ),
    "cond": (Branches(), ("second", "second#2", "first", "Branches")),
    "custom_vjp": (CustomGradient(), ("Dense_0", "CustomGradient")),
    "nested apply": (
        Nested(),
        (*(f"Nested/Block/{n}" for n in BLOCK), "Nested/Block", "Nested"),
    ),
    "scanned apply": (
        ScannedApply(),
        (
            *(
                f"ScannedApply/Block{n}[{i}]"
                for i in range(3)
                for n in (*(f"/{n}" for n in BLOCK), "")
            ),
            "ScannedApply",
        ),
    ),
    "map_variables": (
        Net(
            lambda _, x: nn.map_variables(Block, "params", _negative, init=True)(
                name="b"
            )(x)
        ),
        (*(f"b/{n}" for n in BLOCK), "b", "Net"),
    ),
    "checkpointed method": (Remat(), ("Dense_0", "Remat")),
}


def _variables(model, *args):
    """Variables of the right shapes, without compiling the initialiser."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *(args or (X,)))
    rng = np.random.default_rng(3)

    def draw(s):
        return jnp.asarray(rng.normal(size=s.shape) * s.shape[-1] ** -0.5, s.dtype)

    return jax.tree.map(draw, shapes)


def _assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _loss(apply, variables, x):
    out = apply(variables, x)
    y, readings = out if isinstance(out, tuple) else (out, None)
    return jnp.sum(jnp.square(y)), readings


@pytest.mark.bits
@pytest.mark.parametrize("name", list(MODELS))
def test_rows_and_bits_through_every_wrapper(name):
    model, names = MODELS[name]
    probed = probe(model, where="**")
    variables = _variables(model)

    def run(apply):
        grad = jax.value_and_grad(lambda v, x: _loss(apply, v, x), has_aux=True)
        return jax.jit(grad)(variables, X)

    (want, _), want_grads = run(model.apply)
    (got, readings), grads = run(probed.apply)
    _assert_same((got, grads), (want, want_grads))
    assert readings.names == names
    assert readings.statistics == ("nan_count", "inf_count", "absmax", "rms")
    assert readings.values.shape == (len(names), 4)
    assert readings.values.dtype == jnp.float32
    y = np.asarray(model.apply(variables, X), np.float64)
    last = [0, 0, np.abs(y).max(), np.sqrt(np.mean(y**2))]
    np.testing.assert_allclose(readings.values[-1], last, rtol=1e-5)
    idle = [n for n, c in zip(names, readings["nan_count"], strict=True) if c != 0]
    assert idle == (["second", "second#2"] if name == "cond" else [])


def test_init_is_the_models_own():
    model, key = Net(noted), jax.random.key(5)
    # In programs of their own: in one the compiler would merge what is the same.
    want, got = (jax.jit(m.init)(key, X) for m in (model, probe(model)))
    _assert_same(got, want)
    assert set(want) == {"params"}


def test_rows_hold_the_statistics_of_the_outputs():
    model, names = MODELS["plain"]
    variables = _variables(model)
    keep = jax.jit(lambda v: model.apply(v, X, capture_intermediates=True)[1])
    kept = keep(variables)
    _, readings = jax.jit(probe(model, stats="all", where="**").apply)(variables, X)
    for name, row in zip(names, np.asarray(readings.values), strict=True):
        at = kept["intermediates"]
        for part in () if name == "Net" else name.split("/"):
            at = at[part]
        y = np.asarray(at["__call__"][0], np.float64)
        want = [y.min(), y.max(), np.abs(y).max(), y.mean(), y.std()]
        np.testing.assert_allclose(row[3:8], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row[8], np.sqrt(np.mean(y**2)), rtol=1e-5)


def test_layers_of_a_scan_are_told_apart():
    model, _ = MODELS["scan"]
    variables = _variables(model)
    spoilt = jax.tree.map(lambda x: x, variables)
    kernel = spoilt["params"]["layers"]["block"]["up"]["kernel"]
    spoilt["params"]["layers"]["block"]["up"]["kernel"] = kernel.at[1, 0, 0].set(
        jnp.nan
    )
    _, readings = jax.jit(probe(model, where="**").apply)(spoilt, X)
    bad = [n for n, c in zip(readings.names, readings["nan_count"], strict=True) if c]
    assert bad[0] == "layers/block/up[1]"
    assert "layers/block/up[0]" not in bad


@pytest.mark.bits
@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [
        (jnp.float32, lambda block: block),
        (jnp.bfloat16, nn.remat),
        (jnp.float16, lambda block: block),
    ],
)
def test_training_is_bit_identical(dtype, wrap):
    block = wrap(Block)
    model = Net(lambda _, x: block(dtype, name="b1")(block(dtype, name="b0")(x)))
    tx = optax.adamw(1e-2)

    def train(apply):
        def step(carry, _):
            params, state = carry
            x = jnp.asarray(X, dtype)

            def loss(params):
                value, readings = _loss(apply, params, x)
                return value.astype(jnp.float32), readings

            grads, readings = jax.grad(loss, has_aux=True)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), readings

        @jax.jit
        def run():
            params = _variables(model)
            return jax.lax.scan(step, (params, tx.init(params)), None, length=5)

        return run()

    # Neither AdamW nor the layer norm is clean under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        want, _ = train(model.apply)
        got, readings = train(probe(model, stats="all", inputs=True, where="**").apply)
    _assert_same(got, want)
    assert readings.values.shape[0] == 5
    assert np.isfinite(readings.values).all()


class Rich(nn.Module):
    """Setup style, extra methods, state, random numbers, mixed outputs."""

    def setup(self):
        self.embed = nn.Embed(5, 8)
        self.norm = nn.BatchNorm(use_running_average=False)
        self.drop = nn.Dropout(0.5, deterministic=False)

    def encode(self, tokens):
        h = self.embed(tokens)
        return {"h": h, "ids": tokens, "pair": (2 * h, None)}

    def __call__(self, tokens):
        h = self.drop(self.norm(self.encode(tokens)["h"]))
        self.sow("intermediates", "kept", h)
        return self.embed.attend(h), h


RICH = (
    *("embed", "Rich.encode:h", "Rich.encode:pair/0", "norm", "drop"),
    *("embed.attend", "Rich:0", "Rich:1"),
)


@pytest.fixture(scope="module")
def rich():
    """The model, its variables and tokens."""
    model, tokens = Rich(), jnp.arange(4)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return model, jax.jit(model.init)(keys, tokens), tokens


MUTABLE = (("batch_stats",), "batch_stats", ("batch_stats", "intermediates"), True)


def test_state_random_numbers_and_methods_are_untouched(rich):
    model, variables, tokens = rich
    names = []

    def run(apply, read):
        def every(v):
            rngs, outs = {"dropout": jax.random.key(2)}, []
            for mutable in MUTABLE:
                given = list(mutable) if isinstance(mutable, tuple) else mutable
                outs.append(read(apply(v, tokens, rngs=rngs, mutable=given)))
            return outs

        # In programs of their own: in one the compiler would merge what is the same.
        return jax.jit(every)(variables)

    def first(out):
        names.append(out[1].names)
        return out[0]

    probed = probe(model, where="**")
    _assert_same(run(probed.apply, first), run(model.apply, lambda out: out))
    assert names == [RICH] * 4


def test_another_method_and_inputs(rich):
    model, variables, tokens = rich
    probed = probe(model, where="**/Rich", inputs=True)
    encode = jax.jit(lambda v: probed.apply(v, tokens, method="encode"))
    out, readings = encode(variables)
    assert set(out) == {"h", "ids", "pair"}
    assert readings.names == ("Rich.encode:h", "Rich.encode:pair/0")
    dense = nn.Dense(3)
    probed = probe(dense, inputs=True, where="**")
    _, readings = jax.jit(probed.apply)(_variables(dense), X)
    assert readings.names == ("Dense@input", "Dense")
    np.testing.assert_allclose(readings["absmax"][0], np.abs(X).max())


def test_nothing_is_left_in_the_variables_and_nothing_retraces():
    model, _ = MODELS["scan"]
    variables = _variables(model)
    assert set(variables) == {"params"}
    probed, traces = probe(model, where="**"), []

    @jax.jit
    def step(variables, x):
        traces.append(1)
        (y, new), readings = probed.apply(variables, x, mutable=["cache"])
        return y, {**variables, **new}, readings

    for _ in range(4):
        _, variables, readings = step(variables, X)
        assert readings.values.shape == (13, 4)
    assert len(traces) == 1
    assert set(variables) == {"params"}


def test_two_probes_do_not_share_a_trace():
    model, names = MODELS["jit"]
    variables = _variables(model)
    absmax = probe(model, stats="absmax", where="**")
    moments = probe(model, stats=("std", "mean"), where="b1/**")
    jax.jit(model.apply)(variables, X)
    _, first = jax.jit(absmax.apply)(variables, X)
    _, second = jax.jit(moments.apply)(variables, X)
    _, again = jax.jit(lambda v, x: absmax.apply(v, x))(variables, X)
    assert first.names == names and first.statistics == ("absmax",)
    assert second.names == names[3:6] and second.statistics == ("mean", "std")
    assert again.names == names
    np.testing.assert_array_equal(first.values, again.values)


def test_vmap_of_apply_adds_an_axis():
    model, names = MODELS["plain"]
    variables = _variables(model)
    probed = probe(model, where="**")
    _, readings = jax.vmap(probed.apply, in_axes=(None, 0))(variables, X[:, None])
    assert readings.values.shape == (4, len(names), 4)
    assert readings["absmax"].shape == (4, len(names))


@pytest.mark.parametrize("axes", [{"params": 0}, {"params": 0, "intermediates": 0}])
def test_collections_of_the_models_own_boxes_and_dead_code(axes):
    model = Net(lambda module, x: noted(module, x, axes))
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert isinstance(variables["params"]["n"]["scale"], nn.Partitioned)

    def run(apply):
        return lambda v: apply(v, X, mutable=["intermediates"])

    want = jax.eval_shape(run(model.apply), variables)
    got, readings = jax.eval_shape(run(probe(model, where="**").apply), variables)
    assert got == want
    assert ("intermediates" in got[1]) == ("intermediates" in axes)
    per = ("n/unused", "n")
    assert readings.names == (*(f"{n}[{i}]" for i in range(3) for n in per), "Net")


class Inner(nnx.Module):
    """An NNX layer with a checkpointed part."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.first(x) + nnx.remat(lambda m, x: m(x))(self.second, x)


class Shell(nn.Module):
    """A Linen layer around it."""

    @nn.compact
    def __call__(self, x, _=None):
        return nnx.bridge.ToLinen(Inner, name="inner")(x), None


def test_nnx_modules_inside_linen_ones():
    model = Net(lambda _, x: _scan(nn.remat(Shell))(name="layers")(x, None)[0])
    variables = jax.jit(model.init)(jax.random.key(0), X)
    probed = probe(model, where=nnx.Linear)

    def run(apply):
        grad = jax.value_and_grad(lambda v, x: _loss(apply, v, x), has_aux=True)
        return jax.jit(grad)(variables, X)

    (want, _), want_grads = run(model.apply)
    (got, readings), grads = run(probed.apply)
    _assert_same((got, grads), (want, want_grads))
    per = ("layers/inner/first", "layers/inner/second")
    assert readings.names == tuple(f"{n}[{i}]" for i in range(3) for n in per)
    everywhere = probe(model, where="**")
    _, everything = jax.eval_shape(everywhere.apply, variables, X)
    per = (*per, "layers/inner", "layers")
    names = (*(f"{n}[{i}]" for i in range(3) for n in per), "Net")
    assert everything.names == names


class OwnApply(Block):
    """A model whose `apply` is its own."""

    def apply(self, *args, **kwargs):
        return nn.Module.apply(self, *args, **kwargs)


def test_a_model_with_its_own_apply():
    probed = probe(OwnApply(), where="**")
    _, readings = jax.eval_shape(probed.apply, _variables(Block()), X)
    assert readings.names == (*BLOCK, "OwnApply")


class Inherited(Block):
    """Calls the method that it overrides."""

    @nn.compact
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_super_call_is_one_row():
    model = Inherited()
    y, readings = jax.jit(probe(model, where="*").apply)(_variables(model), X)
    assert readings.names == (*BLOCK, "Inherited")
    np.testing.assert_allclose(readings["absmax"][-1], jnp.abs(y).max())


class Loop(nn.Module):
    """A while loop around a module."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8, kernel_init=nn.initializers.constant(0.25))
        if self.is_initializing():
            return dense(x)

        def turn(module, carry):
            return carry[0] + 1, module(carry[1])

        start = (jnp.zeros([], jnp.int32), x)
        return nn.while_loop(lambda _, c: c[0] < 3, turn, dense, start)[1]


def test_while_loop_tells_its_last_turn():
    variables = _variables(Loop())
    y, readings = jax.jit(probe(Loop(), where="**").apply)(variables, X)
    assert readings.names == ("Dense_0", "Loop")
    np.testing.assert_array_equal(readings.values[0], readings.values[1])
    np.testing.assert_allclose(readings["absmax"][0], np.abs(y).max())


def test_a_scan_over_time_is_one_row():
    model = nn.RNN(nn.SimpleCell(4))
    x = np.random.default_rng(0).normal(size=(1, 130, 3)).astype(np.float32)
    variables = _variables(model, x)
    probed = probe(model, where="cell", stats="all")
    y, readings = jax.jit(probed.apply)(variables, x)
    assert readings.names == ("cell:0", "cell:1")
    want = [y.min(), y.max(), np.abs(y).max(), y.mean(), y.std()]
    np.testing.assert_allclose(readings.values[1, 3:8], want, rtol=2e-5)


def test_cotangents_through_collect():
    model, _ = MODELS["scan of remat"]
    variables = _variables(model)
    probed = probe(model, where=("layers", "Net"), backward=True)

    def loss(variables, shift):
        y, readings = probed.apply(variables, X)
        return jnp.sum((y + shift) ** 2), readings

    def step(apply):
        grad = jax.value_and_grad(apply, has_aux=True)
        return grad(variables, jnp.zeros_like(X))

    (value, inner), grads = jax.jit(lambda: step(loss))()
    collected = collect(step, stats="absmax", backward=True)
    ((again, _), same), readings = jax.jit(lambda: collected(loss))()
    _assert_same((again, same), (value, grads))
    forward = ("layers[0]", "layers[1]", "layers[2]", "Net")
    assert inner.names == forward
    backward = tuple(f"{name}@grad" for name in reversed(forward))
    assert readings.names == forward + backward
    y = np.asarray(model.apply(variables, X))
    np.testing.assert_allclose(readings["absmax"][4], 2 * np.abs(y).max(), rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["shared jit", "vmap", "remat_scan", "cond", "custom_vjp", "scanned apply"]
)
def test_cotangents_through_every_wrapper(name):
    model, names = MODELS[name]
    apply = probe(model, where="**", backward=True).apply
    step = jax.grad(lambda v: _loss(apply, v, X)[0])
    _, readings = jax.eval_shape(collect(step, backward=True), _variables(model))
    n = len(names)
    assert readings.names[:n] == names
    assert set(readings.names[n:]) == {f"{name}@grad" for name in names}


def test_cotangents_within_a_derivative_rule():
    model, _ = MODELS["custom_vjp"]
    variables, probed = _variables(model), probe(model, where="**", backward=True)

    def step(apply):
        return jax.grad(lambda v: _loss(apply, v, X)[0])

    seen = collect(step(probed.apply), stats="absmax", backward=True)
    got, readings = jax.jit(seen)(variables)
    _assert_same(got, jax.jit(step(model.apply))(variables))
    rows = dict(zip(readings.names, readings["absmax"].tolist(), strict=True))
    assert rows["Dense_0"] == rows["CustomGradient"]
    assert rows["Dense_0@grad"] == rows["CustomGradient@grad"] == 2 * rows["Dense_0"]


@struct.dataclass
class Pair:
    """An output with two fields."""

    mean: jax.Array
    ids: jax.Array


def test_fields_of_a_dataclass_and_taps_of_ones_own_have_rows():
    def body(module, x):
        x = tap(nn.Dense(8, name="b")(x), "b")
        return Pair(x, jnp.argmax(x, -1))

    variables = _variables(Net(body))
    out, readings = jax.eval_shape(probe(Net(body), where="**").apply, variables, X)
    assert isinstance(out, Pair)
    assert readings.names == ("b", "b#2", "Net")


def test_cadence_within_one_program():
    model, names = MODELS["scan of remat"]
    variables = _variables(model)
    probed = probe(model, every=3, where="**")
    traces = []

    @jax.jit
    def run(step, controls):
        traces.append(1)

        def loss(v):
            y, readings = probed.at(step, controls).apply(v, X)
            return jnp.sum(y**2), readings

        return jax.value_and_grad(loss, has_aux=True)(variables)

    plain = jax.jit(jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X) ** 2)))
    _, always = jax.jit(probe(model, where="**").apply)(variables, X)
    idle = Controls.untouched()
    asked = idle._replace(probe_level=jnp.ones([], jnp.int32))
    for step, controls, due in [
        *((0, idle, True), (1, idle, False), (2, idle, False), (3, idle, True)),
        (4, asked, True),
    ]:
        (value, readings), grads = run(step, controls)
        _assert_same((value, grads), plain(variables))
        assert readings.names == names
        if due:
            np.testing.assert_array_equal(readings.values, always.values)
        else:
            assert np.isnan(readings.values).all()
    assert len(traces) == 1


def test_cadence_needs_the_step():
    text = (
        "needed the step number for every=3, got none; write probed.at(step) in place "
        "of probed, for example probed.at(step, session.controls).apply(variables, x)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        probe(nn.Dense(2), every=3, where="**").apply({}, X)


def test_no_float_output_gives_no_row():
    class Ids(nn.Module):
        def __call__(self, x):
            return jnp.argmax(x, -1)

    _, readings = probe(Ids(), where="**").apply({}, X)
    assert readings.names == () and readings.values.shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "where", "want"),
    [
        ("remat", (nn.LayerNorm, Block), None),
        ("remat", (nn.Dense, "b1"), (*TWO[:2], *TWO[3:6])),
        ("shared jit", Block, ("b", "b#2")),
        ("scan of remat", Block, tuple(f"layers/block[{i}]" for i in range(3))),
        ("scan of remat", Layer, tuple(f"layers[{i}]" for i in range(3))),
        ("vmap", nn.Module, (*(f"experts/{n}" for n in BLOCK), "experts", "Net")),
    ],
)
def test_modules_are_chosen_by_class(name, where, want):
    model, _ = MODELS[name]
    run = jax.eval_shape
    if want is None:
        with pytest.raises(ValueError, match="got LayerNorm; called are Dense, "):
            run(probe(model, where=where).apply, _variables(model), X)
        return
    _, readings = run(probe(model, where=where).apply, _variables(model), X)
    assert readings.names == want


def test_pattern_that_matches_nothing():
    model, _ = MODELS["plain"]
    variables = _variables(model)
    text = (
        "needed `where` patterns that match a place in the program, got "
        "'**/attention'; places: b0/up, b0/down, b0, "
        "b1/up, b1/down, b1, Net; write for example where='**/mlp*', "
        "or where='**' for everything"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        probe(model, where=("b0", "**/attention")).apply(variables, X)


@pytest.mark.parametrize(
    ("model", "kwargs", "error", "text"),
    [
        (
            Block,
            {},
            TypeError,
            "needed an instance of flax.linen.Module or flax.nnx.Module to probe, got "
            "the class Block; write for example stabil.probe(MyModel(...))",
        ),
        (
            len,
            {},
            TypeError,
            "needed an instance of flax.linen.Module or flax.nnx.Module to probe, got "
            "an object of type builtin_function_or_method; write for example "
            "stabil.probe(MyModel(...))",
        ),
        (
            Block(),
            {"inputs": 1},
            TypeError,
            "needed `inputs` as True or False, got 1",
        ),
        (
            Block(),
            {"every": 0},
            ValueError,
            "needed `every` as a number of steps from 1 on, got 0; write for example "
            "every=10 and probed.at(step) in the train step",
        ),
    ],
)
def test_refuses_bad_arguments(model, kwargs, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        probe(model, **kwargs)
