"""When a probe is due."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import jax

from stabil.probes import _default, _due, _program, _select
from stabil.vocabulary import Controls, Readings


@dataclasses.dataclass(frozen=True)
class Probe:
    """What probes of every kind of model share.

    Attributes:
      model: the model, unchanged.
      patterns: globs over module paths, and classes; a module is probed if one
        matches. None at all: those of `_default`.
      statistics: names of the columns of the readings.
      every: steps from one reading to the next.
      inputs: whether arguments are probed beside outputs.
      backward: whether cotangents are named, for a `stabil.collect` around.
      per_device: whether to tell what each device holds too.
      due: whether this step is read, a bool scalar; None is always; False, known
        when the program is traced, never.
    """

    model: Any
    patterns: tuple[str | type, ...]
    statistics: tuple[str, ...]
    every: int = 1
    inputs: bool = False
    backward: bool = False
    per_device: bool = False
    due: jax.Array | bool | None = None

    def at(self, step: Any, controls: Controls | None = None) -> Self:
        """The probe at one step: it reads when the step is due, or when asked.

        A step that is not due skips the statistics, inside the same compiled program;
        its readings are NaN throughout.

        Args:
          step: number of the step, int32 scalar or Python int; due are 0, `every`,
            2 `every`.
          controls: `session.controls`; while `probe_level` is 1 or more, every step is
            due.
        Returns:
          A probe to use in this step alone.
        Examples:
          >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
          >>> probed = stabil.probe(nn.Dense(2), stats="absmax", every=10)
          >>> params = probed.init(jax.random.key(0), jnp.ones((1, 3)))
          >>> run = jax.jit(lambda i, x: probed.at(i).apply(params, x)[1]["absmax"])
          >>> run(20, jnp.zeros((1, 3))), run(21, jnp.zeros((1, 3)))
          (Array([0.], dtype=float32), Array([nan], dtype=float32))
        """
        if self.due is False or self.every == 1:
            return self
        due = _due.is_due(self.every, step, controls)
        return dataclasses.replace(self, due=due)

    def off(self) -> Self:
        """The probe for a program that reads nothing; its readings are NaN throughout.

        It stays off: `probed.off().at(step, session.controls)` reads nothing either.
        Compiled beside the probed one and chosen on the host by the step's number, it
        makes the steps between two readings cost exactly nothing. Where several
        processes run, all must choose alike.

        Examples:
          >>> import flax.linen as nn, jax, jax.numpy as jnp, stabil
          >>> probed = stabil.probe(nn.Dense(2), stats="absmax")
          >>> params = probed.init(jax.random.key(0), jnp.ones((1, 3)))
          >>> y, readings = probed.off().apply(params, jnp.ones((1, 3)))
          >>> readings.scalars()
          {'activations/Dense/absmax': nan}
        """
        return dataclasses.replace(self, due=False)

    def wants(self, *names: str, kind: type) -> bool:
        """Whether to name what this module returns; more may be named than is read."""
        return not self.patterns or _select.selected(self.patterns, *names, kind=kind)

    def read(
        self,
        program: _program.Program,
        places: _default.Places,
        root: str,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Any, Readings]:
        """Runs a traced model, and reads the places that were asked for.

        `around` is what held while it was traced.
        """
        if self.patterns:
            patterns = _select.as_names(self.patterns, places)
        else:
            jaxpr = program.closed.jaxpr
            patterns = _default.default_places(places, root, jaxpr)
        return _program.read(
            program,
            patterns,
            self.statistics,
            places=places,
            due=self.due,
            only=not self.patterns,
            per_device=self.per_device,
            around=around,
        )

    def check_due(self) -> None:
        """Raises where a cadence was asked for and no step number given.

        Raises:
          ValueError: `every` is above 1 and this probe came not from `at`.
        """
        _due.check_due(
            self.every,
            self.due,
            "probed.at(step, session.controls).apply(variables, x)",
        )
