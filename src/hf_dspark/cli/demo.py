"""`hf-dspark demo`: the shipped draft model on the weights it was trained for."""

from __future__ import annotations

import argparse

from .pair import add_pair_arguments, run_pair

HELP = "watch a small real model generate plain and with the shipped draft model, side by side"

# A word problem: neither the text that the shipped draft knows best nor the one it knows least (README, "Measured").
_PROMPT = (
    "Lisa has 12 apples and buys 3 bags of 8 apples each. She gives 10 apples to her brother. "
    "How many apples does she have now?"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, another draft, and the options shared with `generate`."""
    parser.add_argument("prompt", nargs="?", default=_PROMPT, help=f"default: {_PROMPT!r}")
    parser.add_argument("--draft", metavar="DRAFT", help="folder or Hub id; default: the one shipped with hf-dspark")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    from ..demo_weights import shipped_draft

    return run_pair(args.prompt, args.draft or shipped_draft(), args)
