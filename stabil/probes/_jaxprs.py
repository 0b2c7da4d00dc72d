"""Small tools for jaxprs: trace, bind, and look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants, if it is a closed one."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    """The open jaxprs among the parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (jex.ClosedJaxpr, jex.Jaxpr)):
                yield open_jaxpr(one)


def trace_open(fn: Callable[..., Any], avals: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A jaxpr of `fn` whose constants are its first arguments, and those constants.

    Nothing is left closed over: what a statistic captures from outside (a step number,
    a threshold) reaches the inside of every loop and branch as an argument.
    """
    closed = jax.make_jaxpr(fn)(*map(_struct, avals))
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(constvars=[], invars=invars, debug_info=names), closed.consts


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    more = {}
    if varying(aval):
        if hasattr(aval, "vma"):
            more["vma"] = aval.vma
        else:
            more["manual_axis_type"] = aval.mat
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and not sharding.mesh.empty:
        more["sharding"] = sharding
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, **more)


def varying(aval: Any) -> frozenset[str]:
    """The manual mesh axes along which a value may differ; none outside `shard_map`."""
    # An attribute of the type itself until JAX 0.10, of its manual axis type since.
    mat = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", None) or getattr(mat, "varying", ()))


def bind(eqn: Any, operands: list[Any]) -> list[Any]:
    """Runs an equation as it is."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    outs = eqn.primitive.bind(*subfuns, *operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


class context_of:
    """The equation's own context and name scope, so that profiles keep their names."""

    def __init__(self, eqn: Any) -> None:
        self.manager = eqn.ctx.manager
        scope = str(eqn.source_info.name_stack)
        self.scope = jax.named_scope(scope) if scope else None

    def __enter__(self) -> None:
        self.manager.__enter__()
        if self.scope is not None:
            self.scope.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.scope is not None:
            self.scope.__exit__(*error)
        self.manager.__exit__(*error)


def last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Which variables each equation is the last to need."""
    seen = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    last: dict[int, list[Any]] = {}
    for i in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[i]
        for v in (*eqn.invars, *eqn.outvars):
            if not isinstance(v, jex.Literal) and v not in seen:
                seen.add(v)
                last.setdefault(i, []).append(v)
    return last
