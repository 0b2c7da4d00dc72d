"""What the readers of recorded runs share: files, dtypes, comparison."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

HERE = pathlib.Path(__file__).parent.parent / "vectors"
FOLDER = pathlib.Path(os.environ.get("STABIL_VECTORS", HERE))
TOLERANCE = {"float64": 1e-10, "float32": 1e-6, "bfloat16": 3e-3}

Document = dict[str, Any]
# A reader says whether a document is of its kind; a runner replays it and compares.
Readers = dict[Callable[[Document], bool], Callable[[Document], None]]

# Where `jax.enable_x64` does not exist yet, it is experimental.
enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)


def decode(value: Any) -> Any:
    """Nested lists and dicts with the strings for non-finite numbers replaced."""
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    words = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    return words.get(value, value) if isinstance(value, str) else value


def load(name: str) -> Document:
    """A file of the folder under test, or of `tests/vectors` when it is not there."""
    path = FOLDER / name
    path = path if path.exists() else HERE / name
    return {**decode(json.loads(path.read_text())), "_name": path.name}


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """64-bit arithmetic for float64 files, JAX's own 32 bit for the others."""
    with enable_x64(dtype == "float64"):
        yield


def stack_gradients(doc: Document, *, whole: bool = False) -> dict[str, jax.Array]:
    """The gradients that a document names, one row per recorded step.

    Call it inside `precision`: a float64 file is cut to 32 bit outside.

    Args:
      doc: a document with the fields `inputs` and `steps`.
      whole: give the steps from 0 on, also those before the first recorded one.
    """
    inputs = load(doc["inputs"])
    variant = (inputs.get("variants") or {}).get(doc.get("input_variant", "clean"))
    steps = [row["t"] for row in doc["steps"]]
    steps = list(range(steps[-1] + 1)) if whole else steps
    dtype = jnp.dtype(doc.get("dtype", "float64"))
    grads = {}
    for name in (k for k in ("w", "b") if k in inputs):
        rows = np.array(inputs[name], np.float64)
        if variant and variant["tensor"] == name:
            rows[(variant["t"], *variant["index"])] = variant["value"]
        grads[name] = jnp.asarray(rows[steps], dtype)
    return grads


def replay(tx: Any, grads: Any, params: Any = None, **columns: Any) -> Any:
    """Runs a transformation over stacked gradients in one scan.

    Args:
      tx: the transformation.
      grads: a tree whose leaves have a leading axis of steps.
      params: what to start from and to apply the updates to; None for none.
      columns: keywords of `update`, one entry a step.
    Returns:
      Updates, states and parameters of every step, stacked.
    """
    first = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
    state = tx.init(first if params is None else params)

    def step(carry: Any, inputs: Any) -> Any:
        state, params = carry
        g, keywords = inputs
        # Optax's own optimizers are not clean under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(g, state, params, **keywords)
            new = None if params is None else optax.apply_updates(params, updates)
        return (state, new), (updates, state, new)

    run = jax.jit(lambda c, x: jax.lax.scan(step, c, x)[1])
    return run((state, params), (grads, columns))


def column(doc: Document, key: str) -> np.ndarray:
    """One field of every step as float64; null becomes NaN."""
    missing = np.nan
    rows = [missing if row[key] is None else row[key] for row in doc["steps"]]
    return np.asarray(rows, np.float64)


def check(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    """Equal shapes, non-finite in the same places, and close, entry by entry.

    Close means within `tolerance` times the larger of 1 and the expected size.
    """
    actual = jnp.asarray(actual)
    if actual.dtype in (jnp.bfloat16, jnp.float16):
        actual = actual.astype(jnp.float32)
    a = np.asarray(actual, np.float64)
    e = np.asarray(expected, np.float64)
    assert a.shape == e.shape, f"{what}: shape {a.shape}, recorded {e.shape}"
    same = np.where(np.isfinite(e), False, (a == e) | (np.isnan(a) & np.isnan(e)))
    with np.errstate(invalid="ignore"):
        same |= np.abs(a - e) <= tolerance * np.maximum(1.0, np.abs(e))
    if not same.all():
        where = tuple(int(i[0]) for i in np.nonzero(~same))
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.size} entries differ; first at "
            f"{where}: got {a[where]!r}, recorded {e[where]!r}"
        )
