"""What `hf-dspark calibrate` shows: progress while it runs, then tables."""

from __future__ import annotations

import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..evaluation.calibration import Calibration, Quality
from ..evaluation.sweep import SweepPoint
from .pair_view import number

_SECONDS_BETWEEN_LINES = 30


class CallProgress:
    """A progress bar over `generate` calls, with the blocks so far and the rate; where stderr is no terminal, a line
    now and then."""

    def __init__(self, console: Console, total: int):
        """`total`: calls at most."""
        self._console, self._total = console, total
        self._done = self._tokens = self._blocks = 0
        self._start = self._told = time.monotonic()
        self._line = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("calls", total=total, counts="")

    def __enter__(self) -> CallProgress:
        self._start = self._told = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        if kind is None and self._line and not self._console.is_terminal:
            self._console.print(self._line, highlight=False)

    def advance(self, what: str, tokens: int, blocks: int) -> None:
        """A call is done: `what` it was, its new tokens and its blocks."""
        self._done += 1
        self._tokens += tokens
        self._blocks += blocks
        now = time.monotonic()
        counts = f"{self._blocks} blocks, {self._tokens / max(now - self._start, 1e-9):.1f} tokens/s"
        self._bar.update(self._task, completed=self._done, description=what, counts=counts)
        self._line = f"{self._done}/{self._total} calls, {counts} ({what})"
        if now - self._told > _SECONDS_BETWEEN_LINES and not self._console.is_terminal:
            self._told = now
            self._console.print(self._line, highlight=False)
            self._line = ""


def calibration_tables(calibration: Calibration) -> list[Table]:
    """The calibration and the ranking of one mode, a row per draft position. Two tables, to fit into 80 columns."""
    counts = f"{calibration.fit_blocks} blocks fitted, {calibration.held_out_blocks} held out"
    dropped = calibration.fit_dropped + calibration.held_out_dropped
    errors = _table(
        f"{calibration.mode}: calibration, {counts}, {dropped} left out",
        *("T", "s", "accepted\n≥ k, %"),
        *("ECE before, %\n(95 % interval)", "ECE after, %\n(95 % interval)", "noise\nfloor, %"),
    )
    ranking = _table(
        f"{calibration.mode}: ranking on the held-out blocks",
        *("blocks\nwith k-1", "AUROC of c_k\nbefore", "\nafter", "AUROC of a_k\nbefore", "\nafter"),
    )
    for p in calibration.positions:
        errors.add_row(
            str(p.position),
            f"{p.temperature:.2f}",
            f"{p.shift:.2f}",
            f"{100 * p.survival:.1f}",
            _ece(p.before),
            _ece(p.after),
            f"{100 * p.after.noise_floor:.2f}",
        )
        scores = (p.before.auroc, p.after.auroc, p.before.survival_auroc, p.after.survival_auroc)
        ranking.add_row(str(p.position), str(p.reached), *(number(score, ".3f") for score in scores))
    return [errors, ranking]


def _ece(quality: Quality) -> str:
    low, high = (100 * bound for bound in quality.ece_interval)
    return f"{100 * quality.ece:.2f} ({low:.1f}–{high:.1f})"


def sweep_tables(points: list[SweepPoint]) -> list[Table]:
    """Per temperature one table; for each prompt set a row per threshold."""
    found = []
    for temperature in dict.fromkeys(point.temperature for point in points):
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        table = _table(
            f"{mode}: static confidence threshold",
            *("threshold", "acceptance rate\nτ / (ℓ + 1)", "tokens per\nround, τ", "drafts per\nround, ℓ", "rounds"),
            first="set",
        )
        previous = None
        for point in (p for p in points if p.temperature == temperature):
            if previous is not None and point.prompt_set != previous:
                table.add_section()
            table.add_row(
                point.prompt_set if point.prompt_set != previous else "",
                f"{point.threshold:.1f}",
                number(point.acceptance_rate, ".3f"),
                number(point.tokens_per_round, ".3f"),
                number(point.drafts_per_round, ".2f"),
                str(point.rounds),
            )
            previous = point.prompt_set
        found.append(table)
    return found


def _table(title: str, *headings: str, first: str = "k") -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
