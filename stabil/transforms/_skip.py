"""What the two skipping wrappers share: finiteness, counters, escalation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.transforms import _leaves, _norms, _scaling
from stabil.vocabulary import Cause

# Values of `SkipRecord.escalation`.
NONE, LIMIT_REACHED, PARAMETERS_LOST = 0, 1, 2


class SkipRecord(NamedTuple):
    """What a skipping wrapper saw and did; all scalars.

    Attributes:
      skipped: bool; whether the newest step changed nothing.
      reason: int32; `stabil.vocabulary.Cause` bits of the newest step, 0 when good.
      accepted_steps: int32; steps that the inner transformation took.
      skipped_steps: int32; steps that changed nothing.
      bad_steps: int32; steps with a reason other than an empty batch.
      bad_in_a_row: int32; of those, up to and including the newest; a good step sets it
        to 0, an empty batch leaves it.
      escalation: int32; 0 while skipping is enough, 1 after `max_consecutive_steps` bad
        steps in a row, 2 when a skipped step found a non-finite parameter: then no
        skip can help, and the run must go back. 1 ends with the next good step.
      first_bad_gradient: int32; position of the first non-finite gradient leaf of the
        newest step among the leaves with a norm (see `leaf_name`), or -1.
      first_bad_parameter: int32; the same for the parameters, once found, or -1.
      clip_factor: float32; 0 when the newest step was skipped, else 1.
      norm: float32; gradient norm of the newest step in which it was finite.
    """

    skipped: jax.Array
    reason: jax.Array
    accepted_steps: jax.Array
    skipped_steps: jax.Array
    bad_steps: jax.Array
    bad_in_a_row: jax.Array
    escalation: jax.Array
    first_bad_gradient: jax.Array
    first_bad_parameter: jax.Array
    clip_factor: jax.Array
    norm: jax.Array

    @classmethod
    def empty(cls, dtype: Any) -> SkipRecord:
        """The record of a run that has not begun."""
        none = _leaves.zero_int()
        no = jnp.zeros([], bool)
        one, zero = jnp.ones([], jnp.float32), jnp.zeros([], dtype)
        return _leaves.separate(
            cls(no, none, none, none, none, none, none, none - 1, none - 1, one, zero)
        )


class Seen(NamedTuple):
    """The signals of one step.

    Attributes:
      norms: float32 `[leaves]`; NaN where a leaf is not finite.
      norm: float32; the joint norm that is judged.
      loss: float32; 0 when none was handed in.
      reason: int32; bits of what is not finite or empty.
      empty: bool; the batch had no valid target.
    """

    norms: jax.Array
    norm: jax.Array
    loss: jax.Array
    reason: jax.Array
    empty: jax.Array


def look(updates: Any, dtype: Any, extra: dict[str, Any]) -> Seen:
    """Takes loss, norm and token count of a step from its arguments."""
    norms = _norms.leaf_norms(updates, extra.get("norms"))
    own = _norms.total_norm(norms).astype(dtype)
    given = extra.get("grad_norm")
    norm = own if given is None else jnp.asarray(given).astype(dtype).reshape(())
    norm = _scaling.unscaled(norm, extra.get("scale"))
    loss = extra.get("loss")
    loss = jnp.zeros([], dtype) if loss is None else jnp.asarray(loss).astype(dtype)
    loss = loss.reshape(())
    tokens = extra.get("tokens")
    empty = jnp.asarray(False) if tokens is None else jnp.asarray(tokens) == 0
    # Asked for one by one: a comparison with a threshold is silent about a NaN.
    bad_gradient = ~jnp.isfinite(own) | ~jnp.isfinite(norm)
    reason = bits(Cause.NONFINITE_GRADIENT, bad_gradient)
    reason |= bits(Cause.NONFINITE_LOSS, ~jnp.isfinite(loss))
    reason = jnp.where(empty, bits(Cause.EMPTY_BATCH, empty), reason)
    return Seen(norms, norm, loss, reason, empty)


def bits(cause: Cause, where: jax.Array) -> jax.Array:
    """The bit of a cause as int32 where it holds, else 0."""
    return jnp.where(where, jnp.int32(int(cause)), jnp.int32(0))


def record(
    old: SkipRecord,
    seen: Seen,
    reason: jax.Array,
    skipped: jax.Array,
    params: Any,
    max_consecutive_steps: int,
) -> SkipRecord:
    """The record after one more step; let the update depend on its `skipped`."""
    bad = (reason != 0) & ~seen.empty
    run = jnp.where(bad, _leaves.one_more(old.bad_in_a_row), 0)
    run = jnp.where(seen.empty, old.bad_in_a_row, run)
    lost = _first_nonfinite_parameter(skipped & bad, params, old.first_bad_parameter)
    # Always so. It makes whatever is selected by `skipped` wait for the look at the
    # parameters, which XLA otherwise copies when they are donated.
    skipped &= lost >= -1
    level = jnp.where(run >= max_consecutive_steps, LIMIT_REACHED, NONE)
    level = jnp.where(lost >= 0, PARAMETERS_LOST, level).astype(jnp.int32)
    wrong = ~jnp.isfinite(seen.norms)
    first = jnp.argmax(wrong).astype(jnp.int32) if wrong.size else jnp.int32(-1)
    return SkipRecord(
        skipped=skipped,
        reason=reason,
        accepted_steps=_leaves.one_more(old.accepted_steps, ~skipped),
        skipped_steps=_leaves.one_more(old.skipped_steps, skipped),
        bad_steps=_leaves.one_more(old.bad_steps, bad),
        bad_in_a_row=run,
        escalation=level,
        first_bad_gradient=jnp.where(jnp.any(wrong), first, -1).astype(jnp.int32),
        first_bad_parameter=lost,
        clip_factor=jnp.where(skipped, 0, 1).astype(jnp.float32),
        norm=jnp.where(jnp.isfinite(seen.norm), seen.norm, old.norm),
    )


def _first_nonfinite_parameter(
    due: jax.Array, params: Any, before: jax.Array
) -> jax.Array:
    """Position of the first non-finite parameter, read on bad steps only."""
    if not _leaves.measured(params):
        return before

    def find() -> jax.Array:
        wrong = jnp.isnan(_tree.sums_of_squares(params))
        first = jnp.argmax(wrong).astype(jnp.int32)
        return jnp.where(jnp.any(wrong), first, -1).astype(jnp.int32)

    return jax.lax.cond(due, find, lambda: jnp.where(due, before, before))


def leaf_name(tree: Any, position: Any) -> str | None:
    """The slash path that a position in a `SkipRecord` points at; None for -1.

    Args:
      tree: the parameters (or gradients), as handed to `update`.
      position: an integer, or a device scalar, which is read.

    Examples:
      >>> leaf_name({"a": 1.0, "b": {"kernel": 2.0}}, 1)
      'b/kernel'
    """
    names = _tree.measured_names(tree)
    return names[int(position)] if 0 <= int(position) < len(names) else None


def was_skipped(opt_state: Any) -> jax.Array:
    """Whether a skipping wrapper in this optimizer state skipped the newest step.

    Use it to hold back whatever else the batch changed:
    `ema = jax.tree.map(lambda a, b: jnp.where(was_skipped(s), b, a), new_ema, ema)`.

    Returns:
      bool scalar; True when any wrapper inside skipped.

    Raises:
      ValueError: the state holds no skipping wrapper.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from stabil.transforms import skip_nonfinite
      >>> tx = optax.chain(skip_nonfinite(optax.sgd(1.0)))
      >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
      >>> bool(was_skipped(state))
      True
    """

    def is_record(x: Any) -> bool:
        return isinstance(x, SkipRecord)

    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_record) if is_record(x)]
    if not found:
        raise ValueError(
            "needed the state of skip_nonfinite or skip_spikes, got none in this "
            "optimizer state: wrap the optimizer, optax.chain(skip_nonfinite(adamw))"
        )
    return jnp.any(jnp.stack([x.skipped for x in found]))
