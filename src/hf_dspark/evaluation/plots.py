"""Pictures of an evaluation, a training run and a throughput measurement, as PNG files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DSparkDependencyError
from ..scheduling.throughput import ThroughputProfile
from .harness import Evaluation, SetResult

try:  # Figure alone: pyplot would pick a backend and keep global state
    from matplotlib.figure import Figure
except ImportError as error:
    raise DSparkDependencyError("Plots need matplotlib: pip install 'hf-dspark[eval]'.") from error


def write_plots(evaluation: Evaluation, directory: str | os.PathLike) -> list[Path]:
    """Writes, for each temperature T, `accepted_length_T.png`, `acceptance_by_position_T.png` and `speedup_T.png`.

    Returns:
        The files written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for temperature in dict.fromkeys(result.temperature for result in evaluation.set_results):
        results = [result for result in evaluation.set_results if result.temperature == temperature]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        figures = {
            "accepted_length": _bars(
                results, lambda r: r.summary.accepted_length, f"Accepted length ({mode})", "tokens per round, τ", 1.0
            ),
            "acceptance_by_position": _curves(results, f"Acceptance by draft position ({mode})"),
            "speedup": _bars(
                results, lambda r: r.summary.decode_speedup, f"Decode speed over plain generate ({mode})", "×", 1.0
            ),
        }
        for name, figure in figures.items():
            path = folder / f"{name}_{temperature:g}.png"
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def plot_learning_curve(histories: dict[str, list[dict[str, Any]]], path: str | os.PathLike) -> None:
    """Expected accepted length on held-out text over training steps, greedy and sampling.

    Args:
        histories: the `log_history` of a `trainer_state.json` per run, by the name to show.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, history) in enumerate(histories.items()):
        for mode, line in (("greedy", "o-"), ("sample", "s--")):
            key = f"eval_accepted_length_{mode}"
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            axes.plot(*zip(*points), line, color=f"C{i}", markersize=4, label=f"{name}, {mode}")
    axes.set_xlabel("step")
    axes.set_ylabel("expected accepted length, held out")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def plot_lengths(lengths: list[int], max_length: int, path: str | os.PathLike) -> None:
    """Histogram of the lengths of training samples, and where they are cut.

    Args:
        lengths: in tokens.
        max_length: of training; shown where a sample is longer.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=min(40, max(lengths)), color="C0")
    if max(lengths) > max_length:
        axes.axvline(max_length, color="black", linewidth=0.8, linestyle="--", label=f"cut at {max_length}")
        axes.legend(fontsize=8)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("samples")
    axes.set_title(f"{len(lengths):,} samples, median {sorted(lengths)[len(lengths) // 2]} tokens", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")


def plot_throughput(profile: ThroughputProfile, path: str | os.PathLike) -> None:
    """A measured profile: milliseconds over the rows of a forward, and the speed-up that follows for each acceptance.

    Args:
        profile: of `measure_throughput`; one colour per context length.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(8.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    acceptances = [0.02 * i for i in range(50)]
    for i, context in enumerate(sorted(profile.curves)):
        curve, colour = profile.curves[context], f"C{i}"
        left.plot(curve.tokens, [1000 * s for s in curve.seconds], "o", color=colour, markersize=4)
        rows = range(1, curve.tokens[-1] + 1)
        fitted = [1000 * curve.seconds_per_step(b) for b in rows]
        left.plot(rows, fitted, color=colour, linewidth=1, label=f"context {context}")
        speedups = [profile.expected_speedup(p, context, profile.best_length(p, context)) for p in acceptances]
        right.plot(acceptances, speedups, color=colour, label=f"context {context}")
    if profile.draft_seconds is not None:
        lengths = range(1, len(profile.draft_seconds) + 1)
        drafting = [1000 * s for s in profile.draft_seconds]
        left.plot(lengths, drafting, "s--", color="gray", markersize=3, linewidth=1, label="drafting as many tokens")
    left.set_title("One forward of the target (dots: medians)", fontsize=10)
    left.set_xlabel("rows")
    left.set_ylabel("ms")
    left.set_ylim(bottom=0)
    charged = "" if profile.draft_seconds is not None else ", drafting for nothing"
    right.set_title(f"Expected speed-up with the best block length{charged}", fontsize=10)
    right.axhline(1, color="black", linewidth=0.8, linestyle="--", label="plain generate")
    right.set_xlabel("acceptance of a draft, given the ones before it")
    right.set_ylabel("×")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _names(results: list[SetResult]) -> tuple[list[str], list[str]]:
    """Prompt sets and draft models, each in order of appearance."""
    return list(dict.fromkeys(r.prompt_set for r in results)), list(dict.fromkeys(r.draft for r in results))


def _bars(
    results: list[SetResult],
    value: Callable[[SetResult], float | None],
    title: str,
    unit: str,
    baseline: float,
) -> Any:
    """Grouped bars: a group per prompt set, a bar per draft model, and a line at what plain generate gives."""
    sets, drafts = _names(results)
    figure = Figure(figsize=(2.5 + 1.6 * len(sets), 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(drafts)
    for i, draft in enumerate(drafts):
        heights = [value(r) or 0.0 for s in sets for r in results if (r.prompt_set, r.draft) == (s, draft)]
        places = [j + (i - (len(drafts) - 1) / 2) * width for j in range(len(sets))]
        axes.bar_label(axes.bar(places, heights, width, label=draft), fmt="%.2f", padding=2, fontsize=8)
    axes.axhline(baseline, color="black", linewidth=0.8, linestyle="--", label="plain generate")
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _curves(results: list[SetResult], title: str) -> Any:
    """One panel per prompt set, one curve per draft model."""
    sets, drafts = _names(results)
    figure = Figure(figsize=(1.0 + 2.8 * len(sets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for axes, prompt_set in zip(panels, sets):
        for draft in drafts:
            (result,) = (r for r in results if (r.prompt_set, r.draft) == (prompt_set, draft))
            shares = result.summary.acceptance_by_position
            axes.plot(range(1, len(shares) + 1), [float("nan") if s is None else s for s in shares], "o-", label=draft)
            axes.set_xticks(range(1, len(shares) + 1))
        axes.set_title(prompt_set, fontsize=10)
        axes.set_xlabel("draft position")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of proposals committed")
    figure.suptitle(title)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    return figure
