"""Settings that every test runs under: strict promotion, eight host devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator, the same for every run of a test."""
    return np.random.default_rng(20261129)


@pytest.fixture
def standard_promotion():
    """For tests that run Optax's own optimizers, which mix dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield
