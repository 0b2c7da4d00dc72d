"""What the readings of a probe say to the judge: one row per tensor.

Of each row the judge follows four logarithms, stacked one after the other in one vector
of `4 R` signals: the magnitude (`absmax`, or `rms` without it), the standard deviation
(`std`), the tail (`kurtosis` + 3) and the stable rank (`stable_rank`, by whoever
measures it). A statistic that was not read is NaN and changes nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stabil.detectors._baseline import BaselineState, deviate, observe
from stabil.vocabulary import Readings

KINDS = 4
LEAP_SCORE = 10.0  # one signal among hundreds: stricter than a global one
LEAP = math.log(8.0)
STATISTICS = ("std", "kurtosis", "stable_rank")
_LIMIT = math.log(100.0)
_LOGIT_LIMIT = math.log(10.0)  # attention logits: their softmax saturates long before
_COLLAPSE = math.log(100.0)
_TAIL = math.log(100.0)
_RANK = math.log(4.0)
_LARGEST_OVERFLOW, _LARGEST_UNDERFLOW = 1e-3, 0.5


class Rows(NamedTuple):
    """The rows of one step, with room for R of them.

    Attributes:
      magnitudes: float32 `[R]`; NaN where not read.
      nonfinite: bool `[R]`, rows that hold a NaN or an infinity.
      shapes: float32 `[3, R]`, standard deviation, kurtosis, stable rank; NaN likewise.
      crowded: bool `[R]`, rows that leave the range of a number format: more than a
        thousandth of their elements overflow, or more than half underflow.
      limits: float32 `[R]`, log of how far the magnitude may grow: 100 times; 10 times
        for rows named `logits`.
      shards: float32 `[devices, R]`, magnitudes by device; no devices if not read.
      ill_shards: bool `[devices, R]`, what is not finite, by device.
    """

    magnitudes: jax.Array
    nonfinite: jax.Array
    shapes: jax.Array
    crowded: jax.Array
    limits: jax.Array
    shards: jax.Array
    ill_shards: jax.Array


def read_rows(readings: Readings | None, size: int) -> Rows:
    """The rows of `readings`, padded to `size`; pure."""
    shards = None if readings is None else readings.shards
    shown = 0 if shards is None else shards.shape[0]
    empty = Rows(
        magnitudes=jnp.full([size], jnp.nan, jnp.float32),
        nonfinite=jnp.zeros([size], bool),
        shapes=jnp.full([len(STATISTICS), size], jnp.nan, jnp.float32),
        crowded=jnp.zeros([size], bool),
        limits=jnp.full([size], _LIMIT, jnp.float32),
        shards=jnp.full([shown, size], jnp.nan, jnp.float32),
        ill_shards=jnp.zeros([shown, size], bool),
    )
    if readings is None:
        return empty
    rows, have = len(readings.names), readings.statistics
    values = readings.values.astype(jnp.float32)

    def column(table: jax.Array, name: str) -> jax.Array:
        return table[..., have.index(name)]

    def magnitude(table: jax.Array) -> jax.Array:
        for name in ("absmax", "rms"):
            if name in have:
                return column(table, name)
        return jnp.full(table.shape[:-1], jnp.nan, jnp.float32)

    def share(end: str, most: float) -> jax.Array:
        marks = jnp.zeros([rows], bool)
        for name in have:
            if name.endswith(end):
                marks |= column(values, name) > most
        return marks

    def ill(table: jax.Array) -> jax.Array:
        marks = jnp.zeros(table.shape[:-1], bool)
        for name in ("nan_count", "inf_count"):
            if name in have:
                marks |= column(table, name) > 0
        return marks

    # The kurtosis of a probe is the excess over 3; its logarithm needs all of it.
    shapes = [
        column(values, name) + (3.0 if name == "kurtosis" else 0.0)
        if name in have
        else empty.shapes[0, :rows]
        for name in STATISTICS
    ]
    crowded = share("_overflow", _LARGEST_OVERFLOW)
    crowded |= share("_underflow", _LARGEST_UNDERFLOW)
    logits = ["logit" in name.lower() for name in readings.names]
    limits = [_LOGIT_LIMIT if one else _LIMIT for one in logits]
    filled = Rows(
        magnitude(values),
        ill(values),
        jnp.stack(shapes),
        crowded,
        jnp.asarray(limits, jnp.float32),
        *empty[5:],
    )
    if shards is not None:
        table = shards.astype(jnp.float32)
        filled = filled._replace(shards=magnitude(table), ill_shards=ill(table))
    pad = lambda e, f: f if e.shape == f.shape else e.at[..., :rows].set(f)  # noqa: E731
    return Rows(*(pad(e, f) for e, f in zip(empty, filled, strict=True)))


class Slopes(NamedTuple):
    """Slow changes of rows, bool `[R]` each; each is True on one step.

    Attributes:
      limit: the magnitude grew past its limit without a jump.
      collapsed: the standard deviation fell to a hundredth.
      tail: the kurtosis grew to a hundred times.
      rank: the stable rank fell to a quarter.
    """

    limit: jax.Array
    collapsed: jax.Array
    tail: jax.Array
    rank: jax.Array


class Followed(NamedTuple):
    """What the levels of the rows say of one step.

    Attributes:
      score: float32 scalar, the largest deviation of a magnitude.
      level: float32 `[R]`, level of the magnitudes; NaN where not read or not armed.
      jump: float32 `[R]`, the newest magnitude over it; NaN likewise.
      noise: float32 `[R]`, one robust standard deviation of the log of the magnitude.
      alive: bool `[R]`, rows that were well above zero (that varied, where there is a
        standard deviation) for the length of the warm-up.
      jumps: bool `[R]`, magnitudes that leap.
      shapes: bool `[R]`, standard deviations or kurtoses that leap.
      limits: bool `[R]`, magnitudes beyond their limit.
      slopes: `Slopes`.
    """

    score: jax.Array
    level: jax.Array
    jump: jax.Array
    noise: jax.Array
    alive: jax.Array
    jumps: jax.Array
    shapes: jax.Array
    limits: jax.Array
    slopes: Slopes


def follow_rows(
    base: BaselineState,
    rows: Rows,
    *,
    floor: jax.Array,
    first: jax.Array,
    largest: jax.Array | None = None,
    **memory: Any,
) -> tuple[BaselineState, Followed]:
    """Takes the rows of one step in, and says what stands out.

    Args:
      base: levels of the `4 R` signals.
      rows: the rows.
      floor: float32 scalar or `[4 R]`, smallest standard deviation to believe.
      first: float32 scalar, deviation to start from.
      largest: float32 `[R]`, log of the largest sound magnitude, or None.
      **memory: as `observe` takes them.
    """
    size = rows.magnitudes.shape[0]
    stacked = jnp.concatenate([rows.magnitudes[None], rows.shapes])
    positive = jnp.isfinite(stacked) & (stacked > 0)
    x = jnp.where(positive, jnp.log(jnp.where(positive, stacked, 1.0)), jnp.nan)
    x = x.reshape(-1)
    warmup = memory["warmup_steps"]
    d = deviate(base, x, floor=floor, warmup_steps=warmup)
    new, _ = observe(base, x, d, first_deviation=first, **memory)
    leaps = (d.score > LEAP_SCORE) & (d.jump > LEAP)
    armed, leaps = d.armed.reshape(KINDS, size), leaps.reshape(KINDS, size)
    jumps = leaps[0] | d.early[:size]
    limits = armed[0] & (x[:size] > base.reference[:size] + rows.limits)
    limits |= d.early[:size]
    if largest is not None:
        new, past_largest = pass_limit(new, base, x, largest)
        limits |= past_largest
    gone = jnp.where(d.armed, new.location - new.reference, 0.0).reshape(KINDS, size)
    past = Slopes(
        limits & ~jumps, gone[1] < -_COLLAPSE, gone[2] > _TAIL, gone[3] < -_RANK
    )
    # Each is one event: what it came to is the reference from here on.
    reference = jnp.where(jnp.concatenate(past), new.location, new.reference)
    known = new.observed.reshape(KINDS, size) >= warmup
    followed = Followed(
        score=jnp.max(d.score[:size], initial=0.0),
        level=jnp.where(armed[0], new.location[:size], jnp.nan),
        jump=jnp.where(armed[0], d.jump[:size], jnp.nan),
        noise=d.scale[:size],
        alive=jnp.where(jnp.isfinite(rows.shapes[0]), known[1], known[0]),
        jumps=jumps,
        shapes=leaps[1] | leaps[2],
        limits=limits,
        slopes=past,
    )
    return new._replace(reference=reference), followed


def pass_limit(
    new: BaselineState, old: BaselineState, x: jax.Array, largest: jax.Array
) -> tuple[BaselineState, jax.Array]:
    """The first signals that are past a fixed limit; that is one event, and a level.

    Args:
      new: levels after the step.
      old: levels before it.
      x: the newest logarithms.
      largest: float32 `[n]`, limits of the first n signals.
    """
    n = largest.shape[0]
    below = (old.observed[:n] == 0) | (old.location[:n] <= largest)
    past = (x[:n] > largest) & below
    location = jnp.where(past, x[:n], new.location[:n])
    return new._replace(location=new.location.at[:n].set(location)), past


def unseen(size: int) -> Followed:
    """What rows say that nobody reads."""
    no, nothing = jnp.zeros([size], bool), jnp.full([size], jnp.nan, jnp.float32)
    slopes = Slopes(no, no, no, no)
    return Followed(jnp.float32(0), nothing, nothing, nothing, no, no, no, no, slopes)
