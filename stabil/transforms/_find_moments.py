"""Where an optimizer keeps its moments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree

FIRST_NAMES = frozenset(
    "mu trace m m1 m2 momentum diagonal_momentum velocity exp_avg first_moment".split()
)
SECOND_NAMES = frozenset(
    "nu v nu_max v_row v_col n e_g exp_avg_sq second_moment".split()
)
# Trees that mirror the parameters and are no moments: copies of parameters, gradients
# being accumulated, sums that a restart would turn into another learning rate.
KEPT_NAMES = frozenset(
    "z x0 params0 init_params init_particles acc_grads grad_acc previous_gradient "
    "prev_updates g step_sizes grad_sum e_x s sum_of_squares grad_sum_sq".split()
)
# Fields whose name alone would mislead: `ema` could be a weight average, and SM3 keeps
# sums of squares under `mu` and its momentum under `nu`.
BY_TYPE = {
    optax.EmaState: {"ema": "first"},
    optax.ScaleBySM3State: {"mu": "kept", "nu": "first"},
}
# Beside these fields a second moment is not in units of the gradient's square.
FOREIGN_UNITS = frozenset({"params0", "hessian_fn_state"})


class MomentArray(NamedTuple):
    """One array of an optimizer state that holds a moment of one parameter.

    Attributes:
      path: slash path in the state, for example `0/mu/mlp/kernel`.
      position: index among the leaves of the state, in flattening order.
      leaf: index among the measured leaves of the parameters.
    """

    path: str
    position: int
    leaf: int


class Moments(NamedTuple):
    """Where the moments are; static, so that it can be found while tracing.

    Attributes:
      first: averages of gradients.
      second: averages of squared gradients, factored or not.
      unrecognised: slash paths of arrays that look like moments and could not be
        placed: they mirror a parameter under an unknown name, or have a moment's
        name and mirror no parameter.
    """

    first: tuple[MomentArray, ...]
    second: tuple[MomentArray, ...]
    unrecognised: tuple[str, ...]


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _placements(
    path: tuple, owners: dict[tuple, int]
) -> Iterator[tuple[int, str, tuple]]:
    """Parameter leaf, field name and parent path, the longest match first.

    The field stands before the parameter's path (`mu/mlp/kernel`) or, in states that
    keep one record per parameter, after it (`stats/mlp/kernel/momentum`).
    """
    n = len(path)
    for size in range(n - 1, -1, -1):
        for start in range(n - size, -1, -1):
            leaf = owners.get(path[start : start + size])
            if leaf is None:
                continue
            end = start + size
            if end == n and start > 0:
                yield leaf, _name(path[start - 1]), path[: start - 1]
            elif size and end < n:
                yield leaf, _name(path[end]), path[:end]


def _fits_first(shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    # A projected momentum (GaLore) has other sizes; 0 is right in any basis.
    return shape == param or len(shape) == len(param) > 1


def _fits_second(shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    one_axis_less = {param[:i] + param[i + 1 :] for i in range(len(param))}
    return shape == param or shape in one_axis_less or shape in {(), (1,)}


_FITS = {"first": _fits_first, "second": _fits_second}


def _kind(name: str, siblings: Collection[str]) -> str | None:
    """`first`, `second`, `kept` or None for the field `name` of one record."""
    if "n" in siblings and name == "v":  # Adan: v averages gradient differences
        return "first"
    if name == "n" and "m" not in siblings:
        return None
    if name in SECOND_NAMES:
        return "kept" if FOREIGN_UNITS & set(siblings) else "second"
    if name in FIRST_NAMES:
        return "first"
    return "kept" if name in KEPT_NAMES else None


def find_moments(
    state: Any, params: Any, *, names: Mapping[str, str] | None = None
) -> Moments:
    """Finds the first and second moments in the state of any Optax optimizer.

    An array is a moment of a parameter when the parameter's own key path stands in
    the array's path beside a field with a moment's name, and the shapes agree. So
    chains, `partition`, `masked`, `inject_hyperparams`, `MultiSteps`, schedule-free
    and records per parameter need no knowledge of their own.

    Args:
      state: state of an optimizer; arrays, tracers or `jax.ShapeDtypeStruct`.
      params: parameters, or gradients, of the structure that `init` saw.
      names: what further field names hold: `"first"`, `"second"` or `"kept"`.

    Returns:
      `Moments`. Copies of parameters (`z` of schedule-free), accumulated gradients
      and Adagrad's sums are no moments and are not listed.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones([2, 3])}
      >>> found = find_moments(optax.adamw(1e-3).init(params), params)
      >>> [m.path for m in found.first + found.second]
      ['0/mu/w', '0/nu/w']
    """
    measured = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if _tree.is_measured(leaf)
    ]
    owners = {tuple(path): i for i, (path, _) in enumerate(measured)}
    shapes = [tuple(jnp.shape(leaf)) for _, leaf in measured]
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    fields: dict[tuple, set[str]] = {}
    for path, _ in leaves:
        for i, key in enumerate(path):
            fields.setdefault(tuple(path[:i]), set()).add(_name(key))
    given = dict(names or {})
    typed = _kinds_by_type(state)
    out: dict[str, list] = {"first": [], "second": []}
    unrecognised = []
    for position, (path, leaf) in enumerate(leaves):
        if not _tree.is_measured(leaf):
            continue
        where, shape = _tree.path_name(path), tuple(jnp.shape(leaf))
        mirrors = False
        for owner, name, parent in _placements(tuple(path), owners):
            kind = given.get(name) or typed.get(parent, {}).get(name)
            kind = kind or _kind(name, fields[parent])
            if kind == "kept":
                break
            if kind and _FITS[kind](shape, shapes[owner]):
                out[kind].append(MomentArray(where, position, owner))
                break
            mirrors |= measured[owner][0] != () and shape == shapes[owner] != ()
        else:
            named = FIRST_NAMES | SECOND_NAMES - {"n", "v", "m"}
            if mirrors or (shape != () and named & {_name(k) for k in path}):
                unrecognised.append(where)
    return Moments(tuple(out["first"]), tuple(out["second"]), tuple(unrecognised))


def _kinds_by_type(state: Any) -> dict[tuple, dict[str, str]]:
    """For the paths of states in `BY_TYPE`, what their fields hold."""
    known = lambda node: type(node) in BY_TYPE  # noqa: E731
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=known)[0]
    return {tuple(path): BY_TYPE[type(node)] for path, node in nodes if known(node)}
