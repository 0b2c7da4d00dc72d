"""Flax Linen: taps on module outputs, put there by an interceptor."""

from __future__ import annotations

import contextlib
from typing import Any

import flax.linen as nn
import jax

from stabil.probes import _program
from stabil.probes._bridge import nnx_inside
from stabil.probes._cadence import Probe
from stabil.probes._tap import FORWARD, PLACE, inside_module, tap_tree
from stabil.vocabulary import Readings

_context = jax.make_user_context(None)


class LinenProbe(Probe):
    """A Linen model whose `apply` also returns `Readings`; made by `stabil.probe`."""

    model: nn.Module

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.init` returns; nothing is probed."""
        return self.model.init(*args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Readings]:
        """What `model.apply` returns for the same arguments, and the readings.

        The model is traced, as `jax.jit` would, also where the caller is not.

        Args:
          variables: as for `model.apply`.
          *args: as for `model.apply`.
          **kwargs: as for `model.apply`: `rngs`, `mutable`, `method`, and the model's
            own.
        Returns:
          The return of `model.apply`, bit-identical, and `Readings` whose rows are in
          the order of execution.
        Raises:
          ValueError: a pattern of `where` matches no module that was called, or
            `every` is above 1 and the step is not known: use `at`.
        Examples:
          >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
          >>> probed = stabil.probe(nn.Dense(2), stats="absmax")
          >>> params = probed.init(jax.random.key(0), jnp.ones((1, 3)))
          >>> y, readings = probed.apply(params, jnp.zeros((1, 3)))
          >>> readings.scalars()
          {'activations/Dense/absmax': 0.0}
        """
        self.check_due()

        def run() -> Any:
            return self.model.apply(variables, *args, **kwargs)

        seen = _Seen(self)
        with seen:
            program = _program.trace(run)
        if _program.shares_a_trace(program.closed.jaxpr):
            # Equal modules under `nn.jit` were traced once, under one name.
            seen = _Seen(self, apart=True)
            with seen:
                program = _program.trace(run)
        return self.read(program, seen.places, seen.root, lambda: seen)


class _Seen:
    """Taps module outputs while a model is traced; knows which modules were called."""

    def __init__(self, probe: LinenProbe, apart: bool = False) -> None:
        self.probe = probe
        self.apart = apart
        # Of this run alone: what it traces is never met in a cache.
        self.run = object() if apart else None
        self.clock = 0
        self.root = probe.model.name or type(probe.model).__name__
        self.places: dict[tuple[str, ...], type] = {}
        self.stack: list[_Call] = []
        self.contexts: list[contextlib.ExitStack] = []

    def __enter__(self) -> _Seen:
        contexts = contextlib.ExitStack()
        self.contexts.append(contexts)
        contexts.enter_context(nn.intercept_methods(self.intercept))
        contexts.enter_context(nnx_inside(self.path, self.tap_inside))
        self.turn()
        return self

    def __exit__(self, *error: Any) -> None:
        self.contexts.pop().__exit__(*error)

    def turn(self) -> None:
        """Keys the trace caches by this probe, and by the point in time if `apart`.

        An `nn.jit` that was traced without the probe is then traced anew; with `apart`
        each of several equal modules is.
        """
        p = self.probe
        self.clock += self.apart
        key = (p.patterns, p.inputs, p.backward, self.run, self.clock)
        self.contexts[-1].enter_context(_context(key))

    def prefix(self, module: nn.Module) -> tuple[str, ...]:
        """Where the module's own tree hangs: an `apply` inside a module begins anew."""
        if not self.stack:
            return ()
        around = self.stack[-1]
        # A module without a path is the root of a tree: the one around it, cloned by a
        # lifted method, or another one.
        if module.path or (
            not around.module.path and type(module) is type(around.module)
        ):
            return around.prefix
        return (*(around.path or (self.root,)), type(module).__name__)

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Runs a method of a module, and taps what it returns."""
        module, method = context.module, context.method_name
        call = _Call(module, method, self.prefix(module))
        # A method that calls the one it overrides: the outer return is the output.
        inherited = any(c.method == method and c.module is module for c in self.stack)
        # Unbound is a model whose own `apply` is running.
        unseen = module.scope is None or module.is_initializing()
        if not call.is_public or inherited or unseen:
            return next_fun(*args, **kwargs)
        names = call.names(self.root)
        wanted = self.probe.wants(*names, kind=type(module))
        if wanted and self.probe.inputs:
            args, kwargs = self.tap_inputs(names[0], args, kwargs)
        self.stack.append(call)
        try:
            with inside_module("/".join(call.path)):
                out = next_fun(*args, **kwargs)
        finally:
            self.stack.pop()
        if self.stack:
            self.stack[-1].lifted |= self.stack[-1].same_place(call)
        self.places[names] = type(module)
        # A lifted method runs as a clone of its module, which has been tapped.
        if not call.lifted:
            kind = FORWARD if wanted else PLACE
            backward = wanted and self.probe.backward
            out = tap_tree(out, names[0], "", backward=backward, kind=kind)
        if self.apart:
            self.turn()
        return out

    def path(self) -> str:
        """Path of the module that is running."""
        return "/".join(self.stack[-1].path) if self.stack else ""

    def tap_inside(self, module: Any, name: str, out: Any) -> Any:
        """Taps what an NNX module inside a Linen module returns."""
        if not self.stack or self.stack[-1].module.is_initializing():
            return out
        wanted = self.probe.wants(name, kind=type(module))
        self.places[(name,)] = type(module)
        kind = FORWARD if wanted else PLACE
        backward = wanted and self.probe.backward
        return tap_tree(out, name, "", backward=backward, kind=kind)

    def tap_inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        both = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        both = tap_tree(both, name, "@input", backward=self.probe.backward)
        return tuple(both[str(i)] for i in range(len(args))), {
            k: both[k] for k in kwargs
        }


class _Call:
    """One call of one method, while it runs.

    Attributes:
      module: whose method it is.
      method: name of the method.
      prefix: path of the module that the module's own tree of names hangs below.
      lifted: whether a clone of the module ran the same method inside.
    """

    def __init__(self, module: nn.Module, method: str, prefix: tuple[str, ...]) -> None:
        self.module = module
        self.method = method
        self.prefix = prefix
        self.lifted = False

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.prefix, *self.module.path)

    @property
    def is_public(self) -> bool:
        """Whether a user would call this: no helper, no lambda."""
        if self.method == "__call__":
            return True
        real = hasattr(type(self.module), self.method)
        return real and self.method != "setup" and self.method[0] != "_"

    def names(self, root: str) -> tuple[str, ...]:
        """The row's name, then the module's path where that is another."""
        path = "/".join(self.path) or root
        return (path,) if self.method == "__call__" else (f"{path}.{self.method}", path)

    def same_place(self, other: _Call) -> bool:
        return other.method == self.method and other.path == self.path
