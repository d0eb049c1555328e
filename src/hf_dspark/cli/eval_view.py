"""What `hf-dspark eval` shows: progress while it runs, then tables."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..evaluation.harness import Evaluation, PromptResult

_SECONDS_BETWEEN_LINES = 30


class EvaluationProgress:
    """A progress bar with the rate in tokens per second; where stderr is no terminal, a line now and then."""

    def __init__(self, console: Console, total: int):
        """`total`: prompts, over all sets and temperatures."""
        self._console, self._total = console, total
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
        self._task = self._bar.add_task("prompts", total=total, rate="")

    def __enter__(self) -> EvaluationProgress:
        self._start = self._told = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, result: PromptResult) -> None:
        """A prompt is done."""
        self._done += 1
        self._tokens += sum(len(run.tokens) for run in result.runs)
        now = time.monotonic()
        rate = f"{self._tokens / max(now - self._start, 1e-9):.1f} tokens/s"
        label = f"{result.prompt_set}, temperature {result.temperature:g}"
        self._bar.update(self._task, completed=self._done, description=label, rate=rate)
        due = now - self._told > _SECONDS_BETWEEN_LINES or self._done == self._total
        if due and not self._console.is_terminal:
            self._told = now
            self._console.print(f"{self._done}/{self._total} prompts, {rate} ({label})", highlight=False)


def tables(evaluation: Evaluation) -> list[Table]:
    """One table per temperature: a row per prompt set and draft model, then the means over the sets."""
    found = []
    averages = evaluation.averages()
    for temperature in dict.fromkeys(result.temperature for result in evaluation.set_results):
        results = [result for result in evaluation.set_results if result.temperature == temperature]
        table = Table(box=box.SIMPLE_HEAD, title="Greedy" if temperature == 0 else f"Temperature {temperature:g}")
        table.add_column("set")
        table.add_column("draft", overflow="fold")
        for heading in (
            *("accepted\nlength", "acceptance\nby position", "plain\ntokens/s", "draft\ntokens/s", "speed-up\ndecode"),
            *("speed-up\nwhole call", "effi-\nciency", "draft /\nforward"),
        ):
            table.add_column(heading, justify="right")
        if temperature == 0:
            table.add_column("same\ntext", justify="right")
        for i, result in enumerate(results):
            last_of_set = i + 1 == len(results) or results[i + 1].prompt_set != result.prompt_set
            s = result.summary
            same = [] if result.identical is None else [_same_text(result.identical, result.ties, result.different)]
            shares = " ".join("-" if share is None else f"{share:.2f}" for share in s.acceptance_by_position)
            table.add_row(
                result.prompt_set,
                result.draft,
                _number(s.accepted_length),
                shares,
                *_speeds(vars(s)),
                *same,
                end_section=last_of_set,
            )
        for row in averages:
            if row["temperature"] == temperature and len({result.prompt_set for result in results}) > 1:
                table.add_row("mean", row["draft"], _number(row["accepted_length"]), "", *_speeds(row), style="bold")
        found.append(table)
    return found


def _speeds(row: dict[str, Any]) -> list[str]:
    def with_median(name: str) -> str:
        return f"{_number(row[name])} ({_number(row['median_' + name])})"

    return [
        *(_number(row[name], ".1f") for name in ("plain_tokens_per_second", "draft_tokens_per_second")),
        *(with_median("decode_speedup"), with_median("end_to_end_speedup"), _number(row["efficiency"])),
        _number(row["draft_share"], ".0%"),
    ]


def _same_text(identical: int, ties: int, different: int) -> str:
    text = f"{identical}/{identical + ties + different}"
    for count, label in ((ties, "tie" if ties == 1 else "ties"), (different, "DIFFERENT")):
        if count:
            text += f", {count} {label}"
    return text


def _number(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else f"{value:{spec}}"


def divergence_lines(evaluation: Evaluation) -> list[str]:
    """A line for every greedy text that leaves the plain one."""
    return [
        f"{name}, {result.prompt_set} prompt {result.index}: {divergence}"
        for result in evaluation.prompt_results
        for name, divergence in result.divergences.items()
    ]
