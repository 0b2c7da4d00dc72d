"""MSign: replaces chosen weights by their matrix sign every P steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms import _check, _leafwise, _leaves
from stabil.transforms._polar import restored, stable_rank

# How much of the running stable rank a check keeps.
RANK_DECAY = 0.9


class MSignState(NamedTuple):
    """State of `msign`.

    Attributes:
      steps: int32 scalar, updates since the run began.
      usual_rank: float32, running stable rank of each chosen matrix, one scalar per
        matrix (`[layers]` for a stacked leaf); 0 before the first check.
      rewrites: int32, how often each chosen matrix was rewritten, likewise.
    """

    steps: jax.Array
    usual_rank: Any
    rewrites: Any


def msign(
    *,
    every_steps: int = 100,
    where: _leaves.Paths = ("*kernel", "*weight", "*/w", "w"),
    below: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Every P steps, `W <- ||W||_F / ||U V^T||_F U V^T` for each chosen weight.

    `W = U S V^T` is the singular value decomposition of the weight after the update,
    over its nonzero singular directions. The stable rank `||W||_F^2 / ||W||_2^2` jumps
    to the rank, the spectral norm falls to `||W||_F / sqrt(rank)`, the Frobenius norm
    stays. `U V^T` comes from a polar iteration of matrix products in float32 (wider
    where the weight is), not from a decomposition: it needs no gather of its own
    making, runs on every layer of a stack at once, and keeps null directions null
    (those below 1e-5 of `||W||_F`; 1e-10 in float64).

    With `below`, a matrix is rewritten at a check only when its stable rank is under
    `below` times its running value over earlier checks (not published; ours).

    Quiet gradients do not pass unchanged: on every P-th step the update rewrites W.

    Cost: at most 38 matrix products per weight on the P-th step, none on the others;
    with `below`, 40 products with a vector per check. State: two scalars per matrix.
    Place: last in the chain, after the learning rate; `update` needs `params`. Does
    not: touch moments, biases, norms, or a matrix that is zero or not finite; combine
    with a wrapper that scales updates afterwards. Entries of the update that are not
    finite become 0.

    Args:
      every_steps: P, steps between applications or, with `below`, checks; >= 1.
        Paper: 100 recommended, 10 to 10000 worked.
      where: slash paths (globs or a predicate) of the weights; among them, leaves of
        two or more axes are rewritten, the last two axes being the matrix and the
        others counting layers. Paper: attention projections, or all matrices.
      below: fraction in (0, 1) of the usual stable rank, or None for every P-th step.

    Returns:
      Transformation; updates keep shape and dtype. State: `MSignState`.

    Raises:
      ValueError: a hyperparameter is out of range; at trace time, `params` is missing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(optax.sgd(0.0), msign(every_steps=1))
      >>> params = {"w": jnp.diag(jnp.array([3.0, 4.0, 0.0]))}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> print(optax.apply_updates(params, updates)["w"].round(2))
      [[3.54 0.   0.  ]
       [0.   3.54 0.  ]
       [0.   0.   0.  ]]

    Source: MSign: An Optimizer Preventing Training Instability in LLMs via Stable Rank
    Restoration, arXiv:2602.01734. No official code is known.
    """
    name = "msign"
    _check.at_least(name, 1, every_steps=every_steps)
    if below is not None:
        _check.positive(name, below=below)
        _check.fraction(name, below=below)

    def init(params: Any) -> MSignState:
        flags = iter(chosen(params, where))

        def scalars(dtype: Any) -> Any:
            def one(p: Any) -> Any:
                if not _tree.is_measured(p) or not next(flags):
                    return optax.MaskedNode()
                return jnp.zeros(jnp.shape(p)[:-2], dtype)

            return jax.tree.map(one, params)

        rank = scalars(jnp.float32)
        rewrites = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), rank)
        return MSignState(jnp.zeros([], jnp.int32), rank, rewrites)

    def update(
        updates: Any, state: MSignState, params: Any = None, **extra: Any
    ) -> tuple[Any, MSignState]:
        del extra
        if params is None:
            raise ValueError(
                f"{name}: needed params, whose matrices it rewrites, got None; write "
                "tx.update(grads, opt_state, params)"
            )
        steps = _leaves.one_more(state.steps)
        found = {
            path: jnp.where(jnp.isfinite(u), u, jnp.zeros_like(u))
            for path, u in _leafwise.by_path(updates).items()
        }
        owners = _leafwise.by_path(params)
        ranks = _leafwise.by_path(state.usual_rank)
        counts = dict(zip(ranks, jax.tree.leaves(state.rewrites), strict=True))
        names = [path for path in ranks if path in found]

        def apply() -> tuple[Any, ...]:
            rows = [
                _rewrite(found[p], owners[p], ranks[p], counts[p], below) for p in names
            ]
            return tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [])

        def idle() -> tuple[Any, ...]:
            return tuple([table[p] for p in names] for table in (found, ranks, counts))

        new, rank, count = jax.lax.cond(steps % every_steps == 0, apply, idle)
        found |= dict(zip(names, new, strict=True))
        ranks |= dict(zip(names, rank, strict=True))
        counts |= dict(zip(names, count, strict=True))
        structure = jax.tree.structure(state.usual_rank)
        return _leaves.rebuild(updates, list(found.values())), MSignState(
            steps,
            jax.tree.unflatten(structure, list(ranks.values())),
            jax.tree.unflatten(structure, list(counts.values())),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def chosen(params: Any, where: _leaves.Paths) -> tuple[bool, ...]:
    """Which measured leaves are matrices that `where` names."""
    leaves = zip(_tree.measured_names(params), _leaves.measured(params), strict=True)
    return tuple(
        _leaves.matches(where, path) and x.ndim > 1 and x.size > 0 for path, x in leaves
    )


def _rewrite(
    u: jax.Array,
    p: jax.Array,
    usual: jax.Array,
    rewrites: jax.Array,
    below: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The update that rewrites one leaf, its running rank and its count."""
    kind = _leaves.wide(p)
    old = p.astype(kind)
    w = old + u.astype(kind)
    new = restored(w)
    changed = jnp.any(new != w, axis=(-2, -1))
    changed &= jnp.all(jnp.isfinite(w), axis=(-2, -1))
    if below is None:
        due = changed
    else:
        rank = stable_rank(w).astype(jnp.float32)
        known = usual > 0
        due = changed & known & (rank < below * usual)
        mixed = RANK_DECAY * usual + (1 - RANK_DECAY) * rank
        follow = jnp.where(known, mixed, rank)
        # A rewritten matrix has another level, which the next check learns.
        usual = jnp.where(due, 0.0, jnp.where(rank > 0, follow, usual))
    update = jnp.where(due[..., None, None], (new - old).astype(u.dtype), u)
    return update, usual, rewrites + due.astype(jnp.int32)
