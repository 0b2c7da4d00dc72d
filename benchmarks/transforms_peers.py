"""Packages that people use instead, timed on the same parameters where they install.

`smartclip` clips JAX gradients outside the compiled step and reads the norm on the
host; `zclip` works on PyTorch modules. Both are timed with AdamW of their framework and
do the work of the compiled steps (the gradients' accumulator is emptied within the
step). Both have seen norms like the present one for longer than their warm-up, so that
their rule is in force: `smartclip` then multiplies every gradient, by 1 if need be,
`zclip` those above its limit only. What cannot be made alike: PyTorch's AdamW runs
operation by operation and not as one compiled program, so compare `zclip` with the row
of `clip_grad_norm_` and not with those of JAX.
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

# More than either package's warm-up, 100 and 25 steps.
SEEN_STEPS = 120


def available(
    params: Any, learning_rate: float, gradient: float
) -> dict[str, Callable[[], float]]:
    """Functions that return the seconds of one step, by name of the method.

    Args:
      params: the parameters.
      learning_rate: of AdamW.
      gradient: the gradient over the parameters.
    """
    found: dict[str, Callable[[], float]] = {}
    if importlib.util.find_spec("smartclip") is not None:
        found["smartclip (JAX, eager): ZScoreClip, adamw"] = _smartclip(
            params, learning_rate, gradient
        )
    if importlib.util.find_spec("torch") is not None:
        found["torch: AdamW"] = _torch(params, learning_rate, gradient, None)
        found["torch: clip_grad_norm_, AdamW"] = _torch(
            params, learning_rate, gradient, _plain_clip()
        )
        if importlib.util.find_spec("zclip") is not None:
            found["torch: zclip, AdamW"] = _torch(
                params, learning_rate, gradient, _zclip(_norm(params, gradient))
            )
    return found


def _norm(params: Any, gradient: float) -> float:
    return gradient * float(optax.tree.norm(params))


def _usual_norms(norm: float) -> np.ndarray:
    """Norms of a run that is under way, 5 % apart; the present one is ordinary."""
    return norm * np.exp(0.05 * np.random.default_rng(0).normal(size=SEEN_STEPS))


def _smartclip(params: Any, learning_rate: float, gradient: float) -> Callable:
    import smartclip
    import smartclip.backends.jax as backend

    if not hasattr(jax, "tree_map"):  # the package still calls what JAX has removed
        jax.tree_map = jax.tree.map
    clipper = smartclip.ZScoreClip()
    for norm in _usual_norms(_norm(params, gradient)):
        clipper.observe(float(norm), key=("global",))
    assert clipper.can_clip()
    tx = optax.adamw(learning_rate)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    empty = jax.jit(lambda g: jax.tree.map(jnp.zeros_like, g), donate_argnums=0)

    def run() -> float:
        p, state = jax.tree.map(jnp.copy, params), tx.init(params)
        for _ in range(2):
            grads = jax.tree.map(lambda x: gradient * x, p)
            jax.block_until_ready((p, state, grads))
            start = time.perf_counter()
            clipped = backend.apply_grads(grads, p, clipper)
            p, state = compiled(p, state, clipped)
            grads = empty(grads)
            jax.block_until_ready((p, state, grads))
            seconds = time.perf_counter() - start
        return seconds

    return run


def _plain_clip() -> Callable[[Any], Any]:
    import torch

    return lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def _zclip(usual: float) -> Callable[[Any], Any]:
    import torch
    import zclip

    clip = zclip.ZClip()
    small = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1))])
    for norm in _usual_norms(usual):
        small[0].grad = torch.full([1], float(norm))
        clip.step(small)
    assert clip.initialized
    return clip.step


def _torch(params: Any, learning_rate: float, gradient: float, clip: Any) -> Callable:
    import torch

    arrays = [torch.tensor(np.asarray(x)) for x in jax.tree.leaves(params)]
    module = torch.nn.ParameterList([torch.nn.Parameter(x) for x in arrays])
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)

    def run() -> float:
        for _ in range(2):
            for p in module.parameters():
                p.grad.copy_(gradient * p.detach())
            start = time.perf_counter()
            if clip is not None:
                clip(module)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seconds = time.perf_counter() - start
        return seconds

    return run
