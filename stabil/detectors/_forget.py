"""Announced changes: what was normal until now is learnt afresh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stabil.detectors._baseline import BaselineState
from stabil.detectors._drift import DriftState
from stabil.detectors._loss import LossState
from stabil.detectors._siblings import SiblingState


def forget(state: Any, when: jax.Array | bool = True) -> Any:
    """The state with every learnt level empty again, and all else as it is.

    For a change that is known beforehand: another batch size or mix of data, a restart
    of the learning rate. The next steps are a warm-up: finiteness and limits judge, and
    the change raises no alarm. Moments, counters and schedules of the optimizer stay.

    Args:
      state: any tree that holds states of stabil, for example the optimizer state.
      when: bool scalar, may be traced: inside the step, one compiled program serves
        `forget(opt_state, step == change)`.

    Returns:
      The tree, with the same structure, shapes and dtypes.

    Examples:
      >>> import jax.numpy as jnp, optax, stabil
      >>> tx = stabil.guard(optax.sgd(0.1))
      >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), loss=jnp.ones([]))
      >>> int(state.judge_state.loss.level.observed)
      1
      >>> int(forget(state).judge_state.loss.level.observed)
      0
    """
    learnt = (BaselineState, DriftState, LossState, SiblingState)

    def one(node: Any) -> Any:
        if not isinstance(node, learnt):
            return node
        # Broadcast, since the state may be stacked by `vmap`.
        if isinstance(node, LossState):
            fresh = LossState.empty()
        else:
            fresh = type(node).empty(node[0].shape[-1])
        return jax.tree.map(lambda f, o: jnp.where(when, f, o), fresh, node)

    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, learnt))
