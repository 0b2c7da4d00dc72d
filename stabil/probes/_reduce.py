"""The careful pass: every accumulator in one two-stage reduction, for any entries."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from stabil.probes import _quantiles
from stabil.probes._captured import own_terms
from stabil.probes._statistics import STATISTICS
from stabil.probes._sums import LARGEST_PILOT, SUMS, Elements, Quantities, Row, Term

COUNTS = ("nan", "inf")  # always, and first
PILOTS = 8  # finite elements at the head of a row whose mean the row is shifted by
SHORTEST_ROW, EVEN_ROW, LONGEST_ROW = 64, 4096, 2**16
_START = {"add": 0.0, "min": math.inf, "max": -math.inf}
_COMBINE = {"add": lax.add, "min": lax.min, "max": lax.max}

Parts = Mapping[str, Quantities]


def groups_of(statistics: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the `Sums` that `statistics` need, each once; counts always."""
    needed = set(COUNTS).union(*(STATISTICS[s].needs for s in statistics))
    return tuple(name for name in SUMS if name in needed)


def finish(packed: jax.Array, statistics: tuple[str, ...]) -> jax.Array:
    """Statistics from packed quantities, float32 `[..., statistics]`."""
    n, parts = unpack(packed, groups_of(statistics))
    values = [STATISTICS[s].finish(n, parts) for s in statistics]
    return jnp.stack(values, axis=-1)


