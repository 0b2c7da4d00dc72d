"""Where an optimizer keeps its moments, and how to restart them without a kick."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


def _kind(name: str, siblings: Collection[str], names: tuple[Collection, Collection]):
    """`first`, `second`, `kept` or None for the field `name` of one record."""
    if name in names[0]:
        return "first"
    if name in names[1]:
        return "second"
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
    state: Any,
    params: Any,
    *,
    first: Collection[str] = (),
    second: Collection[str] = (),
) -> Moments:
    """Finds the first and second moments in the state of any Optax optimizer.

    An array is a moment of a parameter when the parameter's own key path stands in
    the array's path beside a field with a moment's name, and the shapes agree. So
    chains, `partition`, `masked`, `inject_hyperparams`, `MultiSteps`, schedule-free
    and records per parameter need no knowledge of their own.

    Args:
      state: state of an optimizer; arrays, tracers or `jax.ShapeDtypeStruct`.
      params: parameters, or gradients, of the structure that `init` saw.
      first: further field names that hold first moments.
      second: further field names that hold averages of squared gradients.

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
    names = (first, second)
    typed = _kinds_by_type(state)
    out: dict[str, list] = {"first": [], "second": []}
    unrecognised = []
    for position, (path, leaf) in enumerate(leaves):
        if not _tree.is_measured(leaf):
            continue
        where, shape = _tree.path_name(path), tuple(jnp.shape(leaf))
        mirrors = False
        for owner, name, parent in _placements(tuple(path), owners):
            kind = typed.get(parent, {}).get(name) or _kind(name, fields[parent], names)
            if kind == "kept":
                break
            if kind and _FITS[kind](shape, shapes[owner]):
                out[kind].append(MomentArray(where, position, owner))
                break
            mirrors |= shape == shapes[owner] != ()
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


def restart_moments(
    state: Any,
    params: Any,
    restart: jax.Array,
    fill: jax.Array,
    *,
    found: Moments | None = None,
) -> Any:
    """Restarts the moments of chosen leaves; everything else stays bit-identical.

    First moments become 0 and second moments become `fill`, the level that they would
    have in a steady run. A second moment of 0 beside a counter that goes on would
    multiply the next updates by up to `sqrt((1 - b1**2) / (1 - b2))` (13.8 at
    b2 = 0.999); with `fill` the first moment's own build-up is the warm-up.

    Args:
      state: state of an optimizer.
      params: parameters, or gradients, of the structure that `init` saw.
      restart: bool `[leaves]` over the measured leaves of `params`, or a scalar.
      fill: float32 `[leaves]`, or a scalar: mean square of an entry of the gradient.
        Where it is not finite or not positive, a second moment keeps its finite
        entries and the others become 0.
      found: what `find_moments(state, params)` returned, when it needed names.

    Returns:
      State of the same structure, shapes and dtypes. Counters and schedules go on.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> params, tx = jnp.ones(2), optax.adam(1e-3)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> state = restart_moments(state, params, jnp.array(True), jnp.array(4.0))
      >>> print(state[0].mu, state[0].nu, state[0].count)
      [0. 0.] [4. 4.] 1
    """
    found = find_moments(state, params) if found is None else found
    sizes = [x.size for x in map(jnp.asarray, _measured(params))]
    restart = jnp.broadcast_to(restart, [len(sizes)])
    fill = jnp.broadcast_to(fill, [len(sizes)])
    usable = jnp.isfinite(fill) & (fill > 0)
    leaves, treedef = jax.tree.flatten(state)
    for m in found.first:
        x = leaves[m.position]
        leaves[m.position] = jnp.where(restart[m.leaf], jnp.zeros([], x.dtype), x)
    for m in found.second:
        x = leaves[m.position]
        # One number for a whole tensor is a squared norm (NovoGrad), not a mean.
        entries = sizes[m.leaf] if x.ndim == 0 else 1
        level = (fill[m.leaf] * jnp.asarray(entries, fill.dtype)).astype(x.dtype)
        kept = jnp.where(jnp.isfinite(x), x, jnp.zeros([], x.dtype))
        fresh = jnp.where(usable[m.leaf], level, kept)
        leaves[m.position] = jnp.where(restart[m.leaf], fresh, x)
    return jax.tree.unflatten(treedef, leaves)


def _measured(params: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(params) if _tree.is_measured(x)]
