"""Replays recorded runs of the published step-skipping codes, and window statistics."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from vectors_tools import (
    TOLERANCE,
    Document,
    Readers,
    check,
    column,
    load,
    precision,
    replay,
    stack_gradients,
)

from stabil.transforms import skip_nonfinite, skip_spikes
from stabil.transforms._window import GAUSSIAN, Window

# SkipStepAdamW keeps its scalars in float32, and torch's float32 square root of a
# scalar is not always the nearest number: one such step moves a parameter by 1e-9.
OLMO_PARAMETERS = 1e-8


def optimizer(words: str) -> optax.GradientTransformationExtraArgs:
    """The Optax optimizer that a text such as `optax.sgd(0.1, momentum=0.9)` names."""
    tree = ast.parse(words, mode="eval").body
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    known = ("adam", "adamw", "sgd")
    call = next(c for c in calls if ast.unparse(c.func).removeprefix("optax.") in known)
    make = getattr(optax, ast.unparse(call.func).removeprefix("optax."))
    keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    return make(*[ast.literal_eval(a) for a in call.args], **keywords)


def run_apply_if_finite(doc: Document) -> None:
    limit = int(re.search(r",\s*(\d+)\)$", doc["object"])[1])
    inner = optimizer(doc["object"])
    tx = skip_nonfinite(inner, max_consecutive_steps=limit, parity=True)
    with precision(doc["dtype"]):
        grads = stack_gradients(doc)
        start = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
        _, state, params = replay(tx, grads, start)
        for name in ("w", "b"):
            recorded = [row[name] for row in doc["steps"]]
            check(params[name], recorded, TOLERANCE[doc["dtype"]], name)
        record = state.record
        check(record.bad_in_a_row, column(doc, "notfinite_count"), 0.0, "streak")
        check(record.bad_steps, column(doc, "total_notfinite"), 0.0, "total")
        check(record.reason == 0, column(doc, "last_finite"), 0.0, "last_finite")


def _scalars(doc: Document, dtype: str) -> dict[str, jax.Array]:
    names = ("loss", "grad_norm")
    return {k: jnp.asarray(column(doc, k), dtype) for k in names}


def _gradients(doc: Document) -> np.ndarray:
    """The recorded gradients, with the NaN that a note says was put in."""
    grads = np.array(doc["grads"], np.float64)
    for t, i in re.findall(r"grads\[(\d+)\]\[(\d+)\]", doc.get("note", "")):
        grads[int(t), int(i)] = np.nan
    return grads


def run_maxtext(doc: Document) -> None:
    p = doc["parameters"]
    tx = skip_spikes(
        optimizer(doc["object"]),
        window=p["interval"],
        deviations=p["scaling_factor"],
        rule="maxtext",
    )
    grads = jnp.asarray(_gradients(doc), jnp.float32)
    start = jnp.asarray(np.array(doc["param0"]), jnp.float32)
    _, state, params = replay(tx, grads, start, **_scalars(doc, "float32"))
    check(state.record.skipped, column(doc, "skipped"), 0.0, "skipped")
    recorded = [row["param"] for row in doc["steps"]]
    check(params, recorded, TOLERANCE["float32"], "param")


def olmo_adamw(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW with its scalars in float32, as SkipStepAdamW computes it."""
    f32 = np.float32
    decay = float(f32(1) - f32(lr * weight_decay))
    b1, b2 = f32(betas[0]), f32(betas[1])
    share, keep = float(f32(1 - betas[0])), float(f32(1) - f32(1 - betas[1]))

    def init(params: Any) -> Any:
        zeros = jnp.zeros_like(params)
        return {"mu": zeros, "nu": zeros, "step": jnp.zeros([], jnp.float32)}

    def update(g: Any, state: Any, params: Any = None) -> Any:
        step = state["step"] + 1
        mu = state["mu"] + share * (g - state["mu"])
        nu = keep * state["nu"] + (1 - betas[1]) * jnp.square(g)
        rate = f32(1) / (f32(1) - jnp.power(b1, step)) * f32(lr)
        root = jnp.sqrt(f32(1) - jnp.power(b2, step)).astype(g.dtype)
        moved = rate.astype(g.dtype) * (mu / (jnp.sqrt(nu) / root + eps))
        update = params * decay - moved - params
        return update, {"mu": mu, "nu": nu, "step": step}

    return optax.GradientTransformation(init, update)


def run_olmo(doc: Document) -> None:
    p = doc["parameters"]
    tx = skip_spikes(
        olmo_adamw(p["lr"], p["betas"], p["eps"], p["weight_decay"]),
        window=p["rolling_interval_length"],
        deviations=p["sigma_factor"],
        rule="olmo",
    )
    with precision("float64"):
        grads = jnp.asarray(_gradients(doc))
        start = jnp.asarray(np.array(doc["param0"]))
        _, state, params = replay(tx, grads, start, **_scalars(doc, "float64"))
        check(state.record.skipped, 1 - column(doc, "step_factor"), 0.0, "skipped")
        check(params, [r["param"] for r in doc["steps"]], OLMO_PARAMETERS, "param")
        near, inner = TOLERANCE["float64"], state.inner_state
        check(inner["mu"], [r["exp_avg"] for r in doc["steps"]], near, "exp_avg")
        check(inner["step"], column(doc, "step"), 0.0, "step")


