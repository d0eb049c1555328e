"""Pictures of a calibration and of a threshold sweep, as PNG files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..errors import DSparkDependencyError
from .calibration import Calibration
from .sweep import SweepPoint

try:  # Figure alone: pyplot would pick a backend and keep global state
    from matplotlib.figure import Figure
except ImportError as error:
    raise DSparkDependencyError("Plots need matplotlib: pip install 'hf-dspark[eval]'.") from error

_PANELS_PER_ROW = 5
_FEWEST = 20  # blocks in a bin, for it to be drawn
_LEGEND: Any = dict(loc="outside lower center", fontsize=8, frameon=False)


def write_reliability(calibrations: list[Calibration], directory: str | os.PathLike) -> list[Path]:
    """Writes `reliability_greedy.png` and `reliability_sample.png`: a panel per draft position, with the survival a_k
    on the x axis, the share of blocks that accepted k drafts on the y axis, and dots as large as their bin is full.
    Bins of fewer than 20 blocks are left out.

    Returns:
        The files written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for calibration in calibrations:
        path = folder / f"reliability_{calibration.mode}.png"
        _reliability(calibration).savefig(path, dpi=150)
        written.append(path)
    return written


def _reliability(calibration: Calibration) -> Figure:
    columns = min(_PANELS_PER_ROW, len(calibration.positions))
    rows = math.ceil(len(calibration.positions) / columns)
    figure = Figure(figsize=(max(4.5, 0.8 + 2.4 * columns), 1.2 + 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(calibration.positions) :]:
        axes.set_visible(False)
    for axes, position in zip(panels.flat, calibration.positions):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", label="calibrated")
        for quality, name, colour in ((position.before, "before", "C1"), (position.after, "after", "C0")):
            bins = [b for b in quality.bins if b["count"] >= _FEWEST]
            x, y = ([b[key] for b in bins] for key in ("predicted", "observed"))
            sizes = [max(3.0, 90.0 * b["count"] / calibration.held_out_blocks) for b in bins]
            axes.plot(x, y, color=colour, linewidth=1)
            axes.scatter(x, y, sizes, color=colour, alpha=0.8, label=name, zorder=3)
        before, after = 100 * position.before.ece, 100 * position.after.ece
        axes.set_title(
            f"k = {position.position}, T = {position.temperature:.2f}, s = {position.shift:.2f}\n"
            f"ECE {before:.1f} % → {after:.1f} %",
            fontsize=9,
        )
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.grid(alpha=0.3)
    for axes in panels.flat[max(0, len(calibration.positions) - columns) :]:
        axes.set_xlabel("predicted survival $a_k$", fontsize=9)
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("share accepting ≥ k drafts", fontsize=9)
    figure.suptitle(f"Reliability, {calibration.mode} ({calibration.held_out_blocks} held-out blocks)", fontsize=11)
    legend: Any = figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=3, **_LEGEND)
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([20.0])
    return figure


def write_sweep(points: list[SweepPoint], directory: str | os.PathLike) -> list[Path]:
    """Writes `sweep_T.png` for each temperature T: acceptance rate and tokens per round over the threshold.

    Returns:
        The files written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for temperature in dict.fromkeys(point.temperature for point in points):
        chosen = [point for point in points if point.temperature == temperature]
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for prompt_set in dict.fromkeys(point.prompt_set for point in chosen):
            line = [point for point in chosen if point.prompt_set == prompt_set]
            thresholds = [point.threshold for point in line]
            left.plot(thresholds, [_value(p.acceptance_rate) for p in line], "o-", markersize=4, label=prompt_set)
            right.plot(thresholds, [_value(p.tokens_per_round) for p in line], "o-", markersize=4, label=prompt_set)
        left.set(title="Acceptance rate, τ / (ℓ + 1)", ylim=(0, 1), ylabel="tokens committed per row verified")
        right.set(title="Tokens per round, τ", ylabel="tokens")
        right.axhline(1, color="black", linewidth=0.8, linestyle="--")
        for axes in (left, right):
            axes.set_xlabel("confidence threshold")
            axes.grid(alpha=0.3)
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        figure.suptitle(f"Static confidence threshold ({mode})")
        figure.legend(*left.get_legend_handles_labels(), ncols=4, **_LEGEND)
        path = folder / f"sweep_{temperature:g}.png"
        figure.savefig(path, dpi=150)
        written.append(path)
    return written


def _value(number: float | None) -> float:
    return math.nan if number is None else number
