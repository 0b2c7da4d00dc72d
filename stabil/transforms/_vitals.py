"""Finds what the guard and the clip have seen, wherever they sit in the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from stabil import _tree
from stabil.transforms._guard import GuardState
from stabil.transforms._spike_aware import SpikeAwareState
from stabil.vocabulary import Measures, Readings, Severity, Shadow, Verdict, Vitals

_KINDS = (GuardState, SpikeAwareState)
_SEEN = "activations"
_MIRRORS = ("mu", "trace", "nu")  # fields of Optax states whose trees mirror params


def vitals(
    opt_state: Any, *, params: Any = None, readings: Readings | None = None
) -> Vitals:
    """The vitals of the newest step, from an optimizer state of any nesting.

    Looks through `optax.chain`, `MultiSteps`, `masked`, `partition`,
    `inject_hyperparams` and any other state that is a pytree. A guard's own record is
    preferred to that of a clip. Of several guards, as in `partition`, the verdict is
    that of the most severe one with the flags of all, norms are joint, and counters are
    the largest. Pure: use it inside or outside `jit`.

    Args:
      opt_state: the state that `tx.update` returned.
      params: parameters, for the names of gradient leaves; only their paths are used.
        Without it, names come from moments in the state that mirror the params, or are
        numbers.
      readings: the step's `Readings`, carried along for the host, and for the names of
        rows. Without them a row or device that offends is named `activations`.

    Returns:
      `Vitals`.

    Raises:
      ValueError: the state holds neither a guard nor a `spike_aware`.

    Examples:
      >>> import jax.numpy as jnp, optax, stabil
      >>> tx = optax.chain(stabil.spike_aware(), optax.adamw(1e-3))
      >>> state = tx.init({"w": jnp.ones(2)})
      >>> stabil.vitals(state).severity
      <Severity.OK: 0>
    """
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, _KINDS))
    found = [x for x in found if isinstance(x, _KINDS)]
    found = [x for x in found if isinstance(x, GuardState)] or found
    if not found:
        raise ValueError(
            "vitals: needed the state of a stabil transformation, got "
            f"{type(opt_state).__name__} without one; write tx = "
            "stabil.guard(optax.adamw(3e-4)) or optax.chain(stabil.spike_aware(), ...) "
            "and hand over the state that tx.update returned"
        )
    names = [_signals(x, opt_state, params, readings) for x in found]
    found = [_counted_from_the_front(x, n) for x, n in zip(found, names, strict=True)]
    if len(found) == 1:
        one = found[0]
        return Vitals(
            one.verdict, one.tally, one.measures, readings, names[0], _shadow(one)
        )
    return Vitals(
        verdict=_worst([x.verdict for x in found], [len(n) for n in names]),
        tally=_largest([x.tally for x in found]),
        measures=_joint([x.measures for x in found]),
        readings=readings,
        signals=tuple(name for group in names for name in group),
        shadow=_largest_shadow([_shadow(x) for x in found]),
    )


def _signals(
    state: Any, opt_state: Any, params: Any, readings: Readings | None
) -> tuple[str, ...]:
    if isinstance(state, SpikeAwareState):
        leaves = _leaf_names(None, opt_state, params)
        return ("grads/global_norm", *(f"grads/{n}" for n in leaves))
    rows = (_SEEN,)
    if readings is not None:
        rows = tuple(f"{_SEEN}/{n}" for n in readings.names)
    shards = None if readings is None else readings.shards
    devices = range(0 if shards is None else shards.shape[-3])
    count = state.judge_state.signals.location.shape[-1] // 2 - 1
    leaves = _leaf_names(count, state.inner_state, params)
    return (
        "loss",
        "grads/global_norm",
        *(f"grads/{n}" for n in leaves),
        *(f"moments/{n}" for n in leaves),
        "updates/rms",
        *rows,
        *(f"devices/{i}" for i in devices),
        *(f"params/{n}" for n in leaves),
    )


def _shadow(state: Any) -> Shadow | None:
    return state.judge_state.shadow if isinstance(state, GuardState) else None


def _largest_shadow(found: list[Shadow | None]) -> Shadow | None:
    """The largest counters, where all guards count the same thresholds."""
    shapes = {None if x is None else x.steps.shape for x in found}
    if len(shapes) > 1 or found[0] is None:
        return None
    return _largest(found)


def _counted_from_the_front(state: Any, names: tuple[str, ...]) -> Any:
    """The state with a parameter named by its position among the signals.

    Where rows have no names, each has the position of all.
    """
    if isinstance(state, SpikeAwareState):
        return state
    verdict, end = state.verdict, jnp.int32(len(names) + 1)
    first = verdict.first
    if _SEEN in names:
        first = jnp.minimum(first, names.index(_SEEN))
    first = jnp.where(first < -1, first + end, first)
    return state._replace(verdict=verdict._replace(first=first))


def _leaf_names(count: int | None, state: Any, params: Any) -> tuple[str, ...]:
    """Names of the gradient leaves: from params, from a mirror of them, or numbers."""
    trees = [] if params is None else [params]
    for field in _MIRRORS:
        trees += [tree for _, tree in optax.tree.get_all_with_path(state, field)]
    for tree in trees:
        names = _tree.measured_names(tree)
        if names and (count is None or len(names) == count):
            return names
    return tuple(f"leaf_{i}" for i in range(count or 0))


def _worst(verdicts: list[Verdict], lengths: list[int]) -> Verdict:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    shifted = [
        v._replace(first=jnp.where(v.first >= 0, v.first + jnp.int32(s), v.first))
        for v, s in zip(verdicts, starts, strict=True)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *shifted)
    worst = jax.tree.map(lambda x: x[jnp.argmax(stacked.severity)], stacked)
    flags = jnp.zeros([], jnp.int32)
    for v in verdicts:
        flags |= v.flags
    return worst._replace(flags=flags, score=jnp.max(stacked.score))


def _largest(tallies: list[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.max(jnp.stack(x), 0), *tallies)


def _joint(measures: list[Measures]) -> Measures:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *measures)
    return Measures(
        loss=stacked.loss[0],
        grad_norm=jnp.sqrt(jnp.sum(jnp.square(stacked.grad_norm))),
        clip_factor=jnp.min(stacked.clip_factor),
        update_rms=jnp.max(stacked.update_rms),
    )


def select(ok: Vitals | Any, new: Any, old: Any) -> Any:
    """`new`, or `old` if the step was blocked: for state outside the optimizer.

    A blocked step leaves parameters and optimizer state alone by itself; batch
    statistics, weight averages and whatever else came from the same batch need this.

    Args:
      ok: `Vitals` of the step, or a bool scalar.
      new: pytree that the step produced.
      old: pytree of the same structure from before the step.

    Examples:
      >>> import jax.numpy as jnp
      >>> print(select(jnp.bool_(False), {"mean": jnp.nan}, {"mean": jnp.ones([])}))
      {'mean': Array(1., dtype=float32)}
    """
    if isinstance(ok, Vitals):
        ok = ok.verdict.severity < int(Severity.BLOCK)
    return _tree.select(ok, new, old)
