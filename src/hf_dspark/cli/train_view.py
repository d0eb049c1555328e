"""What `hf-dspark train --estimate` shows: a table, and the whole of it on one line."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ..training.estimate import RunEstimate


def print_estimate(estimate: RunEstimate) -> None:
    """Prints both to stdout."""
    device, peak = max(estimate.peak_bytes.items(), key=lambda item: (item[0] != "cpu", item[1]))
    table = Table(title="What the run will take", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("how")
    table.add_row("steps", f"{estimate.steps:,}", f"{estimate.tokens_per_step:,.0f} tokens each, padding included")
    table.add_row("a step", f"{estimate.seconds_per_step:.3g} s", f"{estimate.cpu_seconds_per_step:.3g} s of CPU time")
    if estimate.evaluations:
        table.add_row("evaluations", f"{estimate.evaluations:,}", f"{estimate.seconds_per_evaluation:.3g} s each")
    table.add_row("time", _duration(estimate.seconds), "without loading and writing checkpoints")
    table.add_section()
    for name, value in estimate.peak_bytes.items():
        how = "peak of this process" if name == "cpu" else "peak reserved by PyTorch"
        table.add_row(f"memory, {name}", _size(value), how)
    parts = {
        "target's weights": estimate.target_bytes,
        "draft's weights": estimate.draft_bytes,
        "gradients, optimiser": estimate.training_bytes,
    }
    rest = max(peak - sum(parts.values()), 0)
    for name, value in {**parts, "rest": rest}.items():
        table.add_row(f"  {name}", _size(value), "activations, logits, libraries" if name == "rest" else "")
    console = Console()
    console.print(table)
    console.print(
        f"{estimate.steps:,} steps take {_duration(estimate.seconds)} ({estimate.seconds_per_step:.3g} s a step) and "
        f"{_size(peak)} on {device}.",
        highlight=False,
        soft_wrap=True,
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _size(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
