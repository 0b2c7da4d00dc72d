"""The picture of `stabil demo`: three loss curves, gradient norms, what happened."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from stabil.cli._demo_train import Run

_COLOURS = {"clean": "#444444", "unprotected": "#d1495b", "protected": "#1f77b4"}
_MARKS = {"clip": "o", "skip": "v", "reset": "s", "rollback": "<"}
_MARK_COLOURS = {
    "clip": "#17a2b8",
    "skip": "#e08e0b",
    "reset": "#2e8b57",
    "rollback": "#7b3fa0",
}
_SMOOTH = 9  # batches that a thick line takes the median of


def draw(
    path: pathlib.Path,
    runs: Sequence[Run],
    faults: Sequence[dict[str, Any]],
    events: Sequence[tuple[int, str]],
) -> None:
    """Draws the runs into a PNG file.

    Args:
      path: the file to write.
      runs: clean, unprotected, protected.
      faults: rows of the report, with `title` and `batch`.
      events: batch position and kind (`clip`, `skip`, `reset`, `rollback`) of each
        intervention in the protected run.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "needed matplotlib to draw the picture, got none; write pip install "
            "'stabil[run]', or stabil demo --no-picture"
        ) from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, norms = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run in runs:
        colour = _COLOURS[run.name]
        losses.plot(run.batches, run.losses, color=colour, lw=0.7, alpha=0.3)
        medians = _running_median(run.losses)
        losses.plot(run.batches, medians, color=colour, lw=1.5, label=run.name)
        norms.plot(run.batches, run.grad_norms, color=colour, lw=0.9, alpha=0.8)
        _mark_end(losses, run)
    _mark_faults(losses, norms, faults)
    _mark_events(losses, runs[-1], events)
    shown = [*runs[0].losses, *runs[-1].losses]
    top = max(x for x in shown if math.isfinite(x))
    low = min(x for x in runs[0].losses if math.isfinite(x))
    losses.set_ylim(low * 0.9, top * 1.9)  # room for the legend
    losses.set_yscale("log", base=2)
    losses.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    losses.set_ylabel(f"training loss, median of {_SMOOTH} (nats a byte)")
    losses.legend(loc="upper right", ncols=3, framealpha=0.9)
    norms.set_yscale("log")
    norms.set_ylabel("gradient norm")
    norms.set_xlabel("batch (a rollback repeats steps, with batches that are new)")
    figure.suptitle("One model, one seed, five planted faults", fontweight="bold")
    figure.savefig(path, dpi=120)


def _running_median(values: Sequence[float]) -> list[float]:
    half = _SMOOTH // 2
    padded = np.pad(np.asarray(values, float), half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SMOOTH)
    # A window with a NaN has a NaN median: a curve ends where its numbers end.
    return np.median(windows, axis=1).tolist()


def _mark_end(axes: Any, run: Run) -> None:
    """A cross where a curve ends because its loss is no number any more."""
    ends = [i for i, x in enumerate(run.losses) if not math.isfinite(x)]
    if ends and not any(map(math.isfinite, run.losses[ends[-1] :])):
        last = max((i for i, x in enumerate(run.losses) if math.isfinite(x)), default=0)
        axes.plot(
            run.batches[last],
            run.losses[last],
            "X",
            ms=10,
            color=_COLOURS[run.name],
            label=f"{run.name}: no number from batch {run.batches[last] + 1}",
        )


def _mark_faults(losses: Any, norms: Any, faults: Sequence[dict[str, Any]]) -> None:
    for i, fault in enumerate(faults):
        for axes in (losses, norms):
            axes.axvline(fault["batch"], color="#999999", ls=":", lw=1)
        losses.annotate(
            fault["title"],
            (fault["batch"], 1.0),
            xycoords=losses.get_xaxis_transform(),
            xytext=(0, 4 + 12 * (i % 2)),  # two rows, lest neighbours touch
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color="#555555",
        )


def _mark_events(axes: Any, run: Run, events: Sequence[tuple[int, str]]) -> None:
    heights, height = {}, run.losses[0]
    for batch, loss in zip(run.batches, run.losses, strict=True):
        # A step without a number is marked at the height of the one before it.
        height = loss if math.isfinite(loss) else height
        heights[batch] = height
    for kind, mark in _MARKS.items():
        batches = [batch for batch, k in events if k == kind]
        if batches:
            axes.plot(
                batches,
                [heights[batch] for batch in batches],
                mark,
                ms=7,
                mec="white",
                mew=0.8,
                color=_MARK_COLOURS[kind],
                label=kind,
                zorder=5,
            )
