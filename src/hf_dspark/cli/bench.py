"""`hf-dspark bench`: throughput of many requests at once, with and without the draft model."""

from __future__ import annotations

import argparse
from pathlib import Path

from .loading import (
    add_model_arguments,
    load_draft,
    load_target,
    positive,
    progress_line,
    quiet_libraries,
    target_name,
    temperature,
)
from .results import describe_data, describe_machine, refuse_doubles, write_json

HELP = "measure the throughput of many requests at once: batches, continuous batching, and batches with the draft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--draft", required=True, metavar="DRAFT", help="folder or Hub id")
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help='JSONL prompts: {"turns": [...]} (the first), {"prompt": ...} or {"messages": [...]}; taken in turn',
    )
    parser.add_argument(
        "--concurrency", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8"
    )
    parser.add_argument("--requests", type=positive, default=64, metavar="N", help="prompts in all; default: 64")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="default: 0 (greedy)")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[], metavar="N", help="fixed block lengths to measure besides"
    )
    parser.add_argument(
        "--no-continuous", action="store_true", help="leave out transformers' continuous batching (slow on a CPU)"
    )
    parser.add_argument("--seed", type=int, default=0, help="when sampling; default: 0")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write every number there; an interrupted run leaves FILE.partial.jsonl and goes on from it",
    )
    parser.add_argument("--plots", metavar="DIR", help="write pictures there")


def run(args: argparse.Namespace) -> int:
    """Runs it; always 0: what is slow is a result."""
    quiet_libraries()
    from dataclasses import asdict

    from rich.console import Console

    from ..errors import DSparkDataError
    from ..evaluation.concurrency import CONTINUOUS, Chunk, measure, modes, summarize
    from ..evaluation.partial import PartialResults, fingerprint
    from ..evaluation.prompts import load_prompts
    from .bench_view import table
    from .eval_view import EvaluationProgress

    if args.plots is not None:
        from ..evaluation.concurrency_plots import write_plots
    refuse_doubles("--data", args.data, [Path(path).stem for path in args.data])
    prompt_sets = [load_prompts(path) for path in args.data]
    # One of each set in turn, so that every group is a mixture.
    longest = max(len(prompts.conversations) for prompts in prompt_sets)
    conversations = [
        prompts.conversations[i] for i in range(longest) for prompts in prompt_sets if i < len(prompts.conversations)
    ][: args.requests]
    if len(conversations) < args.requests:
        raise DSparkDataError(
            f"--requests is {args.requests}, but the files hold {len(conversations)} prompts; ask for fewer, or give "
            "more files."
        )
    concurrencies = sorted(set(args.concurrency))
    if concurrencies[-1] > len(conversations):
        raise DSparkDataError(
            f"--concurrency {concurrencies[-1]} needs as many prompts, but --requests is {len(conversations)}."
        )
    if args.json is not None:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    with progress_line() as report:
        name, revision = target_name(args, args.draft)
        target, tokenizer = load_target(name, args, report, revision)
        draft = load_draft(args.draft, target, args)
        draft.bind_target(target)
        measured = modes(sorted(set(args.lengths)), not args.no_continuous)
        description = {
            "target": name,
            "target_fingerprint": fingerprint(target),
            "draft": {"path": args.draft, "fingerprint": fingerprint(draft)},
            "data": describe_data(args.data, prompt_sets),
            "modes": measured,
            "concurrency": concurrencies,
            "requests": args.requests,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            **describe_machine(target),
        }
    log = Console(stderr=True)
    partial = PartialResults(f"{args.json}.partial.jsonl", description) if args.json is not None else None
    if partial:
        log.print(f"Going on from {partial.path}: {len(partial)} groups are done.", style="dim")
    total = len(measured) * sum(-(-len(conversations) // c) for c in concurrencies)
    with EvaluationProgress(log, total, "groups") as progress:

        def on_chunk(chunk: Chunk) -> None:
            progress.step(f"{chunk.mode}, concurrency {chunk.concurrency}", chunk.tokens)

        chunks = measure(
            target,
            tokenizer,
            draft,
            conversations,
            concurrencies,
            measured,
            args.max_new_tokens,
            args.temperature,
            args.seed,
            partial,
            on_chunk,
        )
    results = summarize(chunks)
    console = Console()
    console.print(table(results))
    if CONTINUOUS in measured:
        console.print("continuous: transformers' continuous batching, without and with the draft.", style="dim")
    if args.json is not None:
        write_json(
            args.json,
            {
                "settings": description,
                "results": [asdict(result) for result in results],
                "groups": [asdict(chunk) for chunk in chunks],
            },
        )
        if partial is not None:
            partial.remove()
    if args.plots is not None:
        write_plots(results, args.plots)
    return 0
