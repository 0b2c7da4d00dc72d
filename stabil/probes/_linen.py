"""Flax Linen: statistics of module outputs, sown into a collection of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList

from stabil._tree import is_measured, path_name
from stabil.probes import _order, _reduce, _select
from stabil.vocabulary import Readings

# The variable collection that carries the statistics through lifted transforms.
COLLECTION = "stabil_probes"

_context = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class LinenProbe:
    """A Linen model whose `apply` also returns `Readings`; made by `stabil.probe`.

    Attributes:
      model: the Linen module, unchanged.
      patterns: globs over module paths; a module is probed if one matches.
      statistics: names of the columns of the readings.
      inputs: whether arguments are probed beside outputs.
    """

    model: nn.Module
    patterns: tuple[str, ...]
    statistics: tuple[str, ...]
    inputs: bool = False

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.init` returns; nothing is probed."""
        return self.model.init(*args, **kwargs)

    def apply(
        self, variables: Any, *args: Any, mutable: Any = False, **kwargs: Any
    ) -> tuple[Any, Readings]:
        """What `model.apply` returns for the same arguments, and the readings.

        Args:
          variables: as for `model.apply`.
          *args: as for `model.apply`.
          mutable: as for `model.apply`.
          **kwargs: as for `model.apply`: `rngs`, `method`, and the model's own.
        Returns:
          The return of `model.apply`, bit-identical, and `Readings` whose rows are in
          the order of execution.
        Raises:
          ValueError: a pattern of `where` matches no module that was called.
        Examples:
          >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
          >>> probed = stabil.probe(nn.Dense(2), stats="absmax")
          >>> params = probed.init(jax.random.key(0), jnp.ones((1, 3)))
          >>> y, readings = probed.apply(params, jnp.zeros((1, 3)))
          >>> readings.scalars()
          {'activations/Dense/absmax': 0.0}
        """
        variables = {k: v for k, v in variables.items() if k != COLLECTION}
        with_ours = _with_collection(mutable)
        # Equal modules under `nn.jit` share one trace. Where only some are selected,
        # all are measured, and the rest is dropped.
        for measure_all in (False, True):
            seen = _Seen(self, measure_all)
            with seen.context(), nn.intercept_methods(seen.intercept):
                out, new = self.model.apply(
                    variables, *args, mutable=with_ours, **kwargs
                )
            calls = _order.calls_in(new.get(COLLECTION, {}))
            if seen.knows(calls):
                break
        kept = type(new)({k: v for k, v in new.items() if k != COLLECTION})
        readings = seen.readings(calls)
        return (out if mutable is False else (out, kept)), readings


def _with_collection(mutable: Any) -> Any:
    """The filter `mutable`, with the probes' collection let through."""
    if mutable is True:
        return True
    if mutable is False:
        return (COLLECTION,)
    if isinstance(mutable, str):
        return (mutable, COLLECTION)
    if isinstance(mutable, DenyList):
        deny = mutable.deny
        if deny is True:
            return (COLLECTION,)
        if deny is False or isinstance(deny, (str, DenyList)):
            return mutable
        return DenyList(tuple(d for d in deny if d != COLLECTION))
    return (*mutable, COLLECTION)


