"""A picture of a report: the loss with its events shaded."""

from __future__ import annotations

import pathlib

from stabil.curves._judge import WARN
from stabil.curves._report import Report

_COLORS = {1: "#e8d48a", 2: "#f0a050", 3: "#d060c0"}


def draw(report: Report, path: str | pathlib.Path) -> None:
    """Writes a PNG of the loss over the steps; needs matplotlib.

    Args:
      report: what `lint` found.
      path: file to write; its suffix says the format.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "draw: needed matplotlib, which is not installed; write "
            "pip install 'stabil[run]'"
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    buckets = [b for b in report.sketch.buckets if b[1] <= b[2]]
    steps = [b[0] for b in buckets]
    axes.fill_between(steps, [b[1] for b in buckets], [b[2] for b in buckets], lw=1)
    axes.plot(steps, [b[2] for b in buckets], lw=0.6)
    if buckets and min(b[1] for b in buckets) > 0:
        axes.set_yscale("log")
    for event in report.events:
        axes.axvspan(event.start, event.end, color=_COLORS[event.severity], alpha=0.5)
        if event.severity >= WARN:
            axes.axvline(event.start, color="#802000", lw=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(report.columns["loss"] or "loss")
    axes.set_title(f"{pathlib.Path(report.path).name}: {len(report.findings)} findings")
    figure.savefig(path, dpi=120)
