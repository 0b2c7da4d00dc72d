"""Reports of others about probes: the cases of class F.

F1, growth and recompiling: `test_nothing_is_left_in_the_variables_and_nothing_retraces`
and, for NNX, `test_rows_bits_and_state`. F2, values in the initial state:
`test_init_is_the_models_own`. F3, a scan that drops rows, and layers without names:
`test_rows_and_bits_through_every_wrapper`, `test_layers_of_a_scan_are_told_apart`.
Boxed parameters of F5: `test_collections_of_the_models_own_boxes_and_dead_code`,
`test_boxes_masks_and_variables_are_no_obstacle`. The rest is here.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops

import stabil
from stabil.probes import collect, probe, tap

X = np.random.default_rng(11).normal(size=(4, 8)).astype(np.float32)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_f4_statistics_of_a_scan_are_returned_and_not_called_back():
    w = jnp.eye(8) * jnp.arange(1.0, 6.0)[:, None, None]

    def loss(w):
        def turn(x, w):
            return tap(jnp.tanh(x @ w), "turn"), None

        return jnp.sum(jax.lax.scan(turn, jnp.asarray(X), w)[0])

    for fn, rows in ((loss, 5), (jax.grad(loss), 10)):
        seen = collect(fn, stats="all", backward=True)
        program, (_, readings) = jax.make_jaxpr(seen, return_shape=True)(w)
        assert len(readings.names) == rows
        assert not program.effects and "callback" not in str(program)


class Fp8(nn.Module):
    """Layers whose products are in eight bits, with their scales as state."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            kind = fp8_ops.Fp8DirectDotGeneralOp
            x = nn.Dense(8, dot_general_cls=kind, name=f"layer_{i}")(x)
        return x


SCALES = "_overwrite_with_gradient"


def fp8_grads(apply, variables, x):
    """Gradients, among them the new scales, and readings where `apply` has any."""

    def loss(variables):
        out = apply(variables, x)
        y, readings = out if isinstance(out, tuple) else (out, None)
        return jnp.mean(jnp.square(y)), readings

    return jax.grad(loss, has_aux=True)(variables)


def fp8_variables(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    rng = np.random.default_rng(3)
    draw = {
        "params": lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype),
        SCALES: lambda s: jnp.ones(s.shape, s.dtype),
    }
    return {k: jax.tree.map(draw[k], v) for k, v in shapes.items()}


def test_f5_fp8_state_is_the_models_own(standard_promotion):
    model = Fp8()
    probed = probe(model, where="**", stats=("absmax", "float8_e4m3_overflow"))
    variables = fp8_variables(model)
    want, _ = jax.jit(lambda v: fp8_grads(model.apply, v, X))(variables)
    got, readings = jax.jit(lambda v: fp8_grads(probed.apply, v, X))(variables)
    assert_same(got, want)
    scales = got[SCALES]["layer_0"]["Fp8DirectDotGeneralOp_0"]
    assert scales["input_amax_history"][0] == np.abs(X).max()
    assert readings.names == (
        *("layer_0/Fp8DirectDotGeneralOp_0", "layer_0"),
        *("layer_1/Fp8DirectDotGeneralOp_0", "layer_1", "Fp8"),
    )
    assert (readings["absmax"] > 0).all()
    assert (readings["float8_e4m3_overflow"] == 0).all()


@pytest.mark.slow
def test_f5_fp8_state_stays_on_a_blocked_step(standard_promotion):
    model, tx = Fp8(), stabil.guard(optax.sgd(0.1))
    probed = probe(model, where="layer_*", stats=("finite", "absmax"))

    @jax.jit
    def step(variables, opt_state, x):
        grads, readings = fp8_grads(probed.apply, variables, x)
        params = variables["params"]
        more = dict(readings=readings)
        updates, opt_state = tx.update(grads["params"], opt_state, params, **more)
        vitals = stabil.vitals(opt_state)
        scales = stabil.select(vitals, grads[SCALES], variables[SCALES])
        return {"params": optax.apply_updates(params, updates), SCALES: scales}, vitals

    variables = fp8_variables(model)
    opt_state = tx.init(variables["params"])
    healthy, vitals = step(variables, opt_state, X)
    assert vitals.severity == stabil.Severity.OK
    for part in ("params", SCALES):
        one, other = (jax.tree.leaves(v[part])[0] for v in (healthy, variables))
        assert np.any(one != other)
    bad = X.copy()
    bad[1, 2] = np.nan
    kept, vitals = step(healthy, opt_state, bad)
    assert vitals.severity == stabil.Severity.BLOCK
    assert_same(kept, healthy)


class Tuned(nnx.Module):
    """A frozen trunk and a head that is trained."""

    def __init__(self, rngs):
        self.trunk = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.trunk(x)))


def is_trained(params):
    """Whether each leaf is one of the head's."""
    paths = jax.tree_util.tree_map_with_path
    return paths(lambda path, _: "head" in jax.tree_util.keystr(path), params)


def nested(name, guarded):
    def labels(params):
        return jax.tree.map(lambda t: "trained" if t else "frozen", is_trained(params))

    def is_frozen(params):
        return jax.tree.map(lambda t: not t, is_trained(params))

    if name == "multi_transform":
        groups = {"trained": guarded, "frozen": optax.set_to_zero()}
        return optax.multi_transform(groups, labels)
    return optax.chain(
        optax.masked(guarded, is_trained),
        optax.masked(optax.set_to_zero(), is_frozen),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi_transform", "masked"])
def test_f5_a_frozen_group_never_alarms(name, standard_promotion):
    tx = nested(name, stabil.guard(optax.adamw(1e-2)))
    graph, params = nnx.split(Tuned(nnx.Rngs(0)), nnx.Param)[:2]

    @jax.jit
    def step(params, opt_state, x, scale):
        def loss(params):
            probed = probe(nnx.merge(graph, params), where="**")
            y, readings = probed(x)
            return jnp.mean(jnp.square(y - 1)), readings

        (value, readings), grads = jax.value_and_grad(loss, has_aux=True)(params)
        grads["trunk"] = jax.tree.map(lambda g: g * scale, grads["trunk"])
        more = dict(loss=value, readings=readings)
        updates, opt_state = tx.update(grads, opt_state, params, **more)
        return optax.apply_updates(params, updates), opt_state, readings

    opt_state, start = tx.init(params), params
    for scale in (1.0, 1.0, 1e9, np.nan):
        old = params
        params, opt_state, _ = step(params, opt_state, X, scale)
        vitals = stabil.vitals(opt_state)
        assert vitals.severity == stabil.Severity.OK, vitals.causes
        assert_same(params["trunk"], start["trunk"])
        assert np.any(params["head"]["kernel"][...] != old["head"]["kernel"][...])
        assert vitals.measures.grad_norm < 1e3
    bad = X.copy()
    bad[1, 2] = np.nan
    kept, opt_state, readings = step(params, opt_state, bad, 1.0)
    vitals = stabil.vitals(opt_state, readings=readings)
    assert vitals.severity == stabil.Severity.BLOCK
    assert vitals.first == "activations/trunk"
    assert stabil.vitals(opt_state).first == "activations"
    assert_same(kept, params)
