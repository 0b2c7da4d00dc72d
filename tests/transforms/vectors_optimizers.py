"""Replays recorded runs of the published spike-aware optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vectors_tools import TOLERANCE, Document, Readers, check, load, precision

from stabil.transforms import _leafwise
from stabil.transforms._spam import spam


def _source(doc: Document) -> str:
    source = doc.get("source")
    parts = source if isinstance(source, list) else [source]
    return " ".join(str(p.get("repository") or p.get("package")) for p in parts if p)


def _config(doc: Document) -> dict[str, Any]:
    return doc.get("config") or {}


def _inputs(doc: Document) -> Document:
    """The document that holds the gradients: this one, or the one that it names."""
    if "inputs" not in doc:
        return doc
    try:
        return load(doc["inputs"])
    except FileNotFoundError:
        pytest.skip(f"{doc['_name']}: its gradients are in {doc['inputs']}, not here")


def _trees(doc: Document, dtype: str) -> tuple[Any, Any, int]:
    """Initial params, stacked gradients and the number of steps."""
    source = _inputs(doc)
    array = lambda x: jnp.asarray(np.array(x, np.float64), dtype)  # noqa: E731
    is_list = lambda x: isinstance(x, list)  # noqa: E731
    grads = jax.tree.map(array, source["gradients"], is_leaf=is_list)
    start = source.get("initial_params")
    params = (
        jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
        if start is None
        else jax.tree.map(array, start, is_leaf=is_list)
    )
    return params, grads, len(jax.tree.leaves(grads)[0])


def _replay(tx, params, grads, look, before=lambda state, t: state) -> Any:
    """Runs a transformation over stacked gradients; what `look` sees, stacked."""
    steps = jnp.arange(1, len(jax.tree.leaves(grads)[0]) + 1)

    def step(carry, inputs):
        params, state = carry
        t, g = inputs
        state = before(state, t)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(g, state, params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return (params, state), look(params, state)

    carry = (params, tx.init(params))
    return jax.jit(lambda c, g: jax.lax.scan(step, c, (steps, g))[1])(carry, grads)


def _compare(doc: Document, seen: dict[str, Any], dtype: str) -> None:
    """Every recorded array of `doc[dtype]` that `seen` holds, under the same name."""
    recorded = doc[dtype]
    tolerance = TOLERANCE[dtype]
    tensors = recorded if "param" not in recorded else {"": recorded}
    compared = set()
    for tensor, fields in tensors.items():
        for field, expected in fields.items():
            if field in seen:
                actual = seen[field][tensor] if tensor else seen[field]
                check(actual, expected, tolerance, f"{tensor} {field} {dtype}")
                compared.add(field)
    missing = {f for fields in tensors.values() for f in fields} - compared
    assert not missing, f"recorded and not compared: {missing}"


# SPAM -----------------------------------------------------------------------------


def is_spam(doc: Document) -> bool:
    return {"threshold", "warmup_steps"} <= _config(doc).keys() and "SPAM" in _source(
        doc
    )


def is_spam_package(doc: Document) -> bool:
    keys = {"threshold", "update_proj_gap"}
    return keys <= _config(doc).keys() and _source(doc) == "pytorch-optimizer"


def _spam(doc: Document):
    c = _config(doc)
    package = "update_proj_gap" in c
    return spam(
        c["lr"],
        weight_decay=c["weight_decay"],
        b1=c["betas"][0],
        b2=c["betas"][1],
        eps=c["eps"],
        threshold=c["threshold"],
        every_steps=c["update_proj_gap" if package else "DeltaT"],
        warmup_steps=c["warmup_epoch" if package else "warmup_steps"],
        grace_steps=c["grad_accu_steps"],
        density=c.get("density", 1.0),
        parity="pytorch_optimizer" if package else "official",
    )


def run_spam(doc: Document) -> None:
    for dtype in ("float64", "float32"):
        name = dtype if dtype in doc else f"{dtype}_params"
        if name not in doc:
            continue
        with precision(dtype):
            seen = _run_spam(doc, dtype)
            if name == dtype:
                _compare(doc, seen, dtype)
            else:
                flat = {k: {"param": v} for k, v in doc[name].items()}
                _compare({dtype: flat}, seen, dtype)
            if "elements_clipped" in doc and dtype == "float64":
                for tensor, total in doc["elements_clipped"].items():
                    assert float(jnp.round(seen["clipped"][tensor])) == total
            if "steps" in doc and "scale" in doc["steps"][0]:
                scales = [row["scale"] for row in doc["steps"]]
                check(seen["scale"], scales, TOLERANCE[dtype], "scale")


def _run_spam(doc: Document, dtype: str) -> dict[str, Any]:
    params, grads, _ = _trees(doc, dtype)
    c = _config(doc)
    masks = jnp.asarray(doc["masks"], bool) if "masks" in doc else None
    warmup = c.get("warmup_steps", c.get("warmup_epoch"))

    def in_force(t: jax.Array) -> jax.Array:
        starts = jnp.asarray(doc["mask_from_step"], t.dtype)
        return masks[jnp.sum(starts <= t) - 1]

    def before(state, t):
        if masks is None:
            return state
        return (state[0]._replace(mask=in_force(t)), *state[1:])

    def look(params, state):
        s = state[0]
        nu, mu = s.nu, s.mu
        if masks is not None:  # recorded under the mask of the next step
            nu, mu = (jnp.where(in_force(s.steps + 1), x, 0) for x in (nu, mu))
        fraction = jax.tree.unflatten(jax.tree.structure(s.mu), list(s.clipped))
        clipped = jax.tree.map(lambda f, m: f * m.size, fraction, s.mu)
        scale = _leafwise.warmup_scale(s.age[0], warmup, dtype)
        scale = jnp.where(s.resets[0] > 0, scale, jnp.ones([], dtype))
        return {"param": params, "mu": mu, "nu": nu, "clipped": clipped, "scale": scale}

    seen = _replay(_spam(doc), params, grads, look, before)
    seen["clipped"] = jax.tree.map(lambda x: x.sum(0), seen["clipped"])
    b1 = c["betas"][0]
    period = c.get("DeltaT", c.get("update_proj_gap"))
    seen["grad_after_clip"] = jax.tree.map(
        lambda m: _gradient_of(m, b1, period), seen["mu"]
    )
    return seen


def _gradient_of(mu: jax.Array, b1: float, period: int) -> jax.Array:
    """The gradients that made these first moments, which restart every `period`."""
    old = jnp.concatenate([jnp.zeros_like(mu[:1]), mu[:-1]])
    t = jnp.arange(1, len(mu) + 1).reshape(-1, *[1] * (mu.ndim - 1))
    return (mu - b1 * jnp.where(t % period == 0, 0, old)) / (1 - b1)


def is_warmup_table(doc: Document) -> bool:
    return "tables" in doc and "SPAM" in _source(doc)


def run_warmup_table(doc: Document) -> None:
    with precision("float64"):
        for table in doc["tables"]:
            n = table["N"]
            for key, ahead in (("official", 0), ("pytorch_optimizer", 1)):
                age = jnp.arange(len(table[key]))
                scale = _leafwise.warmup_scale(age, n, jnp.float64, ahead=ahead)
                check(scale, table[key], 1e-10, f"{key} N={n}")


READERS: Readers = {
    is_spam: run_spam,
    is_spam_package: run_spam,
    is_warmup_table: run_warmup_table,
}
