"""What is wrong with one step: findings, and the rules that judge them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._baseline import Deviation
from stabil.detectors._replicas import Outsider
from stabil.detectors._rows import LEAP, LEAP_SCORE, Rows, Slopes
from stabil.detectors._siblings import Departed
from stabil.vocabulary import Cause, Severity

_UPDATE_JUMP = math.log(1.5)
_WILD = math.log(100.0)


class Evidence(NamedTuple):
    """The signals of one step.

    Attributes:
      loss: float32 scalar; NaN when none was given.
      loss_given: bool scalar, whether a loss was given.
      gradient_sums: float32 `[G]`, sum of squares of each gradient leaf.
      moment_levels: float32 `[G]`, how large the optimizer's moments are, as
        `stabil.transforms` samples them; NaN where there are none.
      bad_moments: bool `[G]`, leaves whose sampled moments are not finite.
      impossible_moments: bool `[G]`, leaves whose sampled moments no gradients make in
        the warm-up.
      update_rms: float32 scalar, `Measures.update_rms`; NaN where there is none.
      rows: `Rows`, what the readings say.
    """

    loss: jax.Array
    loss_given: jax.Array
    gradient_sums: jax.Array
    moment_levels: jax.Array
    bad_moments: jax.Array
    impossible_moments: jax.Array
    update_rms: jax.Array
    rows: Rows


class Findings(NamedTuple):
    """What is wrong: scalars and one boolean per leaf, row, or both (leaves first).

    `beyond` is one per signal `[2 + 2 G]`: what passed its calibrated limit.
    """

    bad_loss: jax.Array
    bad_gradients: jax.Array
    bad_moments: jax.Array
    bad_rows: jax.Array
    loss_leap: jax.Array
    loss_spike: jax.Array
    loss_lasts: jax.Array
    norm_spike: jax.Array
    norm_leap: jax.Array
    update_spike: jax.Array
    leaf_spikes: jax.Array
    wild_moments: jax.Array
    row_jumps: jax.Array
    row_shapes: jax.Array
    row_limits: jax.Array
    slopes: Slopes
    crowded: jax.Array
    layers: Departed
    outsider: Outsider
    overflow: jax.Array
    beyond: jax.Array
    risen: jax.Array
    drifts: jax.Array

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
    most leaves share follows from the gradients and is no damage. The level of a small
    leaf may be too noisy for its own score; a hundred times all leaves needs none.
    """
    if x.shape[0] == 0:
        return jnp.zeros([0], bool)
    # The median by sorting: unusable entries stand at the end and are not counted.
    jumps = jnp.sort(jnp.where(d.armed, d.jump, jnp.inf))
    armed = jnp.maximum(jnp.sum(d.armed), 1)
    median = (jumps[(armed - 1) // 2] + jumps[armed // 2]) / 2
    common = jnp.where(jnp.isfinite(median), jnp.maximum(median, 0.0), 0.0)
    highest = jnp.max(jnp.where(d.armed, level, -jnp.inf))
    above = x - highest - common
    sure = (d.score > LEAP_SCORE) | (above > _WILD)
    return d.armed & sure & (d.jump - common > LEAP) & (above > LEAP)


def spikes(
    e: Evidence, x: jax.Array, d: Deviation, location: jax.Array, threshold: float
) -> dict[str, jax.Array]:
    """Findings in the signals `[2 + 2 G]` with logarithms `x`, by name."""
    split = 1 + e.gradient_sums.shape[0]
    moments = slice(split, -1)
    wild = _out_of_line(
        Deviation(*(v[moments] for v in d)), location[moments], x[moments]
    )
    wild |= e.impossible_moments & ~d.armed[moments]
    # Damaged moments make a wild update: that is one finding.
    wide = (d.score[-1] > threshold) & (d.jump[-1] > _UPDATE_JUMP) & ~jnp.any(wild)
    return dict(
        norm_spike=(d.score[0] > threshold) | d.early[0],
        norm_leap=d.early[0],
        update_spike=wide,
        leaf_spikes=((d.score > LEAP_SCORE) & (d.jump > LEAP) | d.early)[1:split],
        wild_moments=wild,
        overflow=jnp.isposinf(jnp.sum(e.gradient_sums)),
    )


def severity(f: Findings) -> jax.Array:
    """The `Severity` of the findings, int32 scalar."""
    spike = f.loss_spike | f.norm_spike | jnp.any(f.leaf_spikes)
    jump = jnp.any(f.row_jumps)
    block = f.nonfinite | jnp.any(f.wild_moments) | (jump & spike)
    block |= f.norm_leap | f.loss_leap
    block |= jnp.any(f.row_jumps & f.row_limits)
    warn = f.loss_lasts | f.risen | f.drifts[0] | f.overflow | f.outsider.lasting
    warn |= jnp.any(f.row_limits | f.slopes.collapsed)
    warn |= jnp.any(f.layers.away | f.layers.died) | jnp.any(f.beyond)
    watch = spike | jump | f.update_spike | jnp.any(f.drifts)
    watch |= jnp.any(f.row_shapes | f.slopes.tail | f.slopes.rank | f.crowded)
    watch |= jnp.any(f.layers.alone | f.layers.silent)
    levels = ((block, Severity.BLOCK), (warn, Severity.WARN), (watch, Severity.WATCH))
    worst = jnp.int32(Severity.OK)
    for holds, level in reversed(levels):
        worst = jnp.where(holds, jnp.int32(level), worst)
    return worst


def union(f: Findings) -> jax.Array:
    """The causes that hold, as bits of an int32 scalar."""
    leaves = f.leaf_spikes.shape[0]
    holds = {
        Cause.NONFINITE_LOSS: f.bad_loss,
        Cause.NONFINITE_GRADIENT: jnp.any(f.bad_gradients),
        Cause.NONFINITE_ACTIVATION: jnp.any(f.bad_rows),
        Cause.NONFINITE_MOMENT: jnp.any(f.bad_moments),
        Cause.NORM_OVERFLOW: f.overflow,
        Cause.LOSS_SPIKE: f.loss_spike,
        Cause.GRADIENT_SPIKE: f.norm_spike
        | jnp.any(f.leaf_spikes)
        | jnp.any(f.beyond[: 1 + leaves]),
        Cause.UPDATE_SPIKE: f.update_spike | f.beyond[-1],
        Cause.MOMENT_SPIKE: jnp.any(f.wild_moments)
        | jnp.any(f.beyond[1 + leaves : -1]),
        Cause.ACTIVATION_LIMIT: jnp.any(f.row_limits),
        Cause.ACTIVATION_SHIFT: jnp.any(
            f.row_jumps | f.row_shapes | f.slopes.tail | f.slopes.rank
        ),
        Cause.LAYER_DISAGREEMENT: jnp.any(f.layers.alone | f.layers.away),
        Cause.REPLICA_DISAGREEMENT: f.outsider.device >= 0,
        Cause.DEAD_LAYER: jnp.any(f.layers.died | f.layers.silent)
        | jnp.any(f.slopes.collapsed),
        Cause.LEVEL_SHIFT: f.risen | jnp.any(f.drifts),
        Cause.DTYPE_RANGE: jnp.any(f.crowded),
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


def first_signal(f: Findings, d: Deviation, names: int) -> jax.Array:
    """Position of the first offending signal in forward order, -1 for none.

    The order of the signals: the loss, the gradient norm, G gradient leaves, G moments,
    the update, `names` rows, the devices.
    """
    leaves = f.leaf_spikes.shape[0]
    moments, update = 2 + leaves, 2 + 2 * leaves
    rows = update + 1
    layers = f.layers.alone | f.layers.away | f.layers.died | f.layers.silent
    shapes = f.row_shapes | f.slopes.collapsed | f.slopes.tail | f.slopes.rank
    device = f.outsider.device

    def at(holds: jax.Array, place: int) -> jax.Array:
        return jnp.where(holds, jnp.int32(place), jnp.int32(-1))

    candidates = (
        earliest(f.bad_rows, rows),
        jnp.where(device >= 0, device + rows + names, -1),
        earliest(f.row_jumps | f.row_limits | shapes | f.crowded, rows),
        earliest(layers[leaves:], rows),
        at(f.bad_loss, 0),
        earliest(f.bad_gradients, 2),
        at(f.loss_spike | f.drifts[0], 0),
        largest(f.leaf_spikes, d.score[1 : 1 + leaves], 2),
        at(f.norm_spike | f.overflow, 1),
        earliest(layers[:leaves], 2),
        earliest(f.bad_moments, moments),
        largest(f.wild_moments, d.score[1 + leaves : -1], moments),
        at(f.update_spike, update),
        earliest(f.beyond, 1),
        at(f.risen | f.drifts[1], 1),
        at(f.drifts[2], update),
    )
    first = jnp.int32(-1)
    for candidate in reversed(candidates):
        first = jnp.where(candidate >= 0, candidate, first)
    return first
