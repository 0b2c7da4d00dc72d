"""Which process departs from the others, and since when, from their own logs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Departure(NamedTuple):
    """A process that differs from the others for long.

    Attributes:
      process: its number, the column of the table.
      first_row: first row from which on it differs.
      rows: rows in a row that it differs for, the first stretch that is long enough.
      score: largest distance in that stretch, in robust standard deviations.
    """

    process: int
    first_row: int
    rows: int
    score: float


def departures(
    table: np.ndarray,
    *,
    threshold: float = 8.0,
    lasting_rows: int = 5,
    floor: float = 0.02,
) -> list[Departure]:
    """Processes whose values differ from the median of all, for several rows on end.

    The numbers must be taken before they are averaged over processes: local loss, local
    gradient norm, step time, bad values. One process that is not finite while most are
    differs too. With fewer than three processes nothing can be said.

    Args:
      table: float `[rows, processes]`.
      threshold: robust standard deviations over the processes of a row.
      lasting_rows: rows on end that count as long; >= 1.
      floor: smallest standard deviation to believe, as a share of the median's size.

    Returns:
      Departures in the order of their first row.

    Examples:
      >>> table = np.ones((20, 4)) + 0.01 * np.sin(np.arange(80)).reshape(20, 4)
      >>> table[12:, 2] += 3
      >>> [(d.process, d.first_row, d.rows) for d in departures(table)]
      [(2, 12, 8)]

    Source: the spatial comparison of L4, arXiv:2503.20263, with median and MAD in the
    place of an isolation forest, which needs more processes than most runs have.
    """
    table = np.asarray(table, np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"departures: needed a table [rows, processes], got shape {table.shape}; "
            "write np.stack(values, axis=1)"
        )
    if table.shape[1] < 3:
        return []
    finite = np.isfinite(table)
    most = finite.sum(axis=1) * 2 > table.shape[1]
    held = np.where(finite, table, np.nan)
    held[~most] = 0.0
    median = np.nanmedian(held, axis=1, keepdims=True)
    away = np.abs(held - median)
    spread = 1.4826 * np.nanmedian(away, axis=1, keepdims=True)
    scale = np.maximum(spread, floor * np.abs(median) + 1e-12)
    score = np.where(finite, away / scale, np.inf)
    score[~most] = 0.0
    found = []
    for process in range(table.shape[1]):
        start = _first_stretch(score[:, process] > threshold, lasting_rows)
        if start is not None:
            first, rows = start
            worst = float(np.max(score[first : first + rows, process]))
            found.append(Departure(process, first, rows, worst))
    return sorted(found, key=lambda d: d.first_row)


def _first_stretch(out: np.ndarray, least: int) -> tuple[int, int] | None:
    """Start and length of the first stretch of True that is long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], out.astype(int), [0]])))
    for first, end in edges.reshape(-1, 2).tolist():
        if end - first >= least:
            return first, end - first
    return None
