"""How values get out of each kind of equation that holds a jaxpr."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend import linear_util

from stabil.probes import _rows
from stabil.probes._harvest import Harvest, Mode, Values, evaluate, not_run
from stabil.probes._jaxprs import bind, trace_open, varying

Found = tuple[list[Any], _rows.Nodes, Values]


# A scan of more turns runs over time and not over layers: its turns become one row.
LONGEST_LOOP = 128


@functools.cache
def _unspecified() -> dict[str, Any]:
    """What `jit` writes where nothing was asked of an argument or output."""
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns
    keys = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    return {k: eqn.params[k][:1] for k in keys} | {"donated_invars": (False,)}


def _jit(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    closed = eqn.params["jaxpr"]
    new, hoisted, nodes = harvest.close(closed.jaxpr, closed.consts, mode)
    before, after = len(hoisted), len(new.outvars) - len(eqn.outvars)
    params: dict[str, Any] = {**eqn.params, "jaxpr": jex.ClosedJaxpr(new, ())}
    for key, fill in _unspecified().items():
        if key.startswith("out"):
            params[key] = (*params[key], *(fill * after))
        else:
            params[key] = (*(fill * before), *params[key])
    outs = eqn.primitive.bind(*hoisted, *operands, **params)
    return _split(outs, eqn, nodes)


def _split(outs: Any, eqn: Any, nodes: _rows.Nodes) -> Found:
    old = len(eqn.outvars)
    return list(outs[:old]), nodes, list(outs[old:])


def _scan(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    closed = eqn.params["jaxpr"]
    new, hoisted, nodes = harvest.close(closed.jaxpr, closed.consts, mode)
    outs = _bind_scan(eqn, jex.ClosedJaxpr(new, ()), hoisted, operands)
    outs, nodes, values = _split(outs, eqn, nodes)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    if length > LONGEST_LOOP:
        return outs, nodes, [harvest.merge(v) for v in values]
    return outs, (_rows.Loop(length, reverse, nodes),), values


def _bind_scan(eqn: Any, body: Any, hoisted: list[Any], operands: list[Any]) -> Any:
    """The scan of `eqn` with another body, which takes `hoisted` before all else."""
    params: dict[str, Any] = dict(eqn.params)
    if "num_consts" in params:
        params |= {"jaxpr": body, "num_consts": params["num_consts"] + len(hoisted)}
        if "linear" in params:
            params["linear"] = (*((False,) * len(hoisted)), *params["linear"])
        return eqn.primitive.bind(*hoisted, *operands, **params)
    # From JAX 0.12 the parameters describe nested trees: the public scan writes them.
    constants, carries = (len(part) for part in params["ft_in"].unpack()[:2])
    run = jex.jaxpr_as_fun(body)
    fixed = [*hoisted, *operands[:constants]]

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = run(*fixed, *carry, *xs)
        return outs[:carries], outs[carries:]

    rest = operands[constants:]
    carry, ys = jax.lax.scan(
        turn,
        list(rest[:carries]),
        list(rest[carries:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    """The last turn's values; a loop that never turned leaves NaN."""
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    for row in harvest.taps_in(cond):
        harvest.missed[row.name + row.suffix] = "the condition of while"
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]
    new, hoisted, nodes = harvest.close(body.jaxpr, body.consts, mode)
    avals = [v.aval for v in new.outvars[len(carry) :]]
    first = [not_run(a.shape) for a in avals]

    def keep_going(*args: Any) -> Any:
        inner = args[: len(args) - len(first)]
        return jex.jaxpr_as_fun(cond)(*inner)

    def turn(*args: Any) -> Any:
        inner = args[: len(args) - len(first)]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(new, ()))(*inner)

    new_cond, more_cond = trace_open(keep_going, [*cond.in_avals, *avals])
    ins = [v.aval for v in new.invars]
    new_body, more_body = trace_open(turn, [*ins, *avals])
    params = dict(
        p,
        cond_jaxpr=jex.ClosedJaxpr(new_cond, ()),
        body_jaxpr=jex.ClosedJaxpr(new_body, ()),
        cond_nconsts=n_cond + len(more_cond),
        body_nconsts=n_body + len(hoisted) + len(more_body),
    )
    outs = eqn.primitive.bind(
        *more_cond, *cond_consts, *more_body, *hoisted, *body_consts, *carry, *first,
        **params,
    )  # fmt: skip
    return _split(outs, eqn, nodes)


