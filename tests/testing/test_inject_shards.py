"""Faults on one device: one shard, or one copy of a replicated array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stabil.testing import inject


def fault(**fields):
    given = {"kind": "scale", "place": "parameters", "step": 3, "device": 2}
    return inject.Fault(**given | fields)


def spread(spec):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(jnp.ones([8, 2]), sharding)


def test_one_shard_of_a_sharded_array():
    x = spread(["d"])
    out = inject.parameters((fault(),), 3, {"w": x})["w"]
    assert out.sharding == x.sharding
    rows = np.asarray(out)[:, 0]
    assert rows.tolist() == [1, 1, 1, 1, 1000, 1000, 1, 1]


def test_one_copy_of_a_replicated_array():
    x = spread([])
    out = inject.parameters((fault(entries=1),), 3, x)
    struck = {s.device.id: int((np.asarray(s.data) != 1).sum()) for s in shards(out)}
    assert struck == {0: 0, 1: 0, 2: 1, 3: 0}
    assert inject.parameters((fault(),), 4, x) is x


def test_an_array_elsewhere_stays():
    x = jax.device_put(jnp.ones(2), jax.devices()[0])
    assert inject.parameters((fault(),), 3, x) is x


def shards(x):
    return x.addressable_shards


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jax.jit(lambda x: inject.parameters((fault(),), 3, x))(jnp.ones(2)),
            "needed scale in parameters on device 2 at step 3 between steps, got a "
            "traced step: inside a compiled step an array has no devices yet; call "
            "inject.parameters or inject.moments on the state before the step",
        ),
        (
            lambda: inject.parameters((fault(),), 3, {"w": np.ones(2)}),
            "needed a jax.Array for scale in parameters on device 2 at step 3, got "
            "ndarray at w; put it on devices with jax.device_put",
        ),
        (
            lambda: fault(place="loss"),
            "needed device=None, since only gradients, parameters and moments are "
            "struck on one device, got device=2 for loss",
        ),
        (
            lambda: fault(device=-1),
            "needed device to be an integer of at least 0, got -1",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}(\n|$)"):
        call()
