"""What `hf-dspark data` shows: progress while records are written, and what `inspect` found."""

from __future__ import annotations

import time
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..training.inspection import Inspection

_SECONDS_BETWEEN_LINES = 30
_BAR_WIDTH = 40
OPEN, CLOSE = "⟦", "⟧"


class RecordProgress:
    """A progress bar over records with the rate; where stderr is no terminal, a line now and then."""

    def __init__(self, console: Console, total: int, done: int):
        """`total`: records in the end; `done`: those that are there already."""
        self._console, self._total, self._done, self._before = console, total, done, done
        self._tokens = 0
        self._start = self._told = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("records", total=total, completed=done, rate="")

    def __enter__(self) -> RecordProgress:
        self._start = self._told = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def rate(self) -> str:
        """Tokens and records per second of this run."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self._tokens / seconds:.1f} tokens/s, {60 * (self._done - self._before) / seconds:.1f} records/min"

    def advance(self, records: int, tokens: int) -> None:
        """A batch is written: its new records, and the tokens that were generated for it."""
        self._done += records
        self._tokens += tokens
        self._bar.update(self._task, completed=self._done, rate=self.rate)
        due = time.monotonic() - self._told > _SECONDS_BETWEEN_LINES or self._done == self._total
        if due and not self._console.is_terminal:
            self._told = time.monotonic()
            self._console.print(f"{self._done}/{self._total} records, {self.rate}", highlight=False)


def inspection_view(found: Inspection, colour: bool) -> Group:
    """Counts, the histogram of lengths, and the samples.

    Args:
        found: what is shown.
        colour: whether supervised text is told by its colour; else it stands in double brackets.
    """
    values = found.to_dict()
    counts = Table.grid(padding=(0, 2))
    rows = {
        "records": f"{found.records:,}"
        + (f", {found.skipped:,} of them skipped: nothing to train on" if found.skipped else ""),
        "samples": f"{found.samples:,}" + (f", {found.longer:,} cut at {found.max_length} tokens" * bool(found.longer)),
        "tokens": f"{found.tokens:,}",
        "supervised": f"{found.supervised:,} ({found.supervised_share:.1%})",
        "length": "median {median:.0f}, 10 % below {percentile_10:.0f}, 10 % above {percentile_90:.0f}, "
        "longest {max}".format(**values["length"]),
        "answers per record": _shares(found.answers, found.records),
        "cut when written": f"{found.unfinished:,} ({found.unfinished / found.records:.1%})",
    }
    if found.temperatures:
        rows["temperatures"] = _shares(found.temperatures, found.records)
    for name, text in rows.items():
        counts.add_row(name, text)
    return Group(counts, _histogram(found), *_samples(found, colour))


def _shares(counts: dict, total: int) -> str:
    return ", ".join(f"{value:g}: {number / total:.0%}" for value, number in sorted(counts.items()))


def _histogram(found: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="\nLengths", title_justify="left", title_style="bold")
    table.add_column("tokens", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("")
    ranges = found.histogram()
    most = max(number for _, _, number in ranges)
    for first, last, number in ranges:
        bar = "█" * max(round(_BAR_WIDTH * number / most), int(number > 0))
        table.add_row(f"{first} to {last}", f"{number:,}", Text(bar, style="cyan"))
    return table


def _samples(found: Inspection, colour: bool) -> list[Panel | Text]:
    how = "in green" if colour else f"in {OPEN}double brackets{CLOSE}"
    parts: list[Panel | Text] = [Text(f"What is supervised stands {how}; the rest is context.")]
    for number, shown in enumerate(found.shown, start=1):
        text = Text()
        for piece, supervised in shown:
            if colour:
                text.append(piece, style="bold green" if supervised else "bright_black")
            else:
                text.append(f"{OPEN}{piece}{CLOSE}" if supervised else piece)
        parts.append(Panel(text, title=f"sample {number}", title_align="left", box=box.ROUNDED))
    return parts
