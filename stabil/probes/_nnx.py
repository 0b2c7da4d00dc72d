"""Flax NNX: taps on module outputs, put there by wrapping `__call__` for one trace."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from flax import nnx

from stabil.probes import _program
from stabil.probes._cadence import Probe
from stabil.probes._tap import FORWARD, PLACE, inside_module, tap_tree
from stabil.vocabulary import Readings

# Where a module is, as a static attribute of a copy: it survives the splitting and
# merging inside `nnx.scan` or `nnx.remat`, which make new objects.
_PATH = "_stabil_path"
_lock = threading.RLock()
_context = jax.make_user_context(None)


class NnxProbe(Probe):
    """An NNX module whose call also returns `Readings`; made by `stabil.probe`."""

    model: nnx.Module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Readings]:
        """What `model(...)` returns for the same arguments, and the readings.

        The model's state (batch statistics, random counters, caches) is updated as by
        the plain call. The model is traced, as `nnx.jit` would.

        Args:
          *args: as for the model; modules and `nnx.Rngs` among them are updated too.
          **kwargs: as for the model.
        Returns:
          The model's return, bit-identical, and `Readings` whose rows are in the order
          of execution.
        Raises:
          ValueError: a pattern of `where` matches no module that was called, or
            `every` is above 1 and the step is not known: use `at`.
        Examples:
          >>> import jax.numpy as jnp, stabil
          >>> from flax import nnx
          >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
          >>> y, readings = stabil.probe(model, stats="absmax")(jnp.zeros((1, 3)))
          >>> readings.scalars()
          {'activations/Linear/absmax': 0.0}
        """
        self.check_due()
        copies = Copies((self.model, args, kwargs))
        seen = _Seen(self)

        def call(model: Any, args: Any, kwargs: Any) -> Any:
            with seen.watching(model):
                return model(*args, **kwargs)

        program = _program.trace(lambda: copies.run(lambda all_: call(*all_)))
        root = type(self.model).__name__
        (out, new), readings = self.read(program, seen.places, root, seen.again)
        copies.update(new)
        return out, readings


class Copies:
    """The NNX objects in a tree, made anew inside a trace, and updated after it."""

    def __init__(self, tree: Any) -> None:
        self.leaves, self.treedef = jax.tree.flatten(tree, is_leaf=_has_state)
        self.at = [i for i, x in enumerate(self.leaves) if _has_state(x)]
        self.objects = [self.leaves[i] for i in self.at]
        self.graph, state = nnx.split(self.objects)
        self.arrays, self.statedef = jax.tree.flatten(state)

    def run(self, fn: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The return of `fn` on the tree, and the state that it leaves."""
        # Made here, so that the variables belong to this trace.
        state = jax.tree.unflatten(self.statedef, self.arrays)
        copies = nnx.merge(self.graph, state)
        leaves = list(self.leaves)
        for i, copy in zip(self.at, copies, strict=True):
            leaves[i] = copy
        out = fn(jax.tree.unflatten(self.treedef, leaves))
        return out, nnx.state(copies)

    def update(self, state: Any) -> None:
        """Gives the objects the state that `run` left."""
        nnx.update(self.objects, state)


def _has_state(x: Any) -> bool:
    return isinstance(
        x, (nnx.Module, nnx.Optimizer, nnx.Metric, nnx.Rngs, nnx.RngStream)
    )


class _Seen:
    """Taps module outputs while a model is traced; knows which modules were called."""

    def __init__(self, probe: NnxProbe) -> None:
        self.probe = probe
        self.places: dict[tuple[str, ...], type] = {}
        self.classes: dict[type, None] = {}
        self.running: list[Any] = []

    @contextlib.contextmanager
    def watching(self, model: nnx.Module) -> Generator[None]:
        """Marks the modules of this copy, and wraps the calls of their classes."""
        for path, module in nnx.iter_graph(model):
            if isinstance(module, nnx.Module) and callable(module):
                name = "/".join(map(str, path)) or type(module).__name__
                setattr(module, _PATH, name)
                self.classes[type(module)] = None
        with self.again():
            yield

    @contextlib.contextmanager
    def again(self) -> Generator[None]:
        """Wraps the calls of the classes of the modules that were marked."""
        p = self.probe
        key = (p.patterns, p.inputs, p.backward)
        # Classes are everybody's: one probed trace at a time.
        with _lock, contextlib.ExitStack() as stack:
            stack.enter_context(_context(key))
            for cls in self.classes:
                stack.enter_context(_wrapped(cls, self.call))
            yield

    def call(self, original: Callable[..., Any], module: Any, *args, **kwargs) -> Any:
        """Calls a module, and taps what it returns."""
        name = vars(module).get(_PATH)
        # A call of the method that this one overrides: the outer return is the output.
        if name is None or any(m is module for m in self.running):
            return original(module, *args, **kwargs)
        wanted = self.probe.wants(name, kind=type(module))
        backward = wanted and self.probe.backward
        if wanted and self.probe.inputs:
            both = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
            both = tap_tree(both, name, "@input", backward=backward)
            args = tuple(both[str(i)] for i in range(len(args)))
            kwargs = {k: both[k] for k in kwargs}
        self.running.append(module)
        path = "" if name == type(self.probe.model).__name__ else name
        try:
            with inside_module(path):
                out = original(module, *args, **kwargs)
        finally:
            self.running.pop()
        self.places[(name,)] = type(module)
        kind = FORWARD if wanted else PLACE
        return tap_tree(out, name, "", backward=backward, kind=kind)


@contextlib.contextmanager
def _wrapped(cls: type, call: Callable[..., Any]) -> Generator[None]:
    """Routes the calls of a class, and of no subclass's own, through `call`."""
    own = "__call__" in vars(cls)
    original = cls.__call__

    @functools.wraps(original)
    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, *args, **kwargs)

    cls.__call__ = wrapper
    try:
        yield
    finally:
        if own:
            cls.__call__ = original
        else:
            del cls.__call__
