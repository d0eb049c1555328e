"""`hf-dspark eval`: draft models against plain `generate` on prompt files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loading import (
    add_model_arguments,
    display_names,
    load_draft,
    load_target,
    positive,
    progress_line,
    quiet_libraries,
    target_name,
    temperature,
)
from .results import describe_data, describe_machine, refuse_doubles, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.harness import EvaluationSettings
    from ..evaluation.prompts import PromptSet
    from ..modeling_dspark import DSparkDraftModel

HELP = "measure draft models against plain generate on prompt files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_model_arguments(parser)
    parser.add_argument(
        "--draft",
        required=True,
        action="append",
        metavar="DRAFT",
        help="folder or Hub id; repeat it to compare several",
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help='JSONL prompts: {"turns": [...]} (the first), {"prompt": ...} or {"messages": [...]}',
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N prompts of each file; default: all")
    parser.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0], metavar="T", help="default: 0 (greedy)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="when sampling; default: 0 (off)")
    parser.add_argument("--top-p", type=float, default=1.0, help="when sampling; default: 1 (off)")
    parser.add_argument("--seed", type=int, default=0, help="when sampling; default: 0")
    parser.add_argument(
        "--full-blocks",
        action="store_true",
        help="verify every block in full and never pause (draft.scheduler = None); default: as generate does",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write every number there; an interrupted evaluation leaves FILE.partial.jsonl and goes on from it",
    )
    parser.add_argument("--plots", metavar="DIR", help="write pictures there")


def run(args: argparse.Namespace) -> int:
    """Runs it; 1 when a text differs for no good reason or a draft never proposed anything, else 0."""
    quiet_libraries()
    from rich.console import Console

    from ..evaluation.harness import EvaluationSettings, evaluate
    from ..evaluation.partial import PartialResults
    from ..evaluation.prompts import load_prompts
    from .eval_view import EvaluationProgress, divergence_lines, tables

    if args.plots is not None:
        from ..evaluation.plots import write_plots  # a missing matplotlib is told now, not in an hour
    names = display_names(args.draft)
    refuse_doubles("--draft", args.draft, names)
    refuse_doubles("--data", args.data, [Path(path).stem for path in args.data])
    prompt_sets = [load_prompts(path, args.limit) for path in args.data]
    settings = EvaluationSettings(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(dict.fromkeys(args.temperature)),
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    if args.json is not None:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    with progress_line() as report:
        name, revision = target_name(args, args.draft[0])
        target, tokenizer = load_target(name, args, report, revision)
        drafts = {label: load_draft(path, target, args) for label, path in zip(names, args.draft)}
        for draft in drafts.values():
            draft.scheduler = None if args.full_blocks else "auto"
        description = _describe(args, name, settings, target, drafts, prompt_sets)
    log = Console(stderr=True)
    partial = PartialResults(f"{args.json}.partial.jsonl", description) if args.json is not None else None
    if partial:
        log.print(f"Going on from {partial.path}: {len(partial)} prompts are done.", style="dim")
    total = len(settings.temperatures) * sum(len(prompts.conversations) for prompts in prompt_sets)
    try:
        with EvaluationProgress(log, total) as progress:
            evaluation = evaluate(target, tokenizer, drafts, prompt_sets, settings, partial, progress.advance)
    except KeyboardInterrupt:
        if partial is not None:
            log.print(f"Interrupted. {len(partial)} prompts are kept; the same command goes on from them.")
        raise
    console = Console()
    for table in tables(evaluation):
        console.print(table)
    for line in divergence_lines(evaluation):
        console.print(line, markup=False, highlight=False)
    if args.json is not None:
        write_json(args.json, {"settings": description, **evaluation.to_dict()})
        if partial is not None:
            partial.remove()
    if args.plots is not None:
        write_plots(evaluation, args.plots)
    for sentence in evaluation.failures:
        console.print(f"FAILED: {sentence}", style="bold red", markup=False, highlight=False)
    return 1 if evaluation.failures else 0


def _describe(
    args: argparse.Namespace,
    name: str,
    settings: EvaluationSettings,
    target: PreTrainedModel,
    drafts: dict[str, DSparkDraftModel],
    prompt_sets: list[PromptSet],
) -> dict[str, Any]:
    """Everything that the numbers depend on; also decides whether partial results may be gone on from."""
    from dataclasses import asdict

    from ..evaluation.partial import fingerprint

    return {
        "target": name,
        "target_fingerprint": fingerprint(target),
        "drafts": {
            label: {"path": path, "fingerprint": fingerprint(draft)}
            for path, (label, draft) in zip(args.draft, drafts.items())
        },
        "data": describe_data(args.data, prompt_sets),
        "full_blocks": args.full_blocks,
        **asdict(settings),
        **describe_machine(target),
    }
