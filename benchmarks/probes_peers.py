"""What finds a bad value otherwise: the same step with other tools.

`debug_nans` reads every output of the step on the host; `checkify` carries a flag for
every operation that may make a NaN; PyTorch has hooks on the modules that a probe reads
by default, with the minimal set, either one read by the host for every value or one for
all of them at the end of the step. Each ratio is to the same framework's step
without the tool.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

Step = Callable[[], Any]


def jax_peers(step: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Step]:
    """The plain step, and the same with JAX's own tools."""
    plain, checked = jax.jit(step), jax.jit(step)
    with_errors = jax.jit(checkify.checkify(step, errors=checkify.float_checks))

    def debug_nans() -> None:
        with jax.debug_nans(True):
            jax.block_until_ready(checked(*args))

    def run_checkify() -> None:
        error, out = with_errors(*args)
        jax.block_until_ready(out)
        error.throw()

    return {
        "jax": lambda: jax.block_until_ready(plain(*args)),
        "jax_debug_nans": debug_nans,
        "jax_checkify": run_checkify,
    }


def torch_peers(
    layers: int, width: int, length: int, batch: int, vocabulary: int, dtype: str
) -> dict[str, Step]:
    """The same decoder and step in PyTorch, with and without hooks."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    kind = getattr(torch, dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, width // 4))
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    ends = [nn.LayerNorm(width), nn.Linear(width, vocabulary)]
    embed = nn.Embedding(vocabulary, width)
    model = nn.Sequential(embed, *blocks, *ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    values: list[Any] = []

    def tell(out: Any) -> list[Any]:
        x = out.detach().float()
        return [
            x.isnan().sum(),
            x.isinf().sum(),
            x.abs().max(),
            x.square().mean().sqrt(),
        ]

    def one_by_one(module: Any, args: Any, out: Any) -> None:
        values.extend(v.item() for v in tell(out))

    def batched(module: Any, args: Any, out: Any) -> None:
        values.append(torch.stack([v.float() for v in tell(out)]))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", kind, enabled=dtype != "float32"):
            logits = model(tokens[:, :-1])
        F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        if values and not isinstance(values[0], float | int):
            torch.stack(values).tolist()
        values.clear()
        optimizer.step()

    def hooked(hook: Callable[..., None]) -> Step:
        def run() -> None:
            handles = [m.register_forward_hook(hook) for m in model]
            step()
            for handle in handles:
                handle.remove()

        return run

    return {
        "torch": step,
        "torch_hooks_one_read_each": hooked(one_by_one),
        "torch_hooks_one_read": hooked(batched),
    }


def measure_peers(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    **model: Any,
) -> dict[str, Any]:
    """Step-time ratios of all tools, measured in turn; a note where one is missing."""
    families = {"jax": jax_peers(step, args)}
    found: dict[str, Any] = {}
    if importlib.util.find_spec("torch"):
        families["torch"] = torch_peers(**model)
    else:
        found["torch"] = {"note": "not installed"}
    times: dict[str, list[float]] = {n: [] for f in families.values() for n in f}
    for _ in range(rounds):
        for steps in families.values():
            for name, run in steps.items():
                start = clock()
                run()
                times[name].append(clock() - start)
    for base, steps in families.items():
        for name in steps:
            pairs = list(zip(times[name], times[base], strict=True))[2:]
            ratio = statistics.median(a / b for a, b in pairs)
            found[name] = {
                "step_ratio": ratio,
                "step_seconds": statistics.median(a for a, _ in pairs),
                "first_seconds": times[name][0],
            }
    return found
