"""A probe that is switched, by value or by program."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil import collect, probe, tap
from stabil.vocabulary import Controls


def test_off_is_the_plain_program(rng):
    model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    probed = probe(model, where="**", stats="all")
    params = model.init(jax.random.key(0), x)
    off = jax.jit(lambda p, x: probed.off().apply(p, x)).lower(params, x).compile()
    plain = jax.jit(model.apply).lower(params, x).compile()
    assert "conditional" not in off.as_text()
    assert off.as_text().count(" dot(") == plain.as_text().count(" dot(")
    extra = off.cost_analysis()["flops"] - plain.cost_analysis()["flops"]
    assert extra == 0
    y, readings = off(params, x)
    np.testing.assert_array_equal(y, plain(params, x))
    on = jax.eval_shape(probed.apply, params, x)[1]
    assert (readings.names, readings.values.shape) == (on.names, on.values.shape)
    assert np.isnan(readings.values).all()


def test_the_level_switches_without_a_new_trace(rng):
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    probed, traces = probe(nn.Dense(2), stats="absmax", every=10), []
    params = probed.init(jax.random.key(0), x)

    collected = collect(lambda x: tap(3 * x, "y"), stats="absmax", every=10)

    @jax.jit
    def run(i, controls):
        traces.append(i)
        seen = probed.at(i, controls).apply(params, x)[1]["absmax"]
        return jnp.concatenate([seen, collected.at(i, controls)(x)[1]["absmax"]])

    calm = Controls.untouched()
    asked = calm._replace(probe_level=jnp.int32(1))
    read = [
        tuple(~np.isnan(run(jnp.int32(i), c)))
        for i, c in ((0, calm), (3, calm), (3, asked), (4, calm))
    ]
    assert read == [(True,) * 2, (False,) * 2, (True,) * 2, (False,) * 2]
    assert len(traces) == 1


@pytest.mark.parametrize("every", [1, 10])
def test_off_stays_off_at_any_step(every):
    x = jnp.ones([2, 3])
    asked = Controls.untouched()._replace(probe_level=jnp.int32(1))
    probed = probe(nn.Dense(2), stats="absmax", every=every)
    params = {"params": {"kernel": jnp.ones([3, 2]), "bias": jnp.zeros(2)}}
    collected = collect(lambda x: tap(3 * x, "y"), stats="absmax", every=every)
    for step in (0, 3):
        assert np.isnan(probed.off().at(step, asked).apply(params, x)[1].values)
        assert np.isnan(collected.off().at(step, asked)(x)[1].values)


def test_collecting_with_a_cadence_needs_the_step():
    collected = collect(lambda x: tap(3 * x, "y"), every=10)
    text = (
        "needed the step number for every=10, got none; write collected.at(step) in "
        "place of collected, for example collected.at(step, session.controls)(batch)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        collected(jnp.ones(3))
    text = (
        "needed `every` as a number of steps from 1 on, got 0; write for example "
        "every=10 and collected.at(step) in the train step"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        collect(jnp.sin, every=0)
    out, readings = jax.eval_shape(collected.off(), jnp.ones(3))
    assert out.shape == (3,) and readings.names == ("y",)