def _cond(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    """Rows of every branch; those of a branch that was not taken are NaN."""
    index, args = operands[0], operands[1:]
    closed = [harvest.close(b.jaxpr, b.consts, mode) for b in eqn.params["branches"]]
    old = len(eqn.outvars)
    shapes = [[v.aval.shape for v in new.outvars[old:]] for new, _, _ in closed]
    hoisted = [h for _, more, _ in closed for h in more]
    starts = [sum(len(m) for _, m, _ in closed[:i]) for i in range(len(closed))]

    def branch(i: int) -> Callable[..., Any]:
        new, more, _ = closed[i]

        def run(*inner: Any) -> Any:
            mine = inner[starts[i] : starts[i] + len(more)]
            outs = jex.jaxpr_as_fun(jex.ClosedJaxpr(new, ()))(
                *mine, *inner[len(hoisted) :]
            )
            rows = [
                outs[old:] if i == j else [not_run(s) for s in others]
                for j, others in enumerate(shapes)
            ]
            return [*outs[:old], *(r for group in rows for r in group)]

        return run

    avals = [*map(jax.typeof, hoisted), *(v.aval for v in eqn.invars[1:])]
    traced = [trace_open(branch(i), avals) for i in range(len(closed))]
    branches = tuple(jex.ClosedJaxpr(j, ()) for j, _ in traced)
    outs = eqn.primitive.bind(
        index, *hoisted, *args, **dict(eqn.params, branches=branches)
    )
    return _split(outs, eqn, tuple(n for _, _, nodes in closed for n in nodes))


def _checkpoint(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    again = mode.recompute or eqn.params["differentiated"]
    mode = mode._replace(recompute=again)
    new, hoisted, nodes = harvest.close(eqn.params["jaxpr"], (), mode)
    outs = eqn.primitive.bind(*hoisted, *operands, **dict(eqn.params, jaxpr=new))
    return _split(outs, eqn, nodes)


def _call(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    closed = eqn.params["call_jaxpr"]
    return evaluate(harvest, closed.jaxpr, closed.consts, operands, mode)


def _custom(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    """A call with its own derivative rule, which is kept.

    The values come from running the primal beside it, so that the rule sees the call
    as it was; the compiler merges the two where they are the same.
    """
    closed = eqn.params["call_jaxpr"]
    mode = mode._replace(keep=False)
    new, hoisted, nodes = harvest.close(closed.jaxpr, closed.consts, mode)
    held = [jax.lax.stop_gradient(x) for x in (*hoisted, *operands)]
    beside = jex.jaxpr_as_fun(jex.ClosedJaxpr(new, ()))(*held)
    rules = {
        key: _traced_within(rule, harvest.around)
        for key, rule in eqn.params.items()
        if key in ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")
    }
    eqn = eqn.replace(params={**eqn.params, **rules})
    return bind(eqn, operands), nodes, list(beside[len(eqn.outvars) :])


@linear_util.transformation2
def _traced_within(rule: Callable[..., Any], around: Any, *args: Any) -> Any:
    """A derivative rule, traced in a context when something is differentiated."""
    with around():
        return rule(*args)


def _shard_map(harvest: Harvest, eqn: Any, operands: list[Any], mode: Mode) -> Found:
    """Values of the whole tensor, merged from those of each device."""
    p = eqn.params
    nodes: list[_rows.Nodes] = []
    # The parameter has had three names and two senses since JAX 0.7.
    manual = p.get("newly_manual_axes", p.get("manual_axes"))
    if manual is None:
        manual = set(p["mesh"].axis_names) - set(p["auto"])
    axes = tuple(a for a in p["mesh"].axis_names if a in manual)

    def run(*args: Any) -> Any:
        outs, found, values = evaluate(harvest, p["jaxpr"], (), args, mode)
        nodes.append(found)
        if p["check_vma"]:
            values = [_once(harvest, v, axes) for v in values]
        return outs, [v[None] for v in values]

    mapped = jax.shard_map(
        run,
        mesh=p["mesh"],
        in_specs=tuple(p["in_specs"]),
        out_specs=(list(p["out_specs"]), jax.P(axes)),
        axis_names=set(axes),
        check_vma=p["check_vma"],
    )
    outs, values = mapped(*operands)
    return outs, nodes[-1], [harvest.merge(v) for v in values]


def _once(harvest: Harvest, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value on one of the devices that hold the same data, nothing on the rest."""
    same = tuple(a for a in axes if a not in varying(jax.typeof(value)))
    if not same:
        return value
    first = functools.reduce(
        jnp.logical_and, [jax.lax.axis_index(a) == 0 for a in same]
    )
    return jnp.where(first, value, harvest.nothing())


RULES: dict[str, Callable[[Harvest, Any, list[Any], Mode], Found]] = {
    "jit": _jit,
    "pjit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
    "closed_call": _call,
    "core_call": _call,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "custom_vjp_call_jaxpr": _custom,
    "shard_map": _shard_map,
}
