"""Faults in the output of one module of a Flax Linen model, inside the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import flax.linen as nn
import jax

from stabil._tree import path_name
from stabil.testing.inject._corrupt import takes
from stabil.testing.inject._dial import Dial
from stabil.testing.inject._fault import Fault, candidates, ends_path
from stabil.testing.inject._places import listed, struck_leaf


@contextlib.contextmanager
def activations(
    schedule: Sequence[Fault] | Dial, step: Any
) -> Generator[None, None, None]:
    """A context in which Linen modules put out what the faults of `step` leave.

    Put the model's `apply` in it, inside the loss function. The model needs no
    change. A fault strikes what the `__call__` of a module returns, before anybody
    else sees it: a probe, wherever it sits, reads the struck value.

    Args:
      schedule: the planted faults, or a `Dial`; those of places other than
        `activations` are ignored. `where` is the end of a module's path, for example
        `block_2/mlp`.
      step: a Python integer, or an int scalar inside a compiled step.

    Yields:
      None.

    Raises:
      ValueError: on leaving, if a fault met no module, or none whose output takes
        its kind.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(2), nn.relu])
      >>> x = jnp.ones([1, 2])
      >>> params = model.init(jax.random.key(0), x)
      >>> fault = Fault(kind="nan", place="activations", step=7, where="layers_0")
      >>> with activations((fault,), 7):
      ...     print(model.apply(params, x))
      [[nan nan]]
    """
    if isinstance(schedule, Dial):

        def strike_dialled(module: nn.Module, out: Any) -> Any:
            return schedule.plant_output("/".join(module.path), step, out)

        with nn.intercept_methods(_interceptor(strike_dialled)):
            yield
        return
    faults = candidates(schedule, step, "activations")
    if not faults:
        yield
        return
    seen: dict[str, None] = {}  # in the order of the calls
    struck: set[Fault] = set()

    def strike(module: nn.Module, out: Any) -> Any:
        path = "/".join(module.path)
        seen[path] = None
        for fault in faults:
            if ends_path(fault.where, path):
                out, hit = _struck_output(fault, step, path, out)
                struck.update({fault} if hit else ())
        return out

    with nn.intercept_methods(_interceptor(strike)):
        yield
    for fault in faults:
        if fault not in struck:
            raise ValueError(_never(fault, list(seen)))


def _interceptor(strike: Callable[[nn.Module, Any], Any]) -> Callable[..., Any]:
    inside = False

    def innermost(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        return strike(context.module, out) if _is_call(context) else out

    def outer(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        # The newest interceptor is the one that sits right at the module. Those of a
        # probe come later than this context, so the striking one is added once more,
        # below them, when the outermost call begins.
        nonlocal inside
        if inside:
            return next_fun(*args, **kwargs)
        inside = True
        try:
            with nn.intercept_methods(innermost):
                out = next_fun(*args, **kwargs)
        finally:
            inside = False
        return strike(context.module, out) if _is_call(context) else out

    return outer


def _is_call(context: Any) -> bool:
    return context.method_name == "__call__"


def _struck_output(fault: Fault, step: Any, path: str, out: Any) -> tuple[Any, bool]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(out)
    names = [f"{path}/{path_name(p)}" for p, _ in leaves]
    hits = [takes(fault, leaf) for _, leaf in leaves]
    new = [
        struck_leaf(fault, step, name, leaf) if hit else leaf
        for name, hit, (_, leaf) in zip(names, hits, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, new), any(hits)


def _never(fault: Fault, paths: list[str]) -> str:
    if any(ends_path(fault.where, path) for path in paths):
        return (
            f"needed an output that {fault.kind} can strike, got none from the module "
            f"{fault.where!r}; integers take bit_flip and garbage, complex numbers all "
            "but bit_flip, floats every kind"
        )
    return (
        f"needed a Linen module whose path ends with {fault.where!r}, got none; the "
        f"modules called were {listed(paths)}; put the model's apply inside the "
        "context"
    )
