"""NNX modules that run inside Linen modules: seen at their place below these."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any


@contextlib.contextmanager
def nnx_inside(
    path: Callable[[], str], tap: Callable[[Any, str, Any], Any]
) -> Generator[None]:
    """While this holds, calls of NNX modules are tapped.

    The outermost one is what its Linen module stands for, and has its row there.

    Args:
      path: tells the path of the Linen module that is running.
      tap: from a module, its path and its output to that output.
    """
    if "flax.nnx" not in sys.modules:  # nobody has made a module of it
        yield
        return
    from flax import nnx

    from stabil.probes import _nnx

    running: list[Any] = []

    def call(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, nnx.Module) or any(m is module for m in running):
            return original(module, *args, **kwargs)
        outermost = not running
        marked = _mark(nnx, module, path()) if outermost else ()
        running.append(module)
        try:
            out = original(module, *args, **kwargs)
        finally:
            running.pop()
            for one in marked:
                vars(one).pop(_nnx._PATH, None)
        name = vars(module).get(_nnx._PATH)
        return out if outermost or name is None else tap(module, name, out)

    with _nnx._lock, contextlib.ExitStack() as stack:
        for cls in _classes(nnx.Module):
            stack.enter_context(_nnx._wrapped(cls, call))
        yield


def _mark(nnx: Any, module: Any, base: str) -> list[Any]:
    """Writes its path on each module below this one."""
    from stabil.probes._nnx import _PATH

    found = [(p, m) for p, m in nnx.iter_graph(module) if isinstance(m, nnx.Module)]
    for at, one in found:
        setattr(one, _PATH, "/".join(filter(None, (base, *map(str, at)))))
    return [one for _, one in found]


def _classes(cls: type) -> list[type]:
    """The subclasses that have a `__call__` of their own, each once."""
    below = dict.fromkeys(c for sub in cls.__subclasses__() for c in _classes(sub))
    own = [cls] if "__call__" in vars(cls) else []
    return [*own, *below]
