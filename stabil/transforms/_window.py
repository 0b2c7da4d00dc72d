"""The last values of a signal in a buffer of fixed size, and their statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Ratio of the standard deviation to the median absolute deviation of a Gaussian.
GAUSSIAN = 1.482602218505602


class Window(NamedTuple):
    """A ring buffer of one or more signals that are written together.

    Attributes:
      values: float32 `[..., window]`; entries past `filled` mean nothing.
      filled: int32; entries written so far, at most `window`.
      position: int32; where the next entry goes.
    """

    values: jax.Array
    filled: jax.Array
    position: jax.Array

    @classmethod
    def empty(cls, *shape: int, dtype: Any = jnp.float32) -> Window:
        """A window of the shape `[..., window]` that holds nothing."""
        return cls(
            jnp.zeros(shape, dtype), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        )

    def push(self, value: jax.Array, keep: jax.Array | bool = True) -> Window:
        """With one more entry `[...]`, or unchanged where `keep` is False."""
        size = self.values.shape[-1]
        written = self.values.at[..., self.position].set(value)
        new = Window(
            written,
            jnp.minimum(self.filled + 1, size),
            (self.position + 1) % size,
        )
        return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, self)

    def newest(self, entries: jax.Array) -> Window:
        """A window that holds only the newest `entries` of this one."""
        size = self.values.shape[-1]
        kept = jnp.minimum(entries, self.filled).astype(jnp.int32)
        values = jnp.roll(self.values, kept - self.position, axis=-1)
        return Window(values, kept, kept % size)

    def valid(self) -> jax.Array:
        """bool `[window]`; which entries count."""
        return jnp.arange(self.values.shape[-1], dtype=jnp.int32) < self.filled

    def percentile(self, q: float, values: jax.Array | None = None) -> jax.Array:
        """The q-th percentile `[...]` by linear interpolation; 0 of an empty window.

        Args:
          q: in [0, 100].
          values: stand-ins for the entries, `[..., window]`.
        """
        x = self.values if values is None else values
        ordered = jnp.sort(jnp.where(self.valid(), x, jnp.inf), axis=-1)
        rank = (q / 100.0) * (jnp.maximum(self.filled, 1) - 1).astype(x.dtype)
        low = jnp.floor(rank)
        share = rank - low
        below = jnp.take(ordered, low.astype(jnp.int32), axis=-1)
        above = jnp.take(ordered, jnp.ceil(rank).astype(jnp.int32), axis=-1)
        # Where both are the same entry, their difference would be inf - inf when empty.
        mixed = jnp.where(share > 0, below + share * (above - below), below)
        return jnp.where(self.filled > 0, mixed, 0)

    def median(self) -> jax.Array:
        """Median `[...]`; 0 of an empty window."""
        return self.percentile(50.0)

    def mad(self) -> jax.Array:
        """Median absolute deviation from the median `[...]`, not rescaled."""
        away = jnp.abs(self.values - self.median()[..., None])
        return self.percentile(50.0, away)

    def mean(self) -> jax.Array:
        """Mean `[...]`; 0 of an empty window."""
        n = jnp.maximum(self.filled, 1).astype(self.values.dtype)
        return jnp.sum(jnp.where(self.valid(), self.values, 0), axis=-1) / n

    def deviation(self, freedom: int = 0) -> jax.Array:
        """Standard deviation `[...]` in two passes, over `filled - freedom`."""
        away = jnp.square(self.values - self.mean()[..., None])
        total = jnp.sum(jnp.where(self.valid(), away, 0), axis=-1)
        n = jnp.maximum(self.filled - freedom, 1).astype(self.values.dtype)
        return jnp.sqrt(total / n)