def accumulate(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    """The pass over a tensor: what its rows add up to.

    Returns:
      float32 `[2 + terms, rows]`: finite entries, pilot, then the accumulators of the
      terms of `groups`, then lines of a sample where a group needs one.
    """
    run = _accumulate if own_terms(groups) else _accumulate_alike
    return run(x, groups)


def _accumulate(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    x = lax.stop_gradient(x)
    axes = _explicit_axes(x)
    if not axes:
        return _local_sums(x, groups)
    # Where shardings are part of the type, rows are those of the local shards: a
    # reshape of the whole would have to move data, and is refused.
    rows = jax.shard_map(
        lambda shard: _local_sums(shard, groups),
        mesh=jax.typeof(x).sharding.mesh,
        in_specs=jax.typeof(x).sharding.spec,
        out_specs=jax.P(None, axes),
        axis_names=set(axes),
        check_vma=False,
    )(x)
    reshard = getattr(jax, "reshard", None) or jax.sharding.reshard
    everywhere = jax.P(*(None,) * rows.ndim)
    return reshard(rows, jax.NamedSharding(jax.typeof(x).sharding.mesh, everywhere))


_accumulate_alike = jax.jit(_accumulate, static_argnums=1, inline=True)


def _explicit_axes(x: jax.Array) -> tuple[str, ...]:
    """Mesh axes that the type of `x` says it is sharded over."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = () if sharding is None else sharding.spec
    parts = [(s,) if isinstance(s, str) else s for s in spec if s is not None]
    return tuple(axis for part in parts for axis in part)


def _local_sums(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    pieces = [_row_sums(rows, groups) for rows in _as_rows(x) if rows.size]
    if not pieces:
        return no_rows(groups)
    sums = pieces[0]
    if len(pieces) > 1:
        # Rows in the order of their entries: the pieces of one line together.
        terms, lines = pieces[-1].shape
        together = [p.reshape(terms, lines, -1) for p in pieces]
        sums = jnp.concatenate(together, axis=2).reshape(terms, -1)
    if not _sampled(groups):
        return sums
    return jnp.concatenate([sums, _quantiles.sample(x, sums.shape[1])])


def _sampled(groups: tuple[str, ...]) -> bool:
    return any(SUMS[g].sampled for g in groups)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def settle(sums: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    """What the sums of rows tell of each of several tensors with as many rows.

    Args:
      sums: float32 `[tensors, 2 + terms, rows]`, each tensor from `accumulate`.
      groups: as there.
    Returns:
      float32 `[tensors, width]`, packed quantities.
    """
    n, pilot, *terms = jnp.moveaxis(sums, (1, 2), (0, 1))
    parts, at = {}, 0
    for g in groups:
        if not SUMS[g].sampled:
            after = at + len(SUMS[g].terms)
            parts[g] = SUMS[g].settle(Row(n, pilot), tuple(terms[at:after]))
            at = after
    total, whole = merge(n, parts)
    for g in groups:
        if SUMS[g].sampled:
            whole |= {g: SUMS[g].settle(Row(n, pilot), tuple(terms[at:]))}
    return pack(total, whole)


def pack(n: jax.Array, parts: Parts) -> jax.Array:
    """Count and quantities stacked along a new last axis, groups in `SUMS` order."""
    flat = [n, *(q for name in SUMS if name in parts for q in parts[name])]
    columns = [q if q.ndim > n.ndim else q[..., None] for q in flat]
    return jnp.concatenate(columns, axis=-1)


def unpack(packed: jax.Array, groups: tuple[str, ...]) -> tuple[jax.Array, Parts]:
    """The inverse of `pack`."""
    parts, at = {}, 1
    for g in groups:
        end = at + SUMS[g].width
        single = end - SUMS[g].wide
        parts[g] = tuple(packed[..., i] for i in range(at, single))
        if SUMS[g].wide:
            parts[g] += (packed[..., single:end],)
        at = end
    return packed[..., 0], parts


def nothing(groups: tuple[str, ...]) -> jax.Array:
    """Packed quantities of a tensor without entries; merging it changes nothing."""
    return settle(no_rows(groups)[None], groups)[0]


def width(groups: tuple[str, ...]) -> int:
    """Length of packed quantities."""
    return 1 + sum(SUMS[g].width for g in groups)


def lines(groups: tuple[str, ...]) -> int:
    """Length of the first axis of what `accumulate` returns, without samples."""
    return 2 + sum(len(SUMS[g].terms) for g in groups)


def accumulate_in(x: jax.Array, *, groups: tuple[str, ...], rows: int) -> jax.Array:
    """`accumulate` into `rows + 1` rows, whatever the size; without samples."""
    flat = x.reshape(-1)
    body = flat.size // rows * rows
    pieces = [flat[:body].reshape(rows, -1)] if body else []
    pieces += [flat[None, body:]] if body < flat.size else []
    sums = [_row_sums(p, groups) for p in pieces]
    missing = rows + 1 - sum(s.shape[1] for s in sums)
    none = jnp.repeat(no_rows(groups), missing, axis=1)
    return jnp.concatenate([*sums, none], axis=1)


def no_rows(groups: tuple[str, ...]) -> jax.Array:
    """What `accumulate` returns of a tensor without entries."""
    start = [_START[t.combine] for g in groups for t in SUMS[g].terms]
    start += [math.nan] * _sampled(groups)
    # No array of its own: it would be a constant that shards cannot close over.
    return jnp.stack([jnp.full([1], s, jnp.float32) for s in (0.0, 0.0, *start)])


def merge_packed(packed: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    """`merge` over the first axis of packed quantities; NaN parts did not run."""
    ran = ~jnp.isnan(packed[..., :1])
    n, parts = unpack(jnp.where(ran, packed, nothing(groups)), groups)
    return jnp.where(jnp.any(ran, axis=0), pack(*merge(n, parts)), jnp.nan)


def merge(n: jax.Array, parts: Parts) -> tuple[jax.Array, dict[str, Quantities]]:
    """Combines quantities over their first axis: rows, micro-batches or devices.

    Args:
      n: float32 `[parts, ...]`, finite elements behind each part.
      parts: quantities by group, each `[parts, ...]`.
    Returns:
      The total of `n` and the quantities of the whole, first axis gone.
    """
    total = jnp.sum(n, axis=0)
    weights = n / jnp.maximum(total, 1)
    return total, {g: SUMS[g].merge(weights, q) for g, q in parts.items()}


def _as_rows(x: jax.Array) -> list[jax.Array]:
    """`x` as one or two matrices whose rows suit one accumulator each."""
    if x.size and x.size % EVEN_ROW == 0:
        return [x.reshape(-1, EVEN_ROW)]
    while x.ndim > 1 and x.shape[-1] < SHORTEST_ROW:
        x = x.reshape(*x.shape[:-2], -1)
    width = x.shape[-1] if x.ndim else 1
    x = x.reshape(-1, width) if x.size else x.reshape(0, 1)
    chunk = next((c for c in range(EVEN_ROW, 255, -1) if width % c == 0), None)
    if width > EVEN_ROW and chunk:
        return [x.reshape(-1, chunk)]
    if width <= LONGEST_ROW:
        return [x]
    body = width // EVEN_ROW * EVEN_ROW
    return [x[:, :body].reshape(-1, EVEN_ROW), x[:, body:]]


def _row_sums(x: jax.Array, groups: tuple[str, ...]) -> jax.Array:
    """What `accumulate` returns, of a matrix that is no larger than it should be."""
    raw = x.astype(jnp.float32)
    finite = jnp.isfinite(raw)
    shifted = any(SUMS[g].shifted for g in groups)
    pilot = _pilot(raw, finite) if shifted else jnp.zeros_like(raw[:, 0])
    value = jnp.where(finite, raw, 0)
    e = Elements(raw, finite, value, jnp.where(finite, raw - pilot[:, None], 0))
    terms: list[Term] = [t for g in groups for t in SUMS[g].terms]

    def combine(left: Quantities, right: Quantities) -> Quantities:
        pairs = zip(terms, left, right, strict=True)
        return tuple(_COMBINE[t.combine](a, b) for t, a, b in pairs)

    start = tuple(jnp.float32(_START[t.combine]) for t in terms)
    sums = lax.reduce(tuple(t.of(e) for t in terms), start, combine, (1,))
    # The counts of NaN and Inf come first: see `groups_of`.
    return jnp.stack([x.shape[1] - sums[0] - sums[1], pilot, *sums])


def _pilot(raw: jax.Array, finite: jax.Array) -> jax.Array:
    """Mean of the first few finite elements of each row, 0 where it is too large."""
    ok = finite[:, :PILOTS]
    head = jnp.where(ok, raw[:, :PILOTS] / PILOTS, 0)
    share = jnp.maximum(jnp.sum(ok, axis=1), 1).astype(jnp.float32) / PILOTS
    pilot = jnp.sum(head, axis=1) / share
    return jnp.where(jnp.abs(pilot) < LARGEST_PILOT, pilot, 0)
