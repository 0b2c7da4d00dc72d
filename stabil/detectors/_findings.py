"""What is wrong with one step: findings, and the rules that judge them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil import _tree
from stabil.detectors._baseline import BaselineState, Deviation
from stabil.vocabulary import Cause, Severity

_LEAF_THRESHOLD = 10.0  # one leaf among hundreds: stricter than a global signal
_LEAF_JUMP = math.log(8.0)
_ACTIVATION_LIMIT = math.log(100.0)


class Evidence(NamedTuple):
    """The signals of one step.

    Attributes:
      loss: float32 scalar; NaN when none was given.
      loss_given: bool scalar, whether a loss was given.
      gradient_sums: float32 `[G]`, sum of squares of each gradient leaf.
      update_sums: float32 `[G]`, the same of the update, before it is applied.
      magnitudes: float32 `[R]`, activation magnitudes; NaN where not read.
      nonfinite_rows: bool `[R]`, rows that hold a NaN or an infinity.
    """

    loss: jax.Array
    loss_given: jax.Array
    gradient_sums: jax.Array
    update_sums: jax.Array
    magnitudes: jax.Array
    nonfinite_rows: jax.Array


def gradients(v: jax.Array) -> jax.Array:
    """The part of a vector `[2 + 2 G]` that speaks of gradient leaves."""
    return v[2 : 2 + (v.shape[0] - 2) // 2]


def updates(v: jax.Array) -> jax.Array:
    """The part of a vector `[2 + 2 G]` that speaks of update leaves."""
    return v[2 + (v.shape[0] - 2) // 2 :]


class Findings(NamedTuple):
    """What is wrong: scalars and one boolean per leaf or row."""

    bad_loss: jax.Array
    bad_gradients: jax.Array
    bad_updates: jax.Array
    bad_rows: jax.Array
    loss_spike: jax.Array
    norm_spike: jax.Array
    leaf_spikes: jax.Array
    damaged: jax.Array
    row_jumps: jax.Array
    row_limits: jax.Array
    overflow: jax.Array

    @property
    def nonfinite(self) -> jax.Array:
        return (
            self.bad_loss
            | jnp.any(self.bad_gradients)
            | jnp.any(self.bad_updates)
            | jnp.any(self.bad_rows)
        )


def _out_of_line(d: Deviation, level: jax.Array, x: jax.Array) -> jax.Array:
    """Update leaves that jump away from their own level and from all other leaves.

    A jump that most leaves share is a change of the learning rate and no damage.
    """
    if x.shape[0] == 0:
        return jnp.zeros([0], bool)
    # The median by sorting: unusable entries stand at the end and are not counted.
    jumps = jnp.sort(jnp.where(d.armed, d.jump, jnp.inf))
    armed = jnp.maximum(jnp.sum(d.armed), 1)
    median = (jumps[(armed - 1) // 2] + jumps[armed // 2]) / 2
    common = jnp.where(jnp.isfinite(median), jnp.maximum(median, 0.0), 0.0)
    highest = jnp.max(jnp.where(d.armed, level, -jnp.inf))
    own = (d.score > _LEAF_THRESHOLD) & (d.jump - common > _LEAF_JUMP)
    return d.armed & own & (x - highest - common > _LEAF_JUMP)


def find(
    e: Evidence,
    x: jax.Array,
    d: Deviation,
    baseline: BaselineState,
    rows: Deviation,
    row_limits: jax.Array,
    threshold: float,
) -> Findings:
    """Findings of a step with signals `x`, which deviate by `d`, and of its rows."""
    jumps = (d.score > _LEAF_THRESHOLD) & (d.jump > _LEAF_JUMP)
    bad_gradients = ~jnp.isfinite(e.gradient_sums)
    sound = ~jnp.any(bad_gradients)
    return Findings(
        bad_loss=~jnp.isfinite(e.loss) & e.loss_given,
        bad_gradients=bad_gradients,
        bad_updates=~jnp.isfinite(e.update_sums) & sound,
        bad_rows=e.nonfinite_rows,
        loss_spike=d.score[0] > threshold,
        norm_spike=d.score[1] > threshold,
        leaf_spikes=gradients(jumps),
        damaged=_out_of_line(
            Deviation(*(updates(v) for v in d)), updates(baseline.location), updates(x)
        ),
        row_jumps=(rows.score > _LEAF_THRESHOLD) & (rows.jump > _LEAF_JUMP),
        row_limits=row_limits,
        overflow=jnp.sqrt(jnp.sum(e.gradient_sums)) >= _tree.LARGEST,
    )


def past_limit(rows: Deviation, x: jax.Array, baseline: BaselineState) -> jax.Array:
    """Rows bool `[R]` whose log magnitude passed the limit from their reference."""
    return rows.armed & (x > baseline.reference + _ACTIVATION_LIMIT)


def severity(f: Findings, lasting: jax.Array, risen: jax.Array) -> jax.Array:
    """The `Severity` of the findings, int32 scalar."""
    spike = f.loss_spike | f.norm_spike | jnp.any(f.leaf_spikes)
    jump = jnp.any(f.row_jumps)
    block = f.nonfinite | jnp.any(f.damaged) | (jump & spike)
    block |= jnp.any(f.row_jumps & f.row_limits)
    warn = lasting | risen | f.overflow | jnp.any(f.row_limits)
    levels = (
        (block, Severity.BLOCK),
        (warn, Severity.WARN),
        (spike | jump, Severity.WATCH),
    )
    worst = jnp.int32(Severity.OK)
    for holds, level in reversed(levels):
        worst = jnp.where(holds, jnp.int32(level), worst)
    return worst


def union(f: Findings, risen: jax.Array) -> jax.Array:
    """The causes that hold, as bits of an int32 scalar."""
    holds = {
        Cause.NONFINITE_LOSS: f.bad_loss,
        Cause.NONFINITE_GRADIENT: jnp.any(f.bad_gradients),
        Cause.NONFINITE_ACTIVATION: jnp.any(f.bad_rows),
        Cause.NONFINITE_UPDATE: jnp.any(f.bad_updates),
        Cause.NORM_OVERFLOW: f.overflow,
        Cause.LOSS_SPIKE: f.loss_spike,
        Cause.GRADIENT_SPIKE: f.norm_spike | jnp.any(f.leaf_spikes),
        Cause.UPDATE_SPIKE: jnp.any(f.damaged),
        Cause.ACTIVATION_LIMIT: jnp.any(f.row_limits),
        Cause.ACTIVATION_SHIFT: jnp.any(f.row_jumps),
        Cause.LEVEL_SHIFT: risen,
    }
    flags = jnp.zeros([], jnp.int32)
    for cause, found in holds.items():
        flags |= jnp.where(found, jnp.int32(cause), jnp.int32(0))
    return flags


def first_signal(f: Findings, d: Deviation) -> jax.Array:
    """Position of the first offending signal in forward order, -1 for none."""
    leaves = f.leaf_spikes.shape[0]
    none = jnp.int32(-1)

    def earliest(found: jax.Array, start: int) -> jax.Array:
        if found.shape[0] == 0:
            return none
        where = jnp.argmax(found).astype(jnp.int32) + jnp.int32(start)
        return jnp.where(jnp.any(found), where, none)

    def largest(found: jax.Array, score: jax.Array, start: int) -> jax.Array:
        if found.shape[0] == 0:
            return none
        where = jnp.argmax(jnp.where(found, score, -jnp.inf)).astype(jnp.int32)
        return jnp.where(jnp.any(found), where + jnp.int32(start), none)

    rows = 2 + 2 * leaves
    candidates = (
        earliest(f.bad_rows, rows),
        earliest(f.row_jumps | f.row_limits, rows),
        jnp.where(f.bad_loss, jnp.int32(0), none),
        earliest(f.bad_gradients, 2),
        jnp.where(f.loss_spike, jnp.int32(0), none),
        largest(f.leaf_spikes, gradients(d.score), 2),
        jnp.where(f.norm_spike | f.overflow, jnp.int32(1), none),
        earliest(f.bad_updates, 2 + leaves),
        largest(f.damaged, updates(d.score), 2 + leaves),
    )
    first = none
    for candidate in reversed(candidates):
        first = jnp.where(candidate >= 0, candidate, first)
    return first
