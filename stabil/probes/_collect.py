"""`stabil.collect`: the statistics of every tap inside a function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from stabil.probes import _due, _select, _statistics
from stabil.probes._program import read, trace
from stabil.vocabulary import Controls, Readings


def collect(
    fn: Callable[..., Any],
    *,
    where: str | tuple[str, ...] = "**",
    stats: str | tuple[str, ...] = ("finite", "absmax", "rms"),
    backward: bool = False,
    per_device: bool = False,
    every: int = 1,
) -> Collected:
    """A function that also returns statistics of the values tapped inside `fn`.

    It sees every `stabil.tap`, and every module output of a `stabil.probe`, through
    `jit`, `scan`, `while_loop` (the last turn), `cond` (NaN where a branch was not
    taken), `remat`, `vmap` (one row over the batch), `shard_map` and custom
    derivative rules. Where `fn` computes gradients, the cotangents of the same places
    are seen too, as `name@grad`. Turns of a scan have a row each: `name[2]`. Rows are
    in the order of execution.

    Wrap what is compiled: `jax.jit(stabil.collect(train_step))`. Arrays among the
    arguments are traced; Python scalars stay what they are; NNX objects are updated.

    Does not: change the return of `fn` by a bit; see inside Pallas kernels.

    Args:
      fn: any JAX function; pytrees in, pytrees out.
      where: glob over tap names, or a tuple of globs; see `stabil.probe`.
      stats: which statistics; see `stabil.probe`.
      backward: whether to read cotangents too.
      per_device: whether to return `Readings.shards` too; see `stabil.probe`.
      every: steps from one reading to the next. Above 1 the step must be told:
        `collected.at(step, session.controls)(...)` in place of `collected(...)`.
    Returns:
      A function of the same arguments that returns `(fn's return, Readings)`.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a statistic is unknown, or `every` is no positive number; at the
        call, a pattern matches no tap, or the step is not known.
    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from stabil.probes import collect, tap
      >>> def loss(w):
      ...     return jnp.sum(tap(w * 3.0, "scaled") ** 2)
      >>> step = collect(jax.grad(loss), stats="absmax", backward=True)
      >>> grad, readings = jax.jit(step)(jnp.array([1.0, -2.0]))
      >>> readings.names, readings["absmax"].tolist()
      (('scaled', 'scaled@grad'), [6.0, 12.0])
    """
    if not callable(fn):
        raise TypeError(
            f"needed a function to collect from, got {fn!r}; write for example "
            "stabil.collect(train_step)"
        )
    _due.check_every(every, "collected")
    return Collected(
        fn,
        _select.as_patterns(where),
        _statistics.columns(stats),
        dict(backward=backward, per_device=per_device),
        every,
    )


class Collected:
    """A function that returns its readings beside its return; see `collect`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        patterns: tuple[str, ...],
        statistics: tuple[str, ...],
        options: dict[str, bool],
        every: int,
        due: jax.Array | bool | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._arguments = (fn, patterns, statistics, options, every)
        self._due = due

    def at(self, step: Any, controls: Controls | None = None) -> Collected:
        """The function at one step: it reads when the step is due, or when asked.

        Args:
          step: number of the step, int32 scalar or Python int; due are 0, `every`,
            2 `every`.
          controls: `session.controls`; while `probe_level` is 1 or more, every step is
            due.
        Returns:
          A function to call in this step alone; readings that are not due are NaN.
        Examples:
          >>> import jax, jax.numpy as jnp
          >>> from stabil.probes import collect, tap
          >>> seen = collect(lambda x: tap(2 * x, "y"), stats="absmax", every=10)
          >>> run = jax.jit(lambda step, x: seen.at(step)(x)[1]["absmax"])
          >>> run(20, jnp.ones(3)), run(21, jnp.ones(3))
          (Array([2.], dtype=float32), Array([nan], dtype=float32))
        """
        if self._due is False:
            return self
        return Collected(*self._arguments, _due.is_due(self.every, step, controls))

    def off(self) -> Collected:
        """The function for a program that reads nothing; its readings are NaN.

        It stays off: `collected.off().at(step, session.controls)` reads nothing either.
        """
        return Collected(*self._arguments, False)

    @property
    def every(self) -> int:
        """Steps from one reading to the next."""
        return self._arguments[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Readings]:
        """The function's return, and the readings."""
        fn, patterns, statistics, options, every = self._arguments
        _due.check_due(every, self._due, "collected.at(step, session.controls)(batch)")
        more: Any = dict(options, due=self._due)
        if "flax.nnx" not in sys.modules:
            program = trace(lambda: fn(*args, **kwargs))
            return read(program, patterns, statistics, **more)
        # Objects with state are made anew inside the trace, and updated after it.
        from stabil.probes._nnx import Copies

        copies = Copies((args, kwargs))
        program = trace(lambda: copies.run(lambda all_: fn(*all_[0], **all_[1])))
        (out, new), readings = read(program, patterns, statistics, **more)
        copies.update(new)
        return out, readings
