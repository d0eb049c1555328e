"""What `hf-dspark bench` shows: one table over concurrencies and modes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from ..evaluation.concurrency import ModeResult


def table(results: Sequence[ModeResult]) -> Table:
    """A line per concurrency and mode: tokens per second of all requests and of one, drafts verified per request and
    round, accepted length; the best speed of each concurrency is bold."""
    shown = Table(box=box.SIMPLE_HEAD, title="Requests at once", caption="accepted: length per request and round")
    for name, justify in (
        ("at once", "right"),
        ("mode", "left"),
        ("tokens/s", "right"),
        ("× plain", "right"),
        ("per request", "right"),
        ("verified", "right"),
        ("accepted", "right"),
    ):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    best = {c: max(r.speed for r in results if r.concurrency == c) for c in {r.concurrency for r in results}}
    previous = None
    for result in results:
        if previous not in (None, result.concurrency):
            shown.add_section()
        shown.add_row(
            str(result.concurrency) if previous != result.concurrency else "",
            result.mode,
            f"{result.tokens_per_second:.1f}",
            f"{result.speed:.2f}",
            f"{result.request_speed:.1f}",
            f"{result.verified:.2f}",
            f"{result.accepted_length:.2f}",
            style="bold" if result.speed == best[result.concurrency] else None,
        )
        previous = result.concurrency
    return shown
