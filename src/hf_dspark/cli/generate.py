"""`hf-dspark generate`: one prompt, plain and with a draft model, for any pair."""

from __future__ import annotations

import argparse

from .pair import add_pair_arguments, run_pair

HELP = "generate for a prompt, plain and with a draft model, and compare the two"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, the draft, and the options shared with `demo`."""
    parser.add_argument("prompt", help="the user's turn (with --no-chat-template: the text to continue)")
    parser.add_argument("--draft", required=True, metavar="DRAFT", help="folder or Hub id of the draft model")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    return run_pair(args.prompt, args.draft, args)
