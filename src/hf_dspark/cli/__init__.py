"""The `hf-dspark` command.

One module per verb. A verb module has:

* `HELP: str` — one line for `hf-dspark --help`;
* `add_arguments(parser)` and `run(args: argparse.Namespace) -> int` (the exit status); or, when it parses its own
  command line (`train`, whose options are the fields of its dataclasses), `PASS_ARGV = True` and
  `run(argv: list[str]) -> int`, called with everything after the verb, `--help` included.

Its heavy imports stand inside `run`, so that `--help` and a mistyped option answer at once.

Exit statuses: 0, 1 (ran, but the result is not what it should be: a text that differs), 2 (bad input: one line on
stderr, no traceback), 130 (interrupted).
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

VERBS = ("demo", "generate", "eval", "bench", "data", "train", "profile", "calibrate", "push")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; argparse prints the usage as well."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status, except where argparse exits by itself (`--help`, a mistyped option)."""
    argv = sys.argv[1:] if argv is None else argv
    # Where it is installed, the trainer imports it, and it says what it would be faster with, beside our one line.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        named = argv[0] if argv and argv[0] in VERBS else None
        if named is not None and _pass_argv(module := _verb(named)):
            return module.run(argv[1:])
        # The other verbs' modules are only needed to list them.
        args = _parser(VERBS if named is None else (named,)).parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not isinstance(error, _user_mistakes()):
            raise
        print(f"hf-dspark: error: {one_line(error)}", file=sys.stderr)
        return 2


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _parser(verb_names: tuple[str, ...]) -> argparse.ArgumentParser:
    from .. import __version__

    parser = _Parser(prog="hf-dspark", description="DSpark speculative decoding for transformers.")
    parser.add_argument("--version", action="version", version=f"hf-dspark {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in verb_names:
        module = _verb(name)
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        if not _pass_argv(module):
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    return parser


def _verb(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def _pass_argv(module: ModuleType) -> bool:
    return vars(module).get("PASS_ARGV", False)


def _user_mistakes() -> tuple[Any, ...]:
    """What counts as bad input. Missing files and an unreachable network are `OSError`s in transformers and the Hub
    client alike; anything else is a fault of ours, and its traceback is shown."""
    import yaml

    from ..errors import DSparkError

    return (DSparkError, OSError, yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError)
