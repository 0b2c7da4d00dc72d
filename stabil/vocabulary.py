"""The words that every part of stabil shares: what was seen, and what was judged.

The device half fills these records inside the compiled step; the host half reads
them. Nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Cause(enum.IntFlag):
    """Why a verdict is not `OK`; members combine with `|` into `Verdict.flags`.

    Examples:
      >>> Cause.NONFINITE_LOSS | Cause.NONFINITE_GRADIENT
      <Cause.NONFINITE_LOSS|NONFINITE_GRADIENT: 3>
    """

    NONFINITE_LOSS = 1 << 0
    NONFINITE_GRADIENT = 1 << 1
    NONFINITE_ACTIVATION = 1 << 2
    NONFINITE_PARAMETER = 1 << 3
    NONFINITE_MOMENT = 1 << 4
    NORM_OVERFLOW = 1 << 5
    LOSS_SPIKE = 1 << 6
    GRADIENT_SPIKE = 1 << 7
    UPDATE_SPIKE = 1 << 8
    MOMENT_SPIKE = 1 << 9
    ACTIVATION_LIMIT = 1 << 10
    ACTIVATION_SHIFT = 1 << 11
    LAYER_DISAGREEMENT = 1 << 12
    REPLICA_DISAGREEMENT = 1 << 13
    DEAD_LAYER = 1 << 14
    EMPTY_BATCH = 1 << 15
    LEVEL_SHIFT = 1 << 16
    PARAMETER_LEAP = 1 << 17
    DTYPE_RANGE = 1 << 18

    @classmethod
    def names(cls, flags: int) -> tuple[str, ...]:
        """The lower-case names of the causes in `flags`, in bit order.

        Examples:
          >>> Cause.names(64 | 2)
          ('nonfinite_gradient', 'loss_spike')
        """
        return tuple(str(c.name).lower() for c in cls if c & flags)


class Severity(enum.IntEnum):
    """How bad a step is. `BLOCK` means: this step changed no parameter.

    `WATCH` is a blip worth a line in the log, `WARN` needs attention if it lasts.
    """

    OK = 0
    WATCH = 1
    WARN = 2
    BLOCK = 3


class Verdict(NamedTuple):
    """The judgement of one step, made on the device before the update is applied.

    Attributes:
      flags: int32 scalar, a union of `Cause` bits; 0 when nothing was found.
      severity: int32 scalar, a `Severity`.
      first: int32 scalar, position in `Vitals.signals` of the first offending signal
        in forward order (activations, devices, loss, gradients, moments, update); -1
        when none.
      score: float32 scalar, the largest robust deviation of any armed signal, in
        robust standard deviations; 0 while no signal is armed; always finite.
    """

    flags: jax.Array
    severity: jax.Array
    first: jax.Array
    score: jax.Array

    @classmethod
    def clear(cls) -> Verdict:
        """A verdict that found nothing."""
        return cls(
            flags=jnp.zeros([], jnp.int32),
            severity=jnp.zeros([], jnp.int32),
            first=jnp.full([], -1, jnp.int32),
            score=jnp.zeros([], jnp.float32),
        )


class Tally(NamedTuple):
    """What happened since the run began; counters saturate at the int32 maximum.

    Attributes:
      judged_steps: int32 scalar, calls of `update`; one a step.
      blocked_steps: int32 scalar, steps that left everything as it was.
      blocked_in_a_row: int32 scalar, blocked steps up to and including this one.
      clipped_steps: int32 scalar, steps whose gradient was scaled down.
      resets: int32 scalar, leaves whose moments were restarted.
      by_cause: int32 vector with one entry per `Cause` in bit order; steps.
    """

    judged_steps: jax.Array
    blocked_steps: jax.Array
    blocked_in_a_row: jax.Array
    clipped_steps: jax.Array
    resets: jax.Array
    by_cause: jax.Array

    @classmethod
    def zero(cls) -> Tally:
        """A tally of a run that has not begun."""
        # One buffer each: a state whose leaves share a buffer cannot be donated.
        counters = (jnp.zeros([], jnp.int32) for _ in range(5))
        return cls(*counters, by_cause=jnp.zeros([len(Cause)], jnp.int32))


class Measures(NamedTuple):
    """The numbers of the newest step, each a float32 scalar; NaN where not measured.

    Attributes:
      loss: the loss handed to `update`, in its own unit.
      grad_norm: L2 norm of the gradient before any clipping.
      clip_factor: what the gradient was multiplied by; 1 when left alone.
      update_rms: root mean square of first moment over root of second moment, as the
        step found them, from a sample of their columns: how far Adam's direction is
        from noise (0.1 to 0.3) towards unanimity (1), whatever the learning rate.
    """

    loss: jax.Array
    grad_norm: jax.Array
    clip_factor: jax.Array
    update_rms: jax.Array

    @classmethod
    def unmeasured(cls) -> Measures:
        """All NaN, apart from the factor of a clip that did nothing."""
        return cls(
            loss=jnp.full([], jnp.nan, jnp.float32),
            grad_norm=jnp.full([], jnp.nan, jnp.float32),
            clip_factor=jnp.ones([], jnp.float32),
            update_rms=jnp.full([], jnp.nan, jnp.float32),
        )


SHADOW_GROUPS = ("loss", "grad_norm", "grads", "moments", "activations")


class Shadow(NamedTuple):
    """Steps on which other thresholds would have fired; nothing follows from them.

    Attributes:
      thresholds: float32 `[T]`, robust standard deviations.
      steps: int32 `[T, 5]`, steps on which the largest score of a group was beyond the
        threshold; the groups are those of `SHADOW_GROUPS`, in order.
    """

    thresholds: jax.Array
    steps: jax.Array

    def scalars(self) -> dict[str, int]:
        """Plain numbers keyed by slash path, for logging; reads the device.

        Examples:
          >>> list(Shadow(np.array([4.0]), np.zeros((1, 5), int)).scalars())[:2]
          ['shadow/loss/over_4', 'shadow/grad_norm/over_4']
        """
        steps = np.asarray(self.steps)
        return {
            f"shadow/{group}/over_{limit:g}": int(steps[i, j])
            for i, limit in enumerate(np.asarray(self.thresholds).tolist())
            for j, group in enumerate(SHADOW_GROUPS)
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Readings:
    """Statistics of the tensors that a probe saw, in one array with static names.

    Attributes:
      values: float32 `[rows, statistics]`; leading axes are allowed (a step axis
        from `scan`, a batch axis from `vmap`). Rows are in forward order.
      names: one slash path per row, for example `block_3/mlp`; static.
      statistics: one name per column, for example `absmax`; static.
      shards: float32 `[devices, rows, statistics]`, the same statistics of what each
        device holds, in the order of the mesh; replicas of a tensor have a row each,
        so that they can be compared. None unless a probe was asked for `per_device`.

    Examples:
      >>> r = Readings(jnp.array([[0.0, 2.5]]), ("mlp",), ("nan_count", "absmax"))
      >>> print(r["absmax"])
      [2.5]
      >>> r.scalars()
      {'activations/mlp/nan_count': 0.0, 'activations/mlp/absmax': 2.5}
    """

    values: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    statistics: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    shards: jax.Array | None = None

    def __getitem__(self, statistic: str) -> jax.Array:
        """The column of one statistic, float32 `[rows]`.

        Raises:
          KeyError: the statistic was not recorded.
        """
        if statistic not in self.statistics:
            raise KeyError(
                f"needed a recorded statistic, got {statistic!r}; these readings hold "
                f"{', '.join(self.statistics) or 'none'}: name it in "
                "stabil.probe(model, stats=...)"
            )
        return self.values[..., self.statistics.index(statistic)]

    def __contains__(self, statistic: object) -> bool:
        return statistic in self.statistics

    def scalars(self, prefix: str = "activations") -> dict[str, float]:
        """Python floats keyed by slash path, for logging; reads the device."""
        table = np.asarray(self.values)
        return {
            f"{prefix}/{name}/{statistic}": float(table[i, j])
            for i, name in enumerate(self.names)
            for j, statistic in enumerate(self.statistics)
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vitals:
    """Everything that the host needs to know about one step: a few hundred bytes.

    Made by `stabil.vitals`; return it from the train step and hand it to
    `Session.end_step`.

    Attributes:
      verdict: the `Verdict` of this step.
      tally: the `Tally` since the run began.
      measures: the `Measures` of this step.
      readings: the `Readings` of this step, or None without a probe.
      signals: names that `verdict.first` points into; static.
      shadow: `Shadow` of the guard, or None for a clip alone.
    """

    verdict: Verdict
    tally: Tally
    measures: Measures
    readings: Readings | None
    signals: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    shadow: Shadow | None = None

    @property
    def first(self) -> str | None:
        """Name of the first offending signal, or None; reads the device.

        For example `activations/block_3/mlp`, `loss`, `grads/block_3/mlp/kernel`.
        """
        i = int(self.verdict.first)
        return self.signals[i] if 0 <= i < len(self.signals) else None

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the causes that the verdict holds; reads the device."""
        return Cause.names(int(self.verdict.flags))

    @property
    def severity(self) -> Severity:
        """The verdict's severity as a Python value; reads the device."""
        return Severity(int(self.verdict.severity))

    def scalars(self) -> dict[str, Any]:
        """Plain numbers keyed by slash path, for logging; reads the device.

        Readings are left out: they have their own `Readings.scalars`.
        """
        m, t = self.measures, self.tally
        shadow = {} if self.shadow is None else self.shadow.scalars()
        return {
            "loss": float(m.loss),
            "grads/global_norm": float(m.grad_norm),
            "grads/clip_factor": float(m.clip_factor),
            "updates/rms": float(m.update_rms),
            "verdict/severity": int(self.verdict.severity),
            "verdict/score": float(self.verdict.score),
            "tally/judged_steps": int(t.judged_steps),
            "tally/blocked_steps": int(t.blocked_steps),
            "tally/blocked_in_a_row": int(t.blocked_in_a_row),
            "tally/clipped_steps": int(t.clipped_steps),
            "tally/resets": int(t.resets),
            **shadow,
        }


class Controls(NamedTuple):
    """What the host asks of the next steps; hand it to the train step as an argument.

    The values are device scalars, so that changing one never recompiles.

    Attributes:
      learning_rate_scale: float32 scalar in (0, 1]; multiplies the update, after every
        schedule. 1 leaves the update bit-identical.
      reset_moments: bool scalar; True restarts the optimizer's moments in this step.
      probe_level: int32 scalar; 0 keeps a probe's own cadence, 1 asks it for every
        statistic on every step.
    """

    learning_rate_scale: jax.Array
    reset_moments: jax.Array
    probe_level: jax.Array

    @classmethod
    def untouched(cls) -> Controls:
        """Controls that ask for nothing.

        Examples:
          >>> print(Controls.untouched().learning_rate_scale)
          1.0
        """
        one = jnp.ones([], jnp.float32)
        return cls(one, jnp.zeros([], bool), jnp.zeros([], jnp.int32))
