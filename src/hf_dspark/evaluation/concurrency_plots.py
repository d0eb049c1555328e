"""Pictures of a throughput measurement over concurrency, as in the paper's figures on serving."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import DSparkDependencyError
from .concurrency import FULL, PLAIN, SCHEDULED, ModeResult

try:  # Figure alone: pyplot would pick a backend and keep global state
    from matplotlib.figure import Figure
except ImportError as error:
    raise DSparkDependencyError("Plots need matplotlib: pip install 'hf-dspark[eval]'.") from error


def write_plots(results: Sequence[ModeResult], directory: str | os.PathLike) -> list[Path]:
    """Writes `throughput_over_request_speed.png` and `throughput_over_concurrency.png`.

    Returns:
        The files written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    by_mode: dict[str, list[ModeResult]] = {}
    for result in results:
        by_mode.setdefault(result.mode, []).append(result)
    colors = {mode: f"C{i}" for i, mode in enumerate(by_mode)}  # the same in every panel

    trade = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = trade.add_subplot()
    for mode, own in by_mode.items():
        x, y = [r.request_speed for r in own], [r.tokens_per_second for r in own]
        axes.plot(x, y, "o-", color=colors[mode], markersize=4, label=mode)
        for result in own if mode in (PLAIN, SCHEDULED) else ():
            axes.annotate(
                str(result.concurrency),
                (result.request_speed, result.tokens_per_second),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
    axes.set_xlabel("tokens/s of a request")
    axes.set_ylabel("tokens/s of all requests")
    axes.set_title("Throughput against a request's speed (numbers: concurrency)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)

    load = Figure(figsize=(6.4, 6.0), layout="constrained")
    upper, lower = load.subplots(2, 1, sharex=True)
    for mode, own in by_mode.items():
        x, y = [r.concurrency for r in own], [r.tokens_per_second for r in own]
        upper.plot(x, y, "o-", color=colors[mode], markersize=4, label=mode)
        if mode in (FULL, SCHEDULED):
            lower.plot(x, [r.verified for r in own], "o-", color=colors[mode], markersize=4, label=mode)
    upper.set_ylabel("tokens/s of all requests")
    lower.set_ylabel("drafts verified per request and round")
    lower.set_xlabel("concurrency")
    lower.set_xscale("log", base=2)
    ticks = sorted({r.concurrency for r in results})
    lower.set_xticks(ticks, [str(tick) for tick in ticks])
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    paths = [folder / "throughput_over_request_speed.png", folder / "throughput_over_concurrency.png"]
    for figure, path in zip((trade, load), paths):
        figure.savefig(path, dpi=150)
    return paths
