"""Packages that people use instead, timed on the same parameters where they install.

`smartclip` clips JAX gradients outside the compiled step and reads every norm on the
host; `zclip` works on PyTorch modules. Both are timed with AdamW of their framework.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def available(params: Any, learning_rate: float) -> dict[str, Callable[[], float]]:
    """Functions that return the seconds of one step, by name of the method."""
    found: dict[str, Callable[[], float]] = {}
    if importlib.util.find_spec("smartclip") is not None:
        found["smartclip (JAX, eager): ZScoreClip, adamw"] = _smartclip(
            params, learning_rate
        )
    if importlib.util.find_spec("torch") is not None:
        found["torch: clip_grad_norm_, AdamW"] = _torch(params, learning_rate, None)
        if importlib.util.find_spec("zclip") is not None:
            import zclip

            found["torch: zclip, AdamW"] = _torch(params, learning_rate, zclip.ZClip())
    return found


def _smartclip(params: Any, learning_rate: float) -> Callable[[], float]:
    import smartclip
    import smartclip.backends.jax as backend

    if not hasattr(jax, "tree_map"):  # the package still calls what JAX has removed
        jax.tree_map = jax.tree.map
    clipper = smartclip.ZScoreClip()
    tx = optax.adamw(learning_rate)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run() -> float:
        p, state = jax.tree.map(jnp.copy, params), tx.init(params)
        for _ in range(2):
            grads = jax.tree.map(lambda x: 0.01 * x, p)
            jax.block_until_ready((p, state, grads))
            start = time.perf_counter()
            p, state = compiled(p, state, backend.apply_grads(grads, p, clipper))
            jax.block_until_ready((p, state))
            seconds = time.perf_counter() - start
        return seconds

    return run


def _torch(params: Any, learning_rate: float, clip: Any) -> Callable[[], float]:
    import torch

    arrays = [torch.tensor(np.asarray(x)) for x in jax.tree.leaves(params)]
    module = torch.nn.ParameterList([torch.nn.Parameter(x) for x in arrays])
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)

    def run() -> float:
        for _ in range(2):
            for p in module.parameters():
                p.grad = 0.01 * p.detach()
            start = time.perf_counter()
            if clip is None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            else:
                clip.step(module)
            optimizer.step()
            seconds = time.perf_counter() - start
        return seconds

    return run
