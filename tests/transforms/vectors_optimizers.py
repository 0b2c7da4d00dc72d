"""Replays recorded runs of the published spike-aware optimizers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vectors_tools import TOLERANCE, Document, Readers, check, load, precision

from stabil.transforms import _leafwise
from stabil.transforms._adaptive_norm import adaclip
from stabil.transforms._msign import msign
from stabil.transforms._polar import matrix_sign, stable_rank
from stabil.transforms._spam import scale_by_spam, spam
from stabil.transforms._stable_spam import stable_spam


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
        bias_correction=None if c.get("correct_bias", True) else "none",
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
            for key in ("scale", "reset", "warm_counter"):
                if key in doc.get("steps", [{}])[0]:
                    rows = np.array([row[key] for row in doc["steps"]], np.float64)
                    check(seen[key], rows, TOLERANCE[dtype], key)


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
        fresh = s.resets[0] > 0
        return {
            "param": params,
            "mu": mu,
            "nu": nu,
            "clipped": clipped,
            "scale": scale,
            "reset": fresh & (s.age[0] == 0),
            # The released code counts on from the end of the warm-up before a reset.
            "warm_counter": s.age[0] + jnp.where(fresh, 0, warmup + 1),
        }

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


# Stable-SPAM ----------------------------------------------------------------------


def is_stable_spam(doc: Document) -> bool:
    return {"gamma1", "gamma2"} <= _config(doc).keys()


def _stable_spam(doc: Document):
    c = _config(doc)
    package = "theta" in c
    return stable_spam(
        c["lr"],
        weight_decay=c["weight_decay"],
        b1=c["betas"][0],
        b2=c["betas"][1],
        eps=c["eps"],
        gamma1=c["gamma1"],
        gamma2=c["gamma2"],
        gamma3=c["theta" if package else "gamma3"],
        every_steps=c["update_proj_gap"],
        total_steps=c["t_max" if package else "total_T"],
        eta_min=c["eta_min"],
        parity="pytorch_optimizer" if package else "official",
    )


def run_stable_spam(doc: Document) -> None:
    for dtype in ("float64", "float32"):
        name = dtype if dtype in doc else f"{dtype}_params"
        if name not in doc:
            continue
        with precision(dtype):
            seen = _run_stable_spam(doc, dtype)
            if name == dtype:
                _compare(doc, seen, dtype)
            else:
                flat = {k: {"param": v} for k, v in doc[name].items()}
                _compare({dtype: flat}, seen, dtype)


def _run_stable_spam(doc: Document, dtype: str) -> dict[str, Any]:
    params, grads, steps = _trees(doc, dtype)
    gamma3 = _config(doc).get("gamma3")

    def look(params, state):
        s = state[0]
        counter = jax.tree.unflatten(jax.tree.structure(s.mu), list(s.age + 1))
        return {
            "param": params,
            "mu": s.mu,
            "nu": s.nu,
            "m_norm": s.norm_mean,
            "v_norm": s.norm_square_mean,
            "m_max": s.spike_max,
            "adam_step": counter,
        }

    seen = _replay(_stable_spam(doc), params, grads, look)
    if gamma3 is not None:
        # AdaClip alone, on the averages and counters that the whole method had.
        period = _config(doc)["update_proj_gap"]
        t = np.arange(1, steps + 1)
        k = jnp.asarray(np.where(t >= period, t % period + 1, t), jnp.int32)
        k = k.at[period - 1].set(period) if period <= steps else k
        k = jnp.where((jnp.asarray(t) % period == 0) & (t > period), period + 1, k)

        def clip(g, top):
            old = jnp.concatenate([jnp.zeros_like(top[:1]), top[:-1]])
            one = lambda g, m, k: adaclip(g, m, jnp.array(True), gamma3, k)[0]  # noqa: E731
            return jax.vmap(one)(g, old, k)

        seen["grad_after_adaclip"] = jax.tree.map(clip, grads, seen["m_max"])
    return seen


# The bfloat16 ratchet -------------------------------------------------------------


def is_ratchet(doc: Document) -> bool:
    return {"mean_nu", "multiply_test"} <= doc.keys()


def run_ratchet(doc: Document) -> None:
    """Second moments kept in bfloat16 cannot decay; ours are float32 and do."""
    test = doc["multiply_test"]
    before = jnp.asarray(test["before"], jnp.bfloat16)
    for parity, dtype in (("official", jnp.bfloat16), ("", jnp.float32)):
        tx = scale_by_spam(b1=0.9, b2=0.999, every_steps=10**6, parity=parity)
        state = tx.init(before)
        state = state._replace(nu=before.astype(state.nu.dtype))
        zero = jnp.zeros_like(before)
        loop = lambda s, _, tx=tx, zero=zero: (tx.update(zero, s)[1], None)  # noqa: E731
        nu = jax.jit(lambda s, f=loop: jax.lax.scan(f, s, None, 1000)[0].nu)(state)
        assert nu.dtype == dtype
        if parity:
            check(nu, test["after"], TOLERANCE["bfloat16"], "bfloat16 second moment")
        else:
            cured = np.asarray(test["before"]) * 0.999**1000
            check(nu, cured, 1e-4, "float32 second moment")
    # One spike at step 1001, then 2000 steps: mean of the second moment, recorded for
    # unit gradients whose draws are not; a share of the noise of 2000 draws is left.
    recorded = dict(map(tuple, doc["mean_nu"]["float32"]))
    last = max(recorded)
    assert recorded[last] < 0.6 * recorded[1001]
    ratchet = dict(map(tuple, doc["mean_nu"]["bfloat16"]))
    assert ratchet[last] > ratchet[1001]


# MSign ----------------------------------------------------------------------------


# Without jit every call compiles its loops anew.
SIGN = jax.jit(matrix_sign)
RANK = jax.jit(functools.partial(stable_rank, turns=200))


def is_msign(doc: Document) -> bool:
    return "2602.01734" in str(doc.get("paper")) and "cases" in doc


def run_msign(doc: Document) -> None:
    with precision("float64"):
        for case in doc["cases"]:
            w = {"w": jnp.asarray(np.array(case["input"], np.float64))}
            tx = msign(every_steps=1)
            zero = jax.tree.map(jnp.zeros_like, w)
            updates, state = tx.update(zero, tx.init(w), w)
            check(
                w["w"] + updates["w"],
                case["output"],
                TOLERANCE["float64"],
                case["name"],
            )
            if "sign_numpy_svd" in case:
                check(SIGN(w["w"]), case["sign_numpy_svd"], 1e-10, "sign")
            if "stable_rank_in" in case:
                rank = RANK(w["w"])
                check(rank, case["stable_rank_in"], 1e-10, "stable rank")
                rank = RANK(w["w"] + updates["w"])
                check(rank, case["stable_rank_out"], 1e-10, "stable rank after")


READERS: Readers = {
    is_spam: run_spam,
    is_spam_package: run_spam,
    is_warmup_table: run_warmup_table,
    is_stable_spam: run_stable_spam,
    is_ratchet: run_ratchet,
    is_msign: run_msign,
}
