"""`hf-dspark demo`: the shipped draft model on the weights it was trained for."""

from __future__ import annotations

import argparse

from .pair import add_pair_arguments, run_pair

HELP = "watch a small real model generate plain and with the shipped draft model, side by side"

_PROMPT = "Explain in a few sentences why the sky is blue."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, another draft, and the options shared with `generate`."""
    parser.add_argument("prompt", nargs="?", default=_PROMPT, help=f"default: {_PROMPT!r}")
    parser.add_argument("--draft", metavar="DRAFT", help="folder or Hub id; default: the one shipped with hf-dspark")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    from ..demo_weights import shipped_draft

    return run_pair(args.prompt, args.draft or shipped_draft(), args)
