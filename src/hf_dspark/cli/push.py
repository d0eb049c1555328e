"""`hf-dspark push`: a draft model's folder to the Hub, with a card made from facts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .loading import progress_line, quiet_libraries, refuse_missing_folder

if TYPE_CHECKING:
    from rich.console import Console

    from ..hub import Publication

HELP = "push a draft model to the Hub, with a model card (--dry-run shows both and touches no network)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("draft", metavar="DRAFT", help="folder of the draft model, as hf-dspark train leaves it")
    parser.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME on the Hub; it is made where there is none")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="push to this branch; default: main")
    parser.add_argument(
        "--license", metavar="NAME", help="the draft's, such as apache-2.0; default: that of the target's card"
    )
    parser.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="the target on the Hub; default: the one that the draft's config names",
    )
    parser.add_argument(
        "--eval",
        nargs="+",
        metavar="FILE",
        help="results of hf-dspark eval --json and hf-dspark calibrate --json for the card; default: those in DRAFT",
    )
    parser.add_argument("--dry-run", action="store_true", help="show files, metadata and card; push nothing")


def run(args: argparse.Namespace) -> int:
    """Runs it; 0, or an error."""
    quiet_libraries()
    from huggingface_hub.utils import enable_progress_bars
    from rich.console import Console

    from ..errors import DSparkHubError
    from ..hub import prepare, push_folder
    from ..hub_errors import explained

    refuse_missing_folder(args.draft)
    console = Console()
    options = {"license": args.license, "base_model": args.base_model, "evaluations": args.eval}
    if args.dry_run:
        from huggingface_hub.utils import validate_repo_id

        with explained(DSparkHubError, args.repo_id, writing=True):
            validate_repo_id(args.repo_id)
        publication = prepare(args.draft, args.repo_id, offline=True, **options)
        show(console, publication)
        console.rule("README.md", style="dim")
        console.print(publication.card, markup=False, highlight=False, soft_wrap=True)
        console.rule(style="dim")
        console.print(
            f"Nothing was pushed. Whether {args.repo_id} exists, and has a card of its own, was not looked at.",
            highlight=False,
            soft_wrap=True,
        )
        return 0
    with progress_line() as report:
        report(f"Pushing to {args.repo_id}")
        enable_progress_bars()  # the Hub client's own, with rates, for the files
        publication, info = push_folder(
            args.draft, args.repo_id, private=args.private, revision=args.revision, **options
        )
    show(console, publication)
    console.print(f"Pushed: {info.commit_url}", highlight=False, soft_wrap=True)
    return 0


def show(console: Console, publication: Publication) -> None:
    """Prints the files with their sizes, what is left out, and the notes."""
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("file")
    table.add_column("size", justify="right")
    for name, what in sorted(publication.files.items()):
        table.add_row(name, decimal(what.stat().st_size if isinstance(what, Path) else len(what)))
    console.print(table)
    lines = list(publication.notes)
    if publication.left_out:
        lines.insert(0, f"Left out: {', '.join(publication.left_out)}.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
