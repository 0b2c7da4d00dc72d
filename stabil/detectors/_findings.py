"""What is wrong with one step: findings, and the rules that judge them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._baseline import BaselineState, Deviation
from stabil.vocabulary import Cause, Severity

LEAF_THRESHOLD = 10.0  # one leaf among hundreds: stricter than a global signal
LEAF_JUMP = math.log(8.0)
_ACTIVATION_LIMIT = math.log(100.0)


class Evidence(NamedTuple):
    """The signals of one step.

    Attributes:
      loss: float32 scalar; NaN when none was given.
      loss_given: bool scalar, whether a loss was given.
      gradient_sums: float32 `[G]`, sum of squares of each gradient leaf.
      moment_levels: float32 `[G]`, how large the optimizer's moments are, as
        `stabil.transforms` samples them; NaN where there are none.
      bad_moments: bool `[G]`, leaves whose sampled moments are not finite.
      magnitudes: float32 `[R]`, activation magnitudes; NaN where not read.
      nonfinite_rows: bool `[R]`, rows that hold a NaN or an infinity.
    """

    loss: jax.Array
    loss_given: jax.Array
    gradient_sums: jax.Array
    moment_levels: jax.Array
    bad_moments: jax.Array
    magnitudes: jax.Array
    nonfinite_rows: jax.Array


class Findings(NamedTuple):
    """What is wrong: scalars and one boolean per leaf or row."""

    bad_loss: jax.Array
    bad_gradients: jax.Array
    bad_moments: jax.Array
    bad_rows: jax.Array
    loss_spike: jax.Array
    norm_spike: jax.Array
    leaf_spikes: jax.Array
    wild_moments: jax.Array
    row_jumps: jax.Array
    row_limits: jax.Array
    overflow: jax.Array

    @property
    def nonfinite(self) -> jax.Array:
        return (
            self.bad_loss
            | jnp.any(self.bad_gradients)
            | jnp.any(self.bad_moments)
            | jnp.any(self.bad_rows)
        )


def _out_of_line(d: Deviation, level: jax.Array, x: jax.Array) -> jax.Array:
    """Leaves whose moments leap away from their own level and from all other leaves.

    Sound gradients with wild moments mean that the moments are damaged. A leap that
    most leaves share follows from the gradients and is no damage.
    """
    if x.shape[0] == 0:
        return jnp.zeros([0], bool)
    # The median by sorting: unusable entries stand at the end and are not counted.
    jumps = jnp.sort(jnp.where(d.armed, d.jump, jnp.inf))
    armed = jnp.maximum(jnp.sum(d.armed), 1)
    median = (jumps[(armed - 1) // 2] + jumps[armed // 2]) / 2
    common = jnp.where(jnp.isfinite(median), jnp.maximum(median, 0.0), 0.0)
    highest = jnp.max(jnp.where(d.armed, level, -jnp.inf))
    own = (d.score > LEAF_THRESHOLD) & (d.jump - common > LEAF_JUMP)
    return d.armed & own & (x - highest - common > LEAF_JUMP)


def find(
    e: Evidence,
    x: jax.Array,
    d: Deviation,
    location: jax.Array,
    rows: Deviation,
    row_limits: jax.Array,
    loss_spike: jax.Array,
    threshold: float,
) -> Findings:
    """Findings of a step: signals `x` `[1 + 2 G]` deviate by `d` from `location`."""
    split = 1 + e.gradient_sums.shape[0]
    jumps = (d.score > LEAF_THRESHOLD) & (d.jump > LEAF_JUMP)
    return Findings(
        bad_loss=~jnp.isfinite(e.loss) & e.loss_given,
        bad_gradients=jnp.isnan(e.gradient_sums),
        bad_moments=e.bad_moments,
        bad_rows=e.nonfinite_rows,
        loss_spike=loss_spike,
        norm_spike=d.score[0] > threshold,
        leaf_spikes=jumps[1:split],
        wild_moments=_out_of_line(
            Deviation(*(v[split:] for v in d)), location[split:], x[split:]
        ),
        row_jumps=(rows.score > LEAF_THRESHOLD) & (rows.jump > LEAF_JUMP),
        row_limits=row_limits,
        overflow=jnp.isposinf(jnp.sum(e.gradient_sums)),
    )


def past_limit(rows: Deviation, x: jax.Array, baseline: BaselineState) -> jax.Array:
    """Rows bool `[R]` whose log magnitude passed the limit from their reference."""
    return rows.armed & (x > baseline.reference + _ACTIVATION_LIMIT)


def severity(f: Findings, lasting: jax.Array, risen: jax.Array) -> jax.Array:
    """The `Severity` of the findings, int32 scalar."""
    spike = f.loss_spike | f.norm_spike | jnp.any(f.leaf_spikes)
    jump = jnp.any(f.row_jumps)
    block = f.nonfinite | jnp.any(f.wild_moments) | (jump & spike)
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
        Cause.NONFINITE_MOMENT: jnp.any(f.bad_moments),
        Cause.NORM_OVERFLOW: f.overflow,
        Cause.LOSS_SPIKE: f.loss_spike,
        Cause.GRADIENT_SPIKE: f.norm_spike | jnp.any(f.leaf_spikes),
        Cause.MOMENT_SPIKE: jnp.any(f.wild_moments),
        Cause.ACTIVATION_LIMIT: jnp.any(f.row_limits),
        Cause.ACTIVATION_SHIFT: jnp.any(f.row_jumps),
        Cause.LEVEL_SHIFT: risen,
    }
    flags = jnp.zeros([], jnp.int32)
    for cause, found in holds.items():
        flags |= jnp.where(found, jnp.int32(cause), jnp.int32(0))
    return flags


def earliest(found: jax.Array, start: int) -> jax.Array:
    """Position of the first True of `found` `[n]`, counted from `start`, or -1."""
    return largest(found, jnp.zeros(found.shape, jnp.float32), start)


def largest(found: jax.Array, score: jax.Array, start: int) -> jax.Array:
    """Position of the True of `found` with the largest score, from `start`, or -1."""
    if found.shape[0] == 0:
        return jnp.int32(-1)
    where = jnp.argmax(jnp.where(found, score, -jnp.inf)).astype(jnp.int32)
    return jnp.where(jnp.any(found), where + jnp.int32(start), jnp.int32(-1))


def first_signal(f: Findings, d: Deviation) -> jax.Array:
    """Position of the first offending signal in forward order, -1 for none."""
    leaves = f.leaf_spikes.shape[0]
    none = jnp.int32(-1)

    rows = 2 + 2 * leaves
    candidates = (
        earliest(f.bad_rows, rows),
        earliest(f.row_jumps | f.row_limits, rows),
        jnp.where(f.bad_loss, jnp.int32(0), none),
        earliest(f.bad_gradients, 2),
        jnp.where(f.loss_spike, jnp.int32(0), none),
        largest(f.leaf_spikes, d.score[1 : 1 + leaves], 2),
        jnp.where(f.norm_spike | f.overflow, jnp.int32(1), none),
        earliest(f.bad_moments, 2 + leaves),
        largest(f.wild_moments, d.score[1 + leaves :], 2 + leaves),
    )
    first = none
    for candidate in reversed(candidates):
        first = jnp.where(candidate >= 0, candidate, first)
    return first