class _Seen:
    """What one `apply` saw while it was traced."""

    def __init__(self, probe: LinenProbe, measure_all: bool) -> None:
        self.probe = probe
        self.measure_all = measure_all
        self.root = probe.model.name or type(probe.model).__name__
        self.calls: dict[_order.Call, _order.Trace] = {}
        self.lost: dict[str, None] = {}
        self.clock = 0
        self.stack: list[tuple[nn.Module, _order.Call]] = []

    def context(self) -> Any:
        """Keys the trace caches: an `nn.jit` traced without it is traced anew."""
        p = self.probe
        return _context((p.patterns, p.statistics, p.inputs, self.measure_all))

    def wants(self, call: _order.Call) -> bool:
        return _select.selected(self.probe.patterns, *call.names(self.root))

    def knows(self, calls: Any) -> bool:
        """Whether every call that is selected has been measured."""
        return all(
            _order.was_measured(rows) or not self.wants(call)
            for call, rows in calls.items()
        )

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @contextlib.contextmanager
    def entered(self, module: nn.Module, call: _order.Call) -> Iterator[None]:
        self.stack.append((module, call))
        try:
            yield
        finally:
            self.stack.pop()

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Runs a method; leaves its statistics in the module's scope."""
        module, method = context.module, context.method_name
        if not _is_public(module, method) or module.is_initializing():
            return next_fun(*args, **kwargs)
        # A method that calls the one it overrides: the outer return is the output.
        if any(m is module and c.method == method for m, c in self.stack):
            return next_fun(*args, **kwargs)
        call = _free_call(module, method)
        parents = tuple(c for _, c in self.stack)
        entry = self.tick()
        with self.entered(module, call):
            out = next_fun(*args, **kwargs)
        self.calls.setdefault(call, _order.Trace(entry, self.tick(), parents))
        # A lifted module runs as a clone of itself inside the transform, under the
        # same path: then the clone has recorded this call.
        if not module.has_variable(COLLECTION, call.key):
            self.record(module, call, args, kwargs, out)
        return out

    def record(
        self, module: nn.Module, call: _order.Call, args: Any, kwargs: Any, out: Any
    ) -> None:
        wanted = self.wants(call)
        if not module.is_mutable_collection(COLLECTION):
            if wanted:
                self.lost[call.names(self.root)[-1]] = None
            return
        measured = wanted or self.measure_all
        mark = _order.mark_key(self.calls[call], measured)
        rows: dict[str, jax.Array] = {mark: jnp.zeros([0], jnp.float32)}
        if measured:
            rows |= self.rows("out", out)
            if self.probe.inputs:
                rows |= self.rows("in", _arguments(args, kwargs))
        module.put_variable(COLLECTION, call.key, rows)

    def rows(self, side: str, tree: Any) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        found = [(path_name(p), x) for p, x in leaves if is_measured(x)]
        return {
            _order.leaf_key(side, i, name if len(found) > 1 else ""): _reduce.measure(
                jnp.asarray(x), self.probe.statistics
            )
            for i, (name, x) in enumerate(found)
        }

    def readings(self, calls: Any) -> Readings:
        """Names and orders the rows that came back, and misses those that did not."""
        known = [call.names(self.root) for call in (*self.calls, *calls)]
        _select.require_matches(self.probe.patterns, known)
        if self.lost:
            _warn_lost(tuple(self.lost))
        names, rows = _order.in_order(calls, self.calls, self.root, self.wants)
        width = len(self.probe.statistics)
        values = jnp.stack(rows) if rows else jnp.zeros([0, width], jnp.float32)
        return Readings(values, names, self.probe.statistics)


def _is_public(module: nn.Module, method: str) -> bool:
    """Whether this is a method that a user would call: no helper, no lambda."""
    if method == "__call__":
        return True
    return method != "setup" and method[0] != "_" and hasattr(type(module), method)


def _free_call(module: nn.Module, method: str) -> _order.Call:
    """The first call of this method that has left nothing in the module's scope."""
    index = 1
    while True:
        call = _order.Call(tuple(module.path), method, index)
        if not module.has_variable(COLLECTION, call.key):
            return call
        index += 1


def _arguments(args: Any, kwargs: Any) -> Any:
    return {**{str(i): a for i, a in enumerate(args)}, **kwargs}


def _warn_lost(names: tuple[str, ...]) -> None:
    shown = ", ".join(names[:10])
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    warnings.warn(
        f"no statistics per layer from {shown}{more}: they run inside a lifted "
        "transform (nn.scan, nn.vmap, nn.while_loop) that does not pass on the "
        f"collection {COLLECTION!r}, or in an apply inside another module; add it to "
        f"the transform, for example nn.scan(..., variable_axes={{'params': 0, "
        f"'{COLLECTION}': 0}})",
        stacklevel=4,
    )
