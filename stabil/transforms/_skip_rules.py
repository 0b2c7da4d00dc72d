"""The rules of `skip_spikes`: each holds one value against its window."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stabil.transforms._window import GAUSSIAN, Window

# Robust scale never below: 5 % of a norm, 1 % of a loss.
LOG_FLOOR = 0.05
LOSS_FLOOR = 0.01
# Least standard deviation of Levanter's rule.
LEVANTER_FLOOR = 1e-6

# Of the value, its window, k, whether it is a norm, and whether the batch was empty:
# whether it is a spike, its score, the limit, and the window with the value in it.
Judge = Callable[
    [jax.Array, Window, float, bool, jax.Array],
    tuple[jax.Array, jax.Array, jax.Array, Window],
]


def robust(
    x: jax.Array, window: Window, k: float, is_norm: bool, empty: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Window]:
    tiny = jnp.finfo(x.dtype).tiny
    logs = window
    value = x
    if is_norm:
        logs = window._replace(values=jnp.log(jnp.maximum(window.values, tiny)))
        value = jnp.log(jnp.maximum(x, tiny))
    centre, spread = logs.median(), GAUSSIAN * logs.mad()
    least = LOG_FLOOR if is_norm else jnp.maximum(LOSS_FLOOR * jnp.abs(centre), 1e-8)
    spread = jnp.maximum(spread, least)
    armed = window.filled >= max(2, window.values.shape[-1] // 2)
    # A leaf that has always been still gives no log; a zero norm is no spike.
    finite = jnp.isfinite(value) & ((x > 0) | (not is_norm)) & ~empty
    score = jnp.where(armed & finite, (value - centre) / spread, 0)
    limit = centre + k * spread
    limit = jnp.where(armed, jnp.exp(limit) if is_norm else limit, 0)
    return score > k, score, limit, window.push(x, finite)


def mean_and_deviation(rule: str) -> Judge:
    def judge(
        x: jax.Array, window: Window, k: float, is_norm: bool, empty: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Window]:
        del is_norm, empty
        levanter = rule == "levanter"
        spread = window.deviation(0 if levanter else 1)
        spread = jnp.maximum(spread, LEVANTER_FLOOR) if levanter else spread
        least = max(2, window.values.shape[-1] // 2)
        armed = window.filled + (0 if levanter else 1) >= least
        away = x - window.mean()
        # Not `>`: a NaN on either side is a spike, as in the published codes.
        hot = armed & ~(away <= k * spread)
        score = jnp.where(armed, away / spread, 0)
        return hot, score, window.mean() + k * spread, window.push(x)

    return judge


def llmc(
    x: jax.Array, window: Window, k: float, is_norm: bool, empty: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Window]:
    del is_norm, empty
    # The published running sums keep a NaN for ever: once in, every entry becomes one.
    lost = jnp.any(window.valid() & jnp.isnan(window.values))
    full = window.filled >= window.values.shape[-1]
    window = window.push(jnp.where(lost, jnp.nan, x))
    spread = window.deviation()
    score = jnp.where(full, (x - window.mean()) / spread, jnp.nan)
    return score > k, score, window.mean() + k * spread, window


JUDGES: dict[str, Judge] = {
    "robust": robust,
    "olmo": mean_and_deviation("olmo"),
    "maxtext": mean_and_deviation("maxtext"),
    "levanter": mean_and_deviation("levanter"),
    "llmc": llmc,
}
