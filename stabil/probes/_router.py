"""Mixtures of experts: how the tokens spread over the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stabil.probes._tap import tap_beside


def tap_router(
    gates: jax.Array,
    name: str = "router",
    *,
    selected: int = 1,
    chosen: jax.Array | None = None,
    per_expert: bool = False,
) -> jax.Array:
    """Taps a router: the share of the work that each expert gets.

    Leaves the row `name/load`, a tensor with an entry per expert that sums to 1; inside
    a probed Flax model below the path of the module. Its `max` is the load of the
    busiest expert (1 / experts is even), its `zero_count` the number of dead experts,
    its `std` the imbalance.

    Args:
      gates: `[..., experts]`, logits or probabilities of each token; the largest win.
      name: slash path of the place.
      selected: experts per token, the largest gates of each.
      chosen: int `[..., k]`, the experts that each token goes to, where that is decided
        otherwise (noise, capacity, bias); negative entries go to none.
      per_expert: whether to add a row per expert, `name/expert_3`.
    Returns:
      `gates`, bit-identical; go on with it.
    Raises:
      ValueError: `selected` is no number of experts.
    Examples:
      >>> import jax.numpy as jnp
      >>> from stabil.probes import collect, tap_router
      >>> gates = jnp.array([[3.0, 1.0, 0.0], [0.2, 0.1, 0.0], [1.0, 9.0, 0.0]])
      >>> _, readings = collect(tap_router, stats=("max", "zero_count"))(gates)
      >>> readings.scalars()
      {'activations/router/load/zero_count': 1.0, \
'activations/router/load/max': 0.6666666865348816}
    """
    experts = gates.shape[-1]
    if isinstance(selected, bool) or not 1 <= selected <= experts:
        raise ValueError(
            f"needed `selected` as a number of experts from 1 to {experts}, got "
            f"{selected!r}; write for example "
            "stabil.probes.tap_router(gates, selected=2)"
        )
    if chosen is None:
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(gates), selected)
    hits = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=jnp.float32)
    counts = jnp.sum(hits, axis=0)
    load = counts / jnp.maximum(jnp.sum(counts), 1)
    sides = {"load": load}
    if per_expert:
        sides |= {f"expert_{i}": load[i] for i in range(experts)}
    return tap_beside(gates, sides, name)
