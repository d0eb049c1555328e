"""Shows two runs of a prompt side by side while they are made, then a table of what they took."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.runs import PLAIN, Run, decode_speedup, end_to_end_speedup, ratio

if TYPE_CHECKING:
    from .pair import PairResult

_TITLES = {PLAIN: "plain generate", "dspark": "with DSpark"}
_OWN, _DRAFT = "", "bold green"
_STACKED_BELOW = 70  # columns; two panels side by side would be too narrow to read
_FRAMES_PER_SECOND = 8  # drawing takes time from the run it shows, from both alike


class TokenPieces:
    """Splits a growing sequence of ids into the text that each id adds.

    A character's bytes may be spread over several ids: then the last of them brings it, and the others are empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.pieces: list[str] = []
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Ids are decoded together with a few before them, since many decoders treat the first id of a text apart.
        self._context_start = self._done = 0

    def append(self, token: int) -> None:
        """Adds one id."""
        self._ids.append(token)
        before, text = self._decode(self._done), self._decode(len(self._ids))
        if text.endswith("\ufffd"):
            self.pieces.append("")
            return
        self.pieces.append(text[len(before) :])
        self._context_start, self._done = self._done, len(self._ids)

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(  # type: ignore[return-value]  # a str for a flat list of ids
            self._ids[self._context_start : end], skip_special_tokens=True
        )


class _Pane:
    """One run: its ids as they come, and which of them are accepted draft tokens."""

    def __init__(self, title: str, tokenizer: PreTrainedTokenizerBase):
        self.title = title
        self.ids: list[int] = []
        self.forwards: list[int] = []  # the target's forward count when each id came
        self.run: Run | None = None
        self._pieces = TokenPieces(tokenizer)

    def text(self) -> Text:
        for token in self.ids[len(self._pieces.pieces) :]:
            self._pieces.append(token)
        pieces = self._pieces.pieces
        flags = self.run.from_draft() if self.run is not None else self._flags_so_far(len(pieces))
        text = Text()
        for piece, drafted in zip(pieces, flags):
            text.append(piece, style=_DRAFT if drafted else _OWN)
        return text

    def _flags_so_far(self, count: int) -> list[bool]:
        # Ids that came without another target forward in between belong to one round, and the last of them is the
        # target's own. The exact account, `last_stats`, exists only after the call.
        rounds = self.forwards[: count + 1]
        return [a == b for a, b in itertools.pairwise(rounds)] + [False]


class PairView:
    """A context manager: `start` and `finish` each run inside it, `print_result` after it.

    On a terminal the two texts grow in two panels; elsewhere they are printed whole, one after the other.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompt: str):
        self.console = console
        self._panes = {name: _Pane(title, tokenizer) for name, title in _TITLES.items()}
        self._forwards = 0
        self._live = Live(
            get_renderable=lambda: self.panels(self.console.height - 2),
            console=console,
            refresh_per_second=_FRAMES_PER_SECOND,
            transient=True,
        )
        self._hook = target.register_forward_pre_hook(self._count_forward)
        self.console.print(Text.assemble(("Prompt: ", "bold"), prompt))

    def __enter__(self) -> PairView:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        self._hook.remove()

    def _count_forward(self, *_: object) -> None:
        self._forwards += 1

    def start(self, name: str) -> Callable[[list[int]], None]:
        """Returns what to call with new ids of the run; it only keeps them, the drawing is done elsewhere."""
        pane = self._panes[name]

        def on_tokens(ids: list[int]) -> None:
            pane.forwards += [self._forwards] * len(ids)
            pane.ids += ids

        return on_tokens

    def finish(self, run: Run) -> None:
        """The run has ended; its own account of draft tokens replaces the one read off the stream."""
        self._panes[run.name].run = run

    def panels(self, height: int | None = None) -> RenderableType:
        """Both texts; with `height`, only as many of their last lines as fit."""
        stacked = self.console.width < _STACKED_BELOW
        width = self.console.width if stacked else self.console.width // 2
        lines = None if height is None else max(1, height // (2 if stacked else 1) - 2)
        panels = [self._panel(pane, width, lines) for pane in self._panes.values()]
        if stacked:
            return Group(*panels)
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        return grid

    def _panel(self, pane: _Pane, width: int, lines: int | None) -> Panel:
        text = pane.text()
        if lines is not None:
            text = Text("\n").join(text.wrap(self.console, width - 4)[-lines:])
        speed = pane.run.tokens_per_second if pane.run is not None else None
        subtitle = None if speed is None else f"{speed:.1f} tokens/s"
        return Panel(text, title=pane.title, subtitle=subtitle, border_style="dim")

    def print_result(self, result: PairResult) -> None:
        """Both whole texts, the table, and whether the texts are the same."""
        if self.console.is_terminal:
            self.console.print(self.panels())
            self.console.print(Text.assemble("Text in ", ("this colour", _DRAFT), " came from accepted draft tokens."))
        else:
            for pane in self._panes.values():
                self.console.print(f"\n--- {pane.title} ---", markup=False)
                self.console.print(pane.text(), soft_wrap=True)
        self.console.print(result_table(result))
        good = result.status == 0
        self.console.print(Text(result.verdict, style="green" if good else "bold red"))
        if result.nothing_proposed:
            self.console.print(Text("The draft model proposed nothing.", style="bold red"))
        if result.stats.failure is not None:
            self.console.print(Text(f"Drafting failed: {result.stats.failure}", style="bold red"))


def result_table(result: PairResult) -> Table:
    """Speeds of both runs and what the draft model did."""
    plain, draft, stats = result.plain, result.draft, result.stats
    table = Table(box=box.SIMPLE, title="Decode speed excludes the first token (prefill)", title_style="dim italic")
    table.add_column("")
    table.add_column(_TITLES[PLAIN], justify="right")
    table.add_column(_TITLES["dspark"], justify="right")
    table.add_row("new tokens", str(len(plain.tokens)), str(len(draft.tokens)))
    table.add_row("time to first token", *(f"{run.first_token_seconds:.3f} s" for run in (plain, draft)))
    table.add_row("tokens/s, decode", *(number(run.tokens_per_second, ".1f") for run in (plain, draft)))
    table.add_row("tokens/s, whole call", *(f"{len(run.tokens) / run.total_seconds:.1f}" for run in (plain, draft)))
    table.add_row("speed-up, decode", "1.00 x", number(decode_speedup(plain, draft), ".2f", " x"))
    table.add_row("speed-up, whole call", "1.00 x", number(end_to_end_speedup(plain, draft), ".2f", " x"))
    table.add_row("accepted length", "1.00", f"{stats.accepted_length:.2f}")
    shares = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"
    table.add_row("acceptance by position", "", shares)
    table.add_row("draft time / target's", "", number(ratio(stats.draft_seconds, stats.verify_seconds), ".0%"))
    return table


def number(value: float | None, spec: str = ".2f", unit: str = "") -> str:
    """A number as text; "-" where there is none."""
    return "-" if value is None else f"{value:{spec}}{unit}"
