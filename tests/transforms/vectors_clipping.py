"""Replays recorded runs of the published clipping codes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import vectors_skipping
from vectors_tools import (
    TOLERANCE,
    Document,
    Readers,
    check,
    column,
    precision,
    replay,
    stack_gradients,
)

from stabil.transforms import (
    adagc,
    adaptive_gradient_clip,
    autoclip,
    clip_by_global_norm,
    clip_update_norm,
    clip_update_rms,
    clippy,
    clippy_adagrad,
    scale_by_stable_adamw,
    stable_adamw,
    zclip,
)

# State scalars such as `clip_factor` are float32 whatever the leaves are.
SCALAR = 1e-6


def said(doc: Document) -> str:
    """Where a document says that it comes from: repository or package, and object."""
    source = doc.get("source") or {}
    parts = source if isinstance(source, list) else [source]
    names = [str(p.get("repository") or p.get("package")) for p in parts]
    return " ".join([*names, str(doc.get("package")), str(doc.get("object"))])


def gradients_out(doc: Document, updates: Any, prefix: str = "") -> None:
    """Compares the recorded tensors of every step with what the transformation gave."""
    dtype = doc.get("dtype", "float64")
    for name in ("w", "b"):
        key = f"{prefix}{name}"
        if key in doc["steps"][0]:
            recorded = [row[key] for row in doc["steps"]]
            check(updates[name], recorded, TOLERANCE[dtype], f"{key} of {doc['_name']}")


def tolerance(doc: Document) -> float:
    return TOLERANCE[doc.get("dtype", "float64")]


def is_global_norm(doc: Document) -> bool:
    return bool(re.search(r"clip_by_global_norm|clip_grad_norm_$", said(doc)))


def run_global_norm(doc: Document) -> None:
    parity = "torch" if "clip_grad_norm_" in said(doc) else "optax"
    tx = clip_by_global_norm(doc["parameters"]["max_norm"], parity=parity)
    with precision(doc["dtype"]):
        updates, state, _ = replay(tx, stack_gradients(doc))
        key = "total_norm" if parity == "torch" else "global_norm"
        check(state.norm, column(doc, key), tolerance(doc), key)
        gradients_out(doc, updates)


def _zclip(doc: Document) -> optax.GradientTransformationExtraArgs:
    p = doc["parameters"]
    mode = {"adaptive_scaling": "reciprocal", "mean": "mean"}[
        p.get("clip_option", "adaptive_scaling")
    ]
    return zclip(
        z_threshold=p["z_thresh"],
        decay=p["alpha"],
        warmup_steps=p["warmup_steps"],
        mode="max" if p.get("mode", "zscore") == "percentile" else mode,
        max_norm=p.get("max_grad_norm"),
        clip_factor=p.get("clip_factor", 1.0),
        eps=p.get("eps", 1e-6),
        freeze_on_outlier=p.get("skip_update_on_spike", False),
        parity=True,
    )


def run_zclip(doc: Document) -> None:
    with precision(doc.get("dtype", "float64")):
        scalars = "norm" in doc["steps"][0]
        if scalars:
            grads: Any = jnp.asarray(column(doc, "norm"))[:, None]
        else:
            grads = stack_gradients(doc)
        updates, state, _ = replay(_zclip(doc), grads)
        near = tolerance(doc)
        check(state.norm, column(doc, "norm" if scalars else "total_norm"), near, "n")
        known = np.array([row["mean"] is not None for row in doc["steps"]])
        check(state.mean[known], column(doc, "mean")[known], near, "mean")
        check(state.variance[known], column(doc, "var")[known], near, "variance")
        limit = column(doc, "clip_val")
        outlier = np.array([row["clip_val"] is not None for row in doc["steps"]])
        check(state.outliers_in_a_row > 0, outlier, 0.0, "outlier")
        cap = doc["parameters"].get("max_grad_norm") or np.inf
        check(state.threshold[outlier], np.minimum(limit, cap)[outlier], near, "limit")
        if "warmup" in doc["steps"][0]:
            start = doc["parameters"]["warmup_steps"]
            check(state.collected_steps < start, known == 0, 0.0, "warm-up")
        if not scalars:
            gradients_out(doc, updates)


def is_adagc_package(doc: Document) -> bool:
    return said(doc).endswith("pytorch_optimizer.AdaGC")


def _adagc(doc: Document) -> optax.GradientTransformationExtraArgs:
    p = doc["parameters"]
    if is_adagc_package(doc):
        return adagc(
            lambda_rel=p["lambda_rel"],
            lambda_abs=p["lambda_abs"],
            decay=p["beta"],
            warmup_steps=p["warmup_steps"],
            eps=p["eps"],
            parity="pytorch_optimizer",
        )
    return adagc(
        lambda_rel=p["clip_ratio"],
        lambda_abs=p["max_norm"],
        decay=p["beta"],
        warmup_steps=p["start_clip_steps"],
        eps=p["eps"],
        scope="global" if "Global" in doc["object"] else "tensor",
        parity="official",
    )


def run_adagc(doc: Document) -> None:
    with precision(doc.get("dtype", "float64")):
        grads = stack_gradients(doc)
        for name, t in re.findall(
            r"gradient of (\w+) is zero at t=(\d+)", doc.get("change", "")
        ):
            grads[name] = grads[name].at[int(t)].set(0)
        updates, state, _ = replay(_adagc(doc), grads)
        # Rows are in the order of the names: b, then w.
        rows = {"gamma_b": 0, "gamma_w": 1, "gamma_global": 0}
        for key in doc["steps"][0]:
            if key in rows:
                check(state.gamma[:, rows[key]], column(doc, key), tolerance(doc), key)
            elif key == "returned_norm":
                # The global mode gives back the norm that it left over.
                left = jnp.minimum(state.norm, state.threshold)
                late = state.steps > doc["parameters"]["start_clip_steps"]
                late &= "Global" in doc["object"]
                norm = jnp.where(late, left, state.norm)
                check(norm, column(doc, key), tolerance(doc), key)
            elif key.startswith("norm_"):
                _, name, side = key.split("_")
                tree = grads if side == "in" else updates
                rest = tuple(range(1, tree[name].ndim))
                norm = jnp.sqrt(jnp.sum(jnp.square(tree[name]), axis=rest))
                check(norm, column(doc, key), tolerance(doc), key)
        gradients_out(doc, updates)
        gradients_out(doc, updates, "clipped_")


def _kernel_rows(name: str, rank: int) -> tuple[int, ...]:
    """The axes that pytorch-optimizer reduces: one of rank 2 and 3, else the rest."""
    del name
    if rank < 2:
        return tuple(range(rank))
    return (1,) if rank < 4 else tuple(range(1, rank))


def run_agc(doc: Document) -> None:
    layouts = {
        "optax": "in_out",
        "deepmind": "in_out",
        "timm": "out_in",
        "pytorch_optimizer": _kernel_rows,
    }
    clipping = float(re.search(r"clipping ([\d.e-]+\d)", doc["what"])[1])
    eps = float(re.search(r"eps ([\d.e-]+\d)", doc["what"])[1])
    with precision(doc["dtype"]):
        # One tree for all cases: a unit knows nothing of the others.
        params = [jnp.asarray(np.array(case["param"])) for case in doc["cases"]]
        grads = [jnp.asarray(np.array(case["grad"])) for case in doc["cases"]]
        for code in doc["implementations"]:
            own = code == "pytorch_optimizer"
            tx = adaptive_gradient_clip(
                clipping, eps=eps, axes=layouts[code], parity=code if own else "optax"
            )
            updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
            for got, case in zip(updates, doc["cases"], strict=True):
                what = f"{code} {case['shape']} {case['case']}"
                check(got, case[code], tolerance(doc), what)


def run_autoclip(doc: Document) -> None:
    p, window = doc["parameters"], doc["steps"][-1]["t"] + 1
    if "quantile" in p:
        tx = autoclip(
            percentile=100 * p["quantile"],
            window=p["history_length"],
            include_current=False,
            scope="global" if p["global_threshold"] else "tensor",
            parity=True,
        )
    else:
        # The published list has no end; here it is as long as the run.
        tx = autoclip(percentile=p["clip_percentile"], window=window, parity=True)
    with precision(doc["dtype"]):
        updates, state, _ = replay(tx, stack_gradients(doc, whole=True))
        rows = jnp.asarray([row["t"] for row in doc["steps"]])
        updates, norm = jax.tree.map(lambda x: x[rows], (updates, state.norm))
        squares = [jnp.sum(x**2, axis=range(1, x.ndim)) for x in updates.values()]
        left = jnp.sqrt(sum(squares, jnp.zeros_like(norm)))
        given = {"total_norm": norm, "norm_in": norm, "norm_out": left}
        for key in given.keys() & doc["steps"][0].keys():
            check(given[key], column(doc, key), tolerance(doc), key)
        gradients_out(doc, updates)


def run_shrink(doc: Document) -> None:
    with precision(doc["dtype"]):
        for i, case in enumerate(doc["cases"]):
            tx = clippy(
                lambda_rel=case["relative"], lambda_abs=case["absolute"], parity=True
            )
            w = jnp.asarray(case["reference"])
            updates, state = tx.update(jnp.asarray(case["delta"]), tx.init(w), w)
            check(updates, case["out"], tolerance(doc), f"case {i}")
            check(state.clip_factor, case["scale"], SCALAR, f"scale of case {i}")


def _start(doc: Document) -> dict[str, jax.Array]:
    dtype = doc.get("dtype", "float64")
    return {k: jnp.asarray(np.array(doc[f"{k}0"]), dtype) for k in ("w", "b")}


def run_clippy_adagrad(doc: Document) -> None:
    p = doc["parameters"]
    clipped = p.get("clip_accumulator_update", False)
    standard = p.get("use_standard_accumulator_update", False)
    tx = clippy_adagrad(
        p["learning_rate"],
        lambda_rel=p["variable_relative_threshold"],
        lambda_abs=p["absolute_threshold"],
        lambda_acc=p["accumulator_relative_threshold"],
        initial_accumulator=p["initial_accumulator_value"],
        eps=p["epsilon"],
        accumulate="clipped" if clipped else "before" if standard else "after",
        parity=True,
    )
    with precision(doc["dtype"]):
        _, state, params = replay(tx, stack_gradients(doc), _start(doc))
        check(state.factors[:, 0], column(doc, "scale_b"), SCALAR, "scale_b")
        check(state.factors[:, 1], column(doc, "scale_w"), SCALAR, "scale_w")
        gradients_out(doc, params)


def run_stable_adamw(doc: Document) -> None:
    p = doc["parameters"]
    tx = stable_adamw(
        p["lr"],
        b1=p["betas"][0],
        b2=p["betas"][1],
        eps=p["eps"],
        weight_decay=p["weight_decay"],
        parity=True,
    )
    with precision(doc["dtype"]):
        _, state, params = replay(tx, stack_gradients(doc), _start(doc))
        check(state[0].rms[:, 0], column(doc, "rms_b"), SCALAR, "rms_b")
        check(state[0].rms[:, 1], column(doc, "rms_w"), SCALAR, "rms_w")
        gradients_out(doc, params)


def is_stable_adamw_arrays(doc: Document) -> bool:
    return doc.get("description", "").startswith("StableAdamW")


def run_stable_adamw_arrays(doc: Document) -> None:
    p, recorded = doc["config"], doc["float64"]
    scale = scale_by_stable_adamw(
        b1=p["betas"][0],
        b2=p["betas"][1],
        eps=p["eps"],
        weight_decay=p["weight_decay"],
        parity=True,
    )
    tx = optax.chain(scale, optax.scale(-p["lr"]))
    with precision("float64"):
        start = jnp.asarray(np.array(doc["initial_params"]))
        _, state, params = replay(tx, jnp.asarray(np.array(doc["gradients"])), start)
        near = TOLERANCE["float64"]
        check(params, recorded["param"], near, "param")
        check(state[0].mu, recorded["mu"], near, "mu")
        check(state[0].nu, recorded["nu"], near, "nu")
        check(state[0].rms[:, 0], recorded["rms"], SCALAR, "rms")


def run_block_rms(doc: Document) -> None:
    tx = clip_update_rms(doc["parameters"]["threshold"], parity=True)
    with precision(doc["dtype"]):
        updates, _, _ = replay(tx, stack_gradients(doc))
        gradients_out(doc, updates)


def run_levanter_cap(doc: Document) -> None:
    window, k = re.search(r"\((\d+), ([\d.]+)\)", doc["object"]).groups()
    tx = clip_update_norm(window=int(window), deviations=float(k), parity=True)
    with precision(doc["dtype"]):
        updates, state, _ = replay(tx, stack_gradients(doc))
        squares = [jnp.sum(x**2, axis=range(1, x.ndim)) for x in updates.values()]
        left = jnp.sqrt(sum(squares, jnp.zeros_like(state.norm)))
        check(state.norm, column(doc, "norm_in"), tolerance(doc), "norm_in")
        check(left, column(doc, "norm_out"), tolerance(doc), "norm_out")


READERS: Readers = {
    is_global_norm: run_global_norm,
    lambda d: d.get("package") == "zclip": run_zclip,
    lambda d: "lishuai-97/AdaGC" in said(d) or is_adagc_package(d): run_adagc,
    lambda d: "Adaptive gradient clipping" in d.get("what", ""): run_agc,
    lambda d: "pseeth/autoclip" in said(d) or "QuantileClip" in said(d): run_autoclip,
    lambda d: said(d).endswith("shrink_by_references"): run_shrink,
    lambda d: said(d).endswith("ClippyAdagrad"): run_clippy_adagrad,
    lambda d: said(d).endswith(".StableAdamW"): run_stable_adamw,
    is_stable_adamw_arrays: run_stable_adamw_arrays,
    lambda d: "clip_by_block_rms" in said(d): run_block_rms,
    lambda d: "clip_update_by_historical_norm" in said(d): run_levanter_cap,
    **vectors_skipping.READERS,
}
