"""Arrays that a statistic of a user's own closes over, as arguments of its function.

A function that runs on each device's part of a tensor may close over nothing: it is
traced when the program is compiled, and what was captured belongs to another trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from stabil.probes._sums import SUMS, Elements

# From `Own` to its function of the captured arrays and the elements' fields.
_held: contextvars.ContextVar[Mapping[Any, Callable[..., Any]]] = (
    contextvars.ContextVar("stabil_captured", default=MappingProxyType({}))
)


class Own:
    """A user's function of `Elements`."""

    def __init__(self, of: Callable[[Elements], jax.Array]) -> None:
        self.of = of

    def __call__(self, elements: Elements) -> jax.Array:
        run = _held.get().get(self)
        return self.of(elements) if run is None else run(*elements)


def own_terms(groups: Sequence[str]) -> list[Own]:
    """The functions of users among the terms of some groups.

    They may close over what changes from one trace to the next: a trace that they are
    part of must not be kept.
    """
    terms = (t.of for g in groups for t in SUMS[g].terms)
    return [t for t in terms if isinstance(t, Own)]


class Captured:
    """What users' functions close over, at this point of a trace."""

    def __init__(self, groups: Sequence[str]) -> None:
        value, flag = (jax.ShapeDtypeStruct([], d) for d in (jnp.float32, bool))
        one = Elements(value, flag, value, value)
        self.arrays: list[jax.Array] = []
        self._programs: list[tuple[Own, Any, int]] = []
        for term in own_terms(groups):
            # A new function, whose trace JAX does not know from another time.
            closed = jax.make_jaxpr(functools.partial(term))(one)
            self.arrays += closed.consts
            self._programs.append((term, closed.jaxpr, len(closed.consts)))

    @contextlib.contextmanager
    def given(self, arrays: Sequence[jax.Array]) -> Generator[None]:
        """While this holds, the functions take these for what they close over."""
        runs, left = {}, list(arrays)
        for own, jaxpr, n in self._programs:
            if n:
                runs[own] = _elementwise(jaxpr, left[:n])
            left = left[n:]
        token = _held.set(runs)
        try:
            yield
        finally:
            _held.reset(token)


def _elementwise(jaxpr: Any, consts: list[jax.Array]) -> Callable[..., Any]:
    """A program of one element, run on arrays of elements."""

    def run(*fields: jax.Array) -> jax.Array:
        def one(*values: jax.Array) -> jax.Array:
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*values)[0]

        for _ in range(fields[0].ndim):
            one = jax.vmap(one)
        return one(*fields)

    return run