def run_llmc(doc: Document) -> None:
    x = np.array(doc["x"])
    written = re.search(r"window of (\d+)", doc.get("what", ""))
    # A file that starts in mid-run has a full window when it starts.
    window = int(written[1]) if written else doc["offset"]
    before = np.zeros(0)
    if doc.get("offset"):
        before = np.array(load(f"llmc_outlier_w{window}.json")["x"][: doc["offset"]])
    with precision("float64"):
        norms = jnp.asarray(np.concatenate([before, x]))
        tx = skip_spikes(optax.sgd(0.0), window=window, rule="llmc")
        zeros = jnp.zeros_like(norms)
        _, state, _ = replay(tx, zeros, jnp.zeros([]), grad_norm=norms)
        check(state.norm_score[before.size :], doc["z"], TOLERANCE["float64"], "z")


def _steps(flags: Any) -> list[int]:
    return [int(i) + 1 for i in np.nonzero(np.asarray(flags))[0]]


def run_references(doc: Document) -> None:
    rules = {"maxtext": "maxtext", "levanter": "levanter", "olmo_core": "olmo"}
    series = np.array([[doc["loss"], doc["grad_norm"]]] * len(doc["cases"]), np.float32)
    for row, case in zip(series, doc["cases"], strict=True):
        for signal, key in zip(
            row, ("nan_loss_step", "nan_grad_norm_step"), strict=True
        ):
            if case[key]:
                signal[case[key] - 1] = np.nan
    loss, norm = jnp.asarray(series[:, 0].T), jnp.asarray(series[:, 1].T)
    for code, rule in rules.items():
        tx = skip_spikes(
            optax.sgd(0.01), window=doc["window"], deviations=doc["sigma"], rule=rule
        )
        # Every case is a run of its own, all of them in one program.
        start = jnp.zeros([len(doc["cases"])])
        updates, state, params = replay(_many(tx), norm, start, loss=loss)
        for i, case in enumerate(doc["cases"]):
            skipped = _steps(state.record.skipped[:, i])
            seen = {
                "skipped_steps": skipped,
                "step_factor_zero_steps": skipped,
                "zero_update_steps": _steps(updates[:, i] == 0),
                "nan_update_steps": _steps(jnp.isnan(updates[:, i])),
                "params_nan": bool(jnp.isnan(params[-1, i])),
            }
            for key, recorded in case[code].items():
                assert seen[key] == recorded, (case["name"], code, key, seen[key])


def _many(tx: Any) -> optax.GradientTransformationExtraArgs:
    """One transformation for each entry of the parameters, side by side."""

    def update(g: Any, state: Any, params: Any = None, *, loss: Any) -> Any:
        one = lambda g, s, p, x: tx.update(g, s, p, loss=x)  # noqa: E731
        return jax.vmap(one)(g, state, params, loss)

    return optax.GradientTransformationExtraArgs(jax.vmap(tx.init), update)


def run_percentiles(doc: Document) -> None:
    with precision("float64"):
        x = jnp.asarray(np.array(doc["x"]))

        def step(window: Window, value: jax.Array) -> Any:
            new = window.push(value, jnp.isfinite(value))
            return new, {q: new.percentile(float(q[1:])) for q in asked}

        asked = [k for k in doc["steps"][0] if re.fullmatch(r"p\d+", k)]
        empty = Window.empty(x.size, dtype=x.dtype)
        seen = jax.lax.scan(step, empty, x)[1]
        for key in asked:
            check(seen[key], column(doc, key), TOLERANCE["float64"], key)


def run_window_statistics(doc: Document) -> None:
    size = doc["parameters"]["window"]
    with precision("float64"):
        # The window of every step afresh: here a non-finite value takes up a place.
        x = np.concatenate([np.full(size, np.nan), np.array(doc["x"])])
        rows = np.stack([x[t : t + size] for t in range(len(doc["steps"]))])

        def of(row: jax.Array) -> dict[str, jax.Array]:
            def push(window: Window, value: jax.Array) -> Any:
                return window.push(value, jnp.isfinite(value)), None

            w = jax.lax.scan(push, Window.empty(size, dtype=row.dtype), row)[0]
            return {
                "n": w.filled,
                "median": w.median(),
                "mad": w.mad(),
                "mad_normal": GAUSSIAN * w.mad(),
                "mean": w.mean(),
                "std_pop": w.deviation(),
                "std_unbiased": w.deviation(1),
            }

        seen = jax.vmap(of)(jnp.asarray(rows))
        for key, values in seen.items():
            recorded = [row.get(key) for row in doc["steps"]]
            known = np.array([r is not None and np.isfinite(r) for r in recorded])
            assert known.any(), key
            expected = np.array([r for r, k in zip(recorded, known, strict=True) if k])
            check(values[known], expected, TOLERANCE["float64"], key)


READERS: Readers = {
    lambda d: "apply_if_finite" in str(d.get("object")): run_apply_if_finite,
    lambda d: "skip_step_on_spikes" in str(d.get("object")): run_maxtext,
    lambda d: "SkipStepAdamW" in str(d.get("object")): run_olmo,
    lambda d: "llmc/outlier_detector.h" in str(d.get("source")): run_llmc,
    lambda d: "skip-step rules" in d.get("description", ""): run_references,
    lambda d: "percentile" in str(d.get("object")): run_percentiles,
    lambda d: "scale_normal" in d and "parameters" in d: run_window_statistics,
}
