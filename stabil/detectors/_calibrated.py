"""Limits and noise by signal, from a healthy baseline run, for the judge.

`stabil calibrate LOG` writes them; names are those of `Vitals.signals`, with the
statistic at the end for rows: `loss`, `grads/global_norm`, `grads/mlp/kernel`,
`updates/rms`, `activations/block_3/mlp/absmax`. They hold from the first step on, with
no warm-up, and never make a rule stricter than it is without them.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stabil.detectors._rows import STATISTICS
from stabil.vocabulary import Readings

_FLOOR, _MOST = 0.05, 1.0
_LOSS = ("loss", "train/loss", "train_loss")
_NORM = ("grads/global_norm", "grad_norm", "train/grad_norm", "global_norm")

Ranges = Mapping[str, tuple[float, float]]


class Limits(NamedTuple):
    """What the judge may hold against G leaves and R rows; infinite where unknown.

    Attributes:
      loss: float32 scalar, largest sound loss.
      signals: float32 `[2 + 2 G]`, log of the largest sound value of each signal.
      rows: float32 `[R]`, log of the largest sound magnitude of each row.
      noise: float32 `[2 + 2 G]`, smallest standard deviation of each logarithm.
      row_noise: float32 `[4 R]`, the same for the four numbers of each row.
    """

    loss: np.ndarray
    signals: np.ndarray
    rows: np.ndarray
    noise: np.ndarray
    row_noise: np.ndarray


def read_ranges(calibration: Any) -> Ranges:
    """Limit and relative noise by name, from a file or a mapping of such records.

    Args:
      calibration: path of what `stabil calibrate` wrote, or a mapping from names to
        records with `typical`, `noise` and `limit` (`stabil.curves.Typical`); None for
        an empty one.

    Raises:
      ValueError: the file is no calibration.
      TypeError: it is neither a path nor a mapping.
    """
    if calibration is None:
        return {}
    wanted = (
        "needed the file that stabil calibrate wrote, or what stabil.curves.calibrate "
        "returned"
    )
    if isinstance(calibration, (str, os.PathLike)):
        try:
            calibration = json.loads(pathlib.Path(calibration).read_text())["signals"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"guard: {wanted}, got {calibration} ({error})") from error
    if not isinstance(calibration, Mapping):
        raise TypeError(f"guard: {wanted}, got {type(calibration).__name__}")
    found = {}
    for name, record in calibration.items():
        fields = record if isinstance(record, Mapping) else record._asdict()
        typical, limit = float(fields["typical"]), float(fields["limit"])
        noise = float(fields["noise"]) / typical if typical > 0 else 0.0
        found[name] = (limit, noise)
    return found


def limits_for(
    ranges: Ranges, leaves: Sequence[str], readings: Readings | None, size: int
) -> Limits | None:
    """The ranges in the order of the signals; None if there are none.

    Args:
      ranges: by name, of `read_ranges`.
      leaves: names of the gradient leaves.
      readings: readings whose rows are named; None for no rows.
      size: room for rows.
    """
    if not ranges:
        return None

    def pick(*names: str) -> tuple[float, float]:
        known = [ranges[name] for name in names if name in ranges]
        return known[0] if known else (math.inf, 0.0)

    signals = [
        pick(*_NORM),
        *(pick(f"grads/{name}") for name in leaves),
        *(pick(f"moments/{name}") for name in leaves),
        pick("updates/rms"),
    ]
    rows = () if readings is None else readings.names
    have = () if readings is None else readings.statistics
    first = "absmax" if "absmax" in have else "rms"
    table = [
        [pick(f"activations/{row}/{kind}") for row in rows]
        for kind in (first, *STATISTICS)
    ]
    padding = [(math.inf, 0.0)] * (size - len(rows))
    padded = [line + padding for line in table]
    return Limits(
        loss=np.float32(pick(*_LOSS)[0]),
        signals=_log(signals),
        rows=_log(padded[0]),
        noise=_noise(signals),
        row_noise=_noise([one for line in padded for one in line]),
    )


def _log(pairs: list[tuple[float, float]]) -> np.ndarray:
    limits = np.array([limit for limit, _ in pairs], np.float64).reshape(-1)
    with np.errstate(divide="ignore"):
        return np.where(limits > 0, np.log(limits), np.inf).astype(np.float32)


def _noise(pairs: list[tuple[float, float]]) -> np.ndarray:
    noise = np.array([noise for _, noise in pairs], np.float32).reshape(-1)
    return np.clip(noise, np.float32(_FLOOR), np.float32(_MOST))
