"""What `hf-dspark eval` shows: progress while it runs, then tables."""

from __future__ import annotations

import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..evaluation.harness import Evaluation, PromptResult, SetResult
from .pair_view import number

_SECONDS_BETWEEN_LINES = 30


class EvaluationProgress:
    """A progress bar with the rate in tokens per second; where stderr is no terminal, a line now and then."""

    def __init__(self, console: Console, total: int, unit: str = "prompts"):
        """`total`: parts of the work, called `unit`: prompts over all sets and temperatures, or groups of them."""
        self._console, self._total, self._unit = console, total, unit
        self._done = self._tokens = 0
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
        self._task = self._bar.add_task(unit, total=total, rate="")

    def __enter__(self) -> EvaluationProgress:
        self._start = self._told = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, result: PromptResult) -> None:
        """A prompt is done."""
        tokens = sum(len(run.tokens) for run in result.runs)
        self.step(f"{result.prompt_set}, temperature {result.temperature:g}", tokens)

    def step(self, label: str, tokens: int) -> None:
        """A part of the work is done, with which `tokens` tokens were generated."""
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        rate = f"{self._tokens / max(now - self._start, 1e-9):.1f} tokens/s"
        self._bar.update(self._task, completed=self._done, description=label, rate=rate)
        due = now - self._told > _SECONDS_BETWEEN_LINES or self._done == self._total
        if due and not self._console.is_terminal:
            self._told = now
            self._console.print(f"{self._done}/{self._total} {self._unit}, {rate} ({label})", highlight=False)


def tables(evaluation: Evaluation) -> list[Table]:
    """Per temperature and draft model one table of drafting and one of speed; rows are the prompt sets and their mean.

    Two, because one would not fit into 80 columns.
    """
    found = []
    for average in evaluation.averages():
        temperature, draft = average["temperature"], average["draft"]
        results = [r for r in evaluation.set_results if (r.temperature, r.draft) == (temperature, draft)]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        rows = [(result.prompt_set, vars(result.summary)) for result in results]
        if len(rows) > 1:
            rows.append(("mean", average))

        drafting = _table(f"{draft}, {mode}: drafting", "accepted\nlength", "acceptance by\nposition, %")
        for heading in ("draft time\n/ target's", *(("same text\nas plain",) if temperature == 0 else ())):
            drafting.add_column(heading, justify="right")
        texts = [_same_text(result) for result in results] + [""]
        for (name, row), text in zip(rows, texts):
            shares = " ".join("-" if s is None else f"{100 * s:.0f}" for s in row.get("acceptance_by_position", ()))
            cells = [name, number(row["accepted_length"]), shares, number(row["draft_share"], ".0%")]
            drafting.add_row(*cells, *((text,) if temperature == 0 else ()))

        speed = _table(
            f"{draft}, {mode}: speed (in brackets: per-prompt median)",
            *("plain\ntokens/s", "draft\ntokens/s", "decode\nspeed-up", "whole call\nspeed-up"),
            "speed-up /\naccepted",
        )
        for name, row in rows:
            speeds = (number(row[key], ".1f") for key in ("plain_tokens_per_second", "draft_tokens_per_second"))
            ratios = (
                f"{number(row[key])} ({number(row['median_' + key])})"
                for key in ("decode_speedup", "end_to_end_speedup")
            )
            speed.add_row(name, *speeds, *ratios, number(row["efficiency"]))
        found += [drafting, speed]
    return found


def _table(title: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("set")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _same_text(result: SetResult) -> str:
    if result.identical is None:
        return ""
    text = f"{result.identical}/{result.identical + result.ties + result.different}"
    for count, label in ((result.ties, "tie" if result.ties == 1 else "ties"), (result.different, "DIFFERENT")):
        if count:
            text += f", {count} {label}"
    return text


def divergence_lines(evaluation: Evaluation) -> list[str]:
    """A line for every greedy text that leaves the plain one."""
    return [
        f"{name}, {result.prompt_set} prompt {result.index}: {divergence}"
        for result in evaluation.prompt_results
        for name, divergence in result.divergences.items()
    ]
