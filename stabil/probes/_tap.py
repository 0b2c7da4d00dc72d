"""The tag: an identity that names a value, and its cotangent, inside any JAX code."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stabil._tree import is_measured, path_name

FORWARD, GRADIENT = "forward", "grad"
PLACE = "place"  # a tap that nobody reads: it says that the place exists

# Names a value. Parameters: `name`, slash path; `suffix`, which tensor of that place;
# `kind`, one of the above; `backward`, whether its cotangent is named too.
tap_p = Primitive("stabil_tap")
# Stands on the tangent of a tapped value; its transpose is a tap on the cotangent.
mark_p = Primitive("stabil_mark")
# The identity of its first operand, which keeps the others in the program: what nobody
# uses is dropped when a scan or a checkpoint is differentiated.
beside_p = Primitive("stabil_beside")

for _p in (tap_p, mark_p):
    _p.def_impl(lambda x, **_: x)
    _p.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(_p, lambda ctx, x, **_: [x])


beside_p.def_impl(lambda x, *_: x)
beside_p.def_abstract_eval(lambda x, *_: x)
mlir.register_lowering(beside_p, lambda ctx, x, *_: [x])
batching.primitive_batchers[beside_p] = lambda args, dims: (
    beside_p.bind(*args),
    dims[0],
)
ad.primitive_jvps[beside_p] = lambda primals, tangents: (
    beside_p.bind(*primals),
    tangents[0],
)


def _batch(primitive: Primitive) -> Any:
    def rule(args: Any, dims: Any, **params: Any) -> Any:
        return primitive.bind(args[0], **params), dims[0]

    return rule


batching.primitive_batchers[tap_p] = _batch(tap_p)
batching.primitive_batchers[mark_p] = _batch(mark_p)


def _tap_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    if params["backward"] and not isinstance(t, ad.Zero):
        t = mark_p.bind(t, name=params["name"], suffix=params["suffix"])
    return tap_p.bind(x, **params), t


def _mark_transpose(ct: Any, _: Any, *, name: str, suffix: str) -> Any:
    if isinstance(ct, ad.Zero):
        return [ct]
    named = dict(name=name, suffix=suffix, kind=GRADIENT, backward=False)
    return [tap_p.bind(ct, **named)]


ad.primitive_jvps[tap_p] = _tap_jvp
ad.deflinear2(mark_p, _mark_transpose)


def tap(x: Any, name: str) -> Any:
    """Names a value, so that `stabil.collect` can tell its statistics.

    The identity, at no cost, in a program that is not collected. The cotangent that
    flows back to the value is named too: `stabil.collect(..., backward=True)` reads
    it at `name@grad`.

    Args:
      x: an array or pytree; leaves that are not floating arrays pass unnamed.
      name: slash path of the place, for example `encoder/layer_3`.
    Returns:
      `x`, bit-identical.
    Raises:
      TypeError: `name` is no string.
    Examples:
      >>> import jax.numpy as jnp
      >>> from stabil.probes import collect, tap
      >>> def f(x):
      ...     return tap(2 * x, "doubled").sum()
      >>> y, readings = collect(f, stats="absmax")(jnp.arange(3.0))
      >>> readings.scalars()
      {'activations/doubled/absmax': 4.0}
    """
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"needed `name` as a slash path, got {name!r}; write for example "
            "stabil.tap(x, 'encoder/layer_3')"
        )
    return tap_tree(x, name, "", backward=True)


def tap_tree(
    tree: Any, name: str, side: str, *, backward: bool, kind: str = FORWARD
) -> Any:
    """Names every floating array of a tree by its place in it.

    Args:
      tree: a pytree; other leaves pass as they are.
      name: slash path of the place.
      side: "" or `@input`.
      backward: whether the cotangents are named too.
      kind: forward, or place.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    measured = [is_measured(x) for _, x in leaves]
    out = []
    for (path, x), ok in zip(leaves, measured, strict=True):
        if ok:
            leaf = f":{path_name(path)}" if sum(measured) > 1 else ""
            named = dict(name=name, suffix=side + leaf, kind=kind, backward=backward)
            x = tap_p.bind(jnp.asarray(x), **named)
        out.append(x)
    return jax.tree.unflatten(treedef, out)


_module = contextvars.ContextVar("stabil_module", default="")


@contextlib.contextmanager
def inside_module(path: str) -> Generator[None]:
    """While this holds, values tapped beside others belong to a module."""
    token = _module.set(path)
    try:
        yield
    finally:
        _module.reset(token)


def tap_beside(x: jax.Array, sides: Mapping[str, jax.Array], name: str) -> jax.Array:
    """Names values that are computed only to be read, and returns `x`.

    They cost nothing in a program that is not collected, and have no gradient.

    Args:
      x: an array that the program goes on with.
      sides: values by name.
      name: slash path of the place; below that of the module inside a probed model.
    """
    held = []
    for side, value in sides.items():
        path = "/".join(part for part in (_module.get(), name, side) if part)
        value = jax.lax.stop_gradient(value)
        held.append(tap_tree(value, path, "", backward=False))
    return beside_p.bind(x, *held)
