"""`hf-dspark profile`: what the target's forwards and a draft's blocks cost on this machine, and whether it pays."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .loading import (
    add_model_arguments,
    load_draft,
    load_target,
    positive,
    progress_line,
    quiet_libraries,
    target_name,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..scheduling.throughput import ThroughputProfile

HELP = "measure the speed of a target by rows, and whether drafting can pay"

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--draft", metavar="DRAFT", help="folder or Hub id; its cost is measured too")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="the most rows of a forward; default: a full block's, at least 8",
    )
    parser.add_argument(
        "--context",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens before the forward; default: 128 512, as far as the target has positions",
    )
    parser.add_argument(
        "--seconds", type=positive, default=120, metavar="N", help="about how long it may take; default: 120"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number there")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG) there")


def run(args: argparse.Namespace) -> int:
    """Runs it; 0 whatever the verdict is."""
    quiet_libraries()
    from rich.console import Console

    from ..errors import DSparkTargetError
    from ..generation.profiling import cached_profile_path, measure_throughput

    if args.plot is not None:
        from ..evaluation.plots import plot_throughput  # a missing matplotlib is told now
    if args.target is None and args.draft is None:
        raise DSparkTargetError("There is nothing to measure; give a target with --target, a draft with --draft.")
    for path in (args.json, args.plot):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    with progress_line() as report:
        name, revision = target_name(args, args.draft)
        target, _ = load_target(name, args, report, revision)
        draft = None if args.draft is None else load_draft(args.draft, target, args)
    with _Progress(Console(stderr=True)) as progress:
        profile = measure_throughput(
            target,
            draft,
            max_tokens=args.max_tokens,
            context_lengths=args.context,
            seconds_limit=args.seconds,
            progress=progress.advance,
        )
    console = Console()
    show(console, profile, name)
    kept = cached_profile_path(target, draft)
    if kept.is_file():
        console.print(f"\n`generate` will use these numbers on this machine; they are kept in {kept}", style="dim",
                      markup=False, highlight=False, soft_wrap=True)  # fmt: skip
    if args.json is not None:
        profile.save(args.json)
    if args.plot is not None:
        plot_throughput(profile, args.plot)
    return 0


def show(console: Console, profile: ThroughputProfile, name: str) -> None:
    """Prints what was measured, and what follows from it; `name`: the target's."""
    facts = profile.facts
    threads = "" if facts["threads"] is None else f", {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    about = f"{name}: {facts['target_dtype']}, {facts['target_attention']}"
    if facts["target_quantization"]:
        about += f", {facts['target_quantization']}"
    console.print(f"{about}, on {facts['device']}{threads}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(profile))
    if profile.draft_seconds is not None:
        fixed, step = profile.draft_line
        lengths = ", ".join(f"{1000 * seconds:.1f}" for seconds in profile.draft_seconds)
        console.print(
            f"Drafting takes {1000 * fixed:.1f} ms and {1000 * step:.2f} ms a token (measured for blocks of 1 to "
            f"{len(profile.draft_seconds)}: {lengths} ms)",
            highlight=False,
        )
    for line in verdict(profile):
        console.print(line, highlight=False)


def _table(profile: ThroughputProfile) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="One forward of the target", title_justify="left", title_style="bold")
    table.add_column("rows", justify="right")
    contexts = sorted(profile.curves)
    for context in contexts:
        for heading in (f"context {context}\nms", "\n× 1 row", "\nspread"):
            table.add_column(heading, justify="right")
    for i, rows in enumerate(profile.curves[contexts[0]].tokens):
        cells = []
        for context in contexts:
            seconds = profile.curves[context].seconds
            cells += [f"{1000 * seconds[i]:.1f}", f"{seconds[i] / seconds[0]:.2f}"]
            cells.append(f"{100 * profile.spreads[context][i]:.1f} %")
        table.add_row(str(rows), *cells)
    return table


def verdict(profile: ThroughputProfile) -> list[str]:
    """What follows from the numbers, for each context: a line or more."""
    lines = []
    for context in sorted(profile.curves):
        curve, longest = profile.curves[context], profile.longest
        lines.append(f"\nContext {context}:")
        flat = curve.is_flat(1, longest + 1)
        if flat:
            lines.append(
                f"  1 to {longest + 1} rows take the same time: length cannot matter here: the full block is verified"
            )
        found = {}
        for acceptance in ACCEPTANCES:
            length = profile.best_length(acceptance, context)
            found[acceptance] = profile.expected_speedup(acceptance, context, length), length
        if found[ACCEPTANCES[-1]][0] <= 1:
            lines.append(f"  do not speculate here: even at acceptance {ACCEPTANCES[-1]} plain decoding is as fast")
        for acceptance, (speedup, length) in found.items():
            lines.append(f"  expected speed-up at acceptance {acceptance}: {speedup:.2f} × (blocks of {length})")
    if profile.draft_seconds is None:
        lines.append("\nNo draft model was measured (--draft): its own cost comes off these speed-ups.")
    return lines


class _Progress:
    """A bar with the rate in rounds per second; nothing where stderr is no terminal."""

    def __init__(self, console: Console):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._started = time.monotonic()
        self._task: Any = self._bar.add_task("", total=None, rate="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, done: int, planned: int) -> None:
        """A round is done."""
        rate = f"{done / max(time.monotonic() - self._started, 1e-9):.2g} a second"
        self._bar.update(self._task, completed=done, total=planned, rate=rate)
