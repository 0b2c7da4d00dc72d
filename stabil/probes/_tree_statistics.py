"""The same statistics for parameters, gradients, updates and moments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil._tree import is_measured, path_name
from stabil.probes import _reduce, _rows, _select, _spread, _statistics
from stabil.vocabulary import Readings


def tree_statistics(
    tree: Any,
    *,
    where: str | tuple[str, ...] = "**",
    stats: str | tuple[str, ...] = ("finite", "absmax", "rms"),
    stacked: str | tuple[str, ...] | None = None,
) -> Readings:
    """Statistics of every floating array of a pytree, one row a leaf.

    Works inside `jit`; each leaf is read once.

    Args:
      tree: parameters, gradients, updates, an optimizer state, or any other pytree.
      where: glob over slash paths of leaves, or a tuple of globs; see `stabil.probe`.
      stats: which statistics; see `stabil.probe`.
      stacked: glob or globs of leaves whose first axis is the layer; each layer has a
        row, `layers/mlp/kernel[2]`.
    Returns:
      `Readings`, rows in flattening order.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a statistic is unknown, or a pattern matches no leaf.
    Examples:
      >>> import jax.numpy as jnp
      >>> from stabil.probes import tree_statistics
      >>> params = {"head": jnp.ones(3), "layers": {"w": jnp.array([[1.0], [-5.0]])}}
      >>> tree_statistics(params, stats="absmax", stacked="layers/**").scalars("params")
      {'params/head/absmax': 1.0, 'params/layers/w[0]/absmax': 1.0, \
'params/layers/w[1]/absmax': 5.0}
    """
    patterns, statistics = _select.as_patterns(where), _statistics.columns(stats)
    split = () if stacked is None else _select.as_patterns(stacked)
    spread = _spread.Spread(_reduce.groups_of(statistics))
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = [(path_name(p), x) for p, x in found if is_measured(x)]
    _select.require_matches((*patterns, *split), [(name,) for name, _ in leaves])
    nodes: list[_rows.Row | _rows.Loop] = []
    values = []
    for name, leaf in leaves:
        if not _select.selected(patterns, name):
            continue
        x, row = jnp.asarray(leaf), _rows.Row(name, "")
        layers = bool(x.ndim) and _select.selected(split, name)
        parts = [x[i] for i in range(x.shape[0])] if layers else [x]
        values += [spread.read(part) for part in parts]
        nodes.append(_rows.Loop(len(parts), False, (row,)) if layers else row)
    names, _ = _rows.in_order(tuple(nodes))
    if not values:
        return Readings(jnp.zeros([0, len(statistics)], jnp.float32), names, statistics)
    whole, _ = spread.gather(spread.conclude(values), per_device=False)
    table = _reduce.finish(whole, statistics)
    return Readings(table, names, statistics)
