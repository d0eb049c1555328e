"""`hf-dspark calibrate`: temperatures for a draft model's confidence head, and the diagnostic sweep of thresholds."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.blocks import CollectionSettings, Prompt, PromptBlocks
    from ..evaluation.calibration import Calibration
    from ..evaluation.prompts import PromptSet
    from ..modeling_dspark import DSparkDraftModel

HELP = "calibrate a draft model's confidences on prompts and write the temperatures into its folder"

ENOUGH_HELD_OUT = 8000  # full blocks; with fewer, chance alone can show an ECE of 1 %


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--draft", required=True, metavar="DRAFT", help="folder; a Hub id with --dry-run or --sweep")
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help='JSONL prompts: {"turns": [...]} (the first), {"prompt": ...} or {"messages": [...]}',
    )
    parser.add_argument(
        "--held-out", nargs="+", metavar="FILE", help="prompts to measure on; default: a share of those of --data"
    )
    parser.add_argument(
        "--held-out-share",
        type=float,
        metavar="X",
        help="that share, of the prompts of each file; default: 0.5",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="default: 256")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N prompts of each file; default: all")
    parser.add_argument(
        "--blocks",
        type=positive,
        metavar="N",
        help="stop at N full blocks to fit on and N held out, per temperature; default: use every prompt",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        nargs="+",
        metavar="T",
        help="0 (greedy), one above 0, or both; default: 0 1 (with --sweep: 0)",
    )
    parser.add_argument("--no-shift", action="store_true", help="fit temperatures alone, as the paper does")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of sampling; default: 0")
    parser.add_argument("--dry-run", action="store_true", help="measure, but leave the draft's folder as it is")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write every number there; the collected blocks stay in FILE.blocks.jsonl, and the same command goes on "
        "from them",
    )
    parser.add_argument("--plots", metavar="DIR", help="write pictures there")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: acceptance rate and tokens per round for static confidence thresholds 0 to 0.9",
    )


def run(args: argparse.Namespace) -> int:
    """Runs it; 1 when drafting failed somewhere or calibration made things worse, else 0."""
    quiet_libraries()
    from rich.console import Console

    from ..evaluation import calibration as _needs_torchmetrics  # noqa: F401  a missing extra is told now
    from ..evaluation.prompts import load_prompts

    if args.plots is not None:
        from ..evaluation import calibration_plots as _needs_matplotlib  # noqa: F401
    _refuse_contradictions(args)
    files = [*args.data, *(args.held_out or ())]
    refuse_doubles("--data and --held-out" if args.held_out else "--data", files, [Path(path).stem for path in files])
    prompt_sets = [load_prompts(path, args.limit) for path in files]
    if args.json is not None:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    log, console = Console(stderr=True), Console()
    return (_sweep if args.sweep else _calibrate)(args, files, prompt_sets, log, console)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    from ..errors import DSparkConfigError

    fitting = {"--held-out": args.held_out, "--held-out-share": args.held_out_share, "--blocks": args.blocks}
    for option, value in fitting.items():
        if args.sweep and value is not None:
            raise DSparkConfigError(f"{option} has no meaning with --sweep, which fits nothing; leave it out.")
    if args.held_out is not None and args.held_out_share is not None:
        raise DSparkConfigError("--held-out and --held-out-share are two ways to hold prompts out; give one of them.")


def _load(
    args: argparse.Namespace,
) -> tuple[str, str | None, PreTrainedModel, PreTrainedTokenizerBase, DSparkDraftModel]:
    """The target's name and revision, the target, its tokenizer and the draft."""
    with progress_line() as report:
        name, revision = target_name(args, args.draft)
        target, tokenizer = load_target(name, args, report, revision)
        draft = load_draft(args.draft, target, args)
    return name, revision, target, tokenizer, draft


# --------------------------------------------------------------------------------------------------------------------
# Calibration
# --------------------------------------------------------------------------------------------------------------------
def _calibrate(
    args: argparse.Namespace, files: list[str], prompt_sets: list[PromptSet], log: Console, console: Console
) -> int:
    from ..configuration_dspark import DECODING_MODES
    from ..evaluation.blocks import CollectionSettings, stack
    from ..evaluation.calibration import calibrate_blocks
    from ..evaluation.partial import fingerprint
    from .calibrate_view import calibration_tables

    settings = CollectionSettings(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(dict.fromkeys(args.temperature or (0.0, 1.0))),
        seed=args.seed,
        blocks=args.blocks,
    )
    config_file = None if args.dry_run else _writable_config(args.draft)
    sides = _split(args, prompt_sets)
    name, revision, target, tokenizer, draft = _load(args)
    texts = {
        "target_fingerprint": fingerprint(target),
        "draft_fingerprint": fingerprint(draft),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
    }
    results = _collect(args, log, target, tokenizer, draft, sides, settings, texts)

    calibrations, records = {}, {}
    for t in settings.temperatures:
        mode = DECODING_MODES[t > 0]
        by_side = {side: [r for r in results if (r.temperature, r.side) == (t, side)] for side in sides}
        fit, held_out = (stack(part, draft.config.num_draft_tokens) for part in by_side.values())
        calibrations[mode] = calibrate_blocks(mode, fit, held_out, shift=not args.no_shift)
        records[mode] = {
            "temperature": t,
            **_record(calibrations[mode], *by_side.values()),
            "data": [os.path.basename(path) for path in args.data],
            "held_out_data": [os.path.basename(path) for path in args.held_out or args.data],
            "target": name,
            "target_revision": revision,
            "dtype": texts["dtype"],
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "date": datetime.date.today().isoformat(),
        }
    for calibration in calibrations.values():
        for table in calibration_tables(calibration):
            console.print(table)
        if calibration.held_out_blocks < ENOUGH_HELD_OUT:
            console.print(
                f"{calibration.held_out_blocks} held-out blocks are few: below {ENOUGH_HELD_OUT}, chance alone can "
                "show an ECE of 1 %.",
                highlight=False,
            )
    if args.json is not None:
        description = {
            "target": name,
            "draft": args.draft,
            "data": describe_data(files, prompt_sets),
            "prompts": {side: len(prompts) for side, prompts in sides.items()},
            **vars(settings),
            **texts,
            **describe_machine(target),
        }
        modes = {mode: {**records[mode], **calibration.to_dict()} for mode, calibration in calibrations.items()}
        write_json(args.json, {"settings": description, "modes": modes})
    if args.plots is not None:
        from ..evaluation.calibration_plots import write_reliability

        write_reliability(list(calibrations.values()), args.plots)
    good = {mode: calibration for mode, calibration in calibrations.items() if not calibration.is_worse}
    if config_file is not None and good:
        write_calibrations(config_file, good, {mode: records[mode] for mode in good})
        console.print(f"Written into {config_file}: {', '.join(good)}.", highlight=False, soft_wrap=True)
    failures = [
        f"{result.prompt_set} prompt {result.index}: drafting failed ({result.failure})."
        for result in results
        if result.failure is not None
    ]
    failures += [
        f"{mode}: these temperatures raise the mean ECE on the held-out blocks by more than chance; not written."
        for mode in calibrations
        if mode not in good
    ]
    return _report(failures, console)


def _report(failures: list[str], console: Console) -> int:
    for sentence in failures:
        console.print(f"FAILED: {sentence}", style="bold red", markup=False, highlight=False)
    return 1 if failures else 0


def _split(args: argparse.Namespace, prompt_sets: list[PromptSet]) -> dict[str, list[Prompt]]:
    """Prompts to fit on and prompts to measure on."""
    from ..evaluation.blocks import FIT, HELD_OUT, all_prompts, refuse_shared_prompts, split_prompts

    if args.held_out is not None:
        count = len(args.data)
        fit, held_out = all_prompts(prompt_sets[:count]), all_prompts(prompt_sets[count:])
        refuse_shared_prompts(fit, held_out)
    else:
        fit, held_out = split_prompts(
            prompt_sets, 0.5 if args.held_out_share is None else args.held_out_share, args.seed
        )
    return {FIT: fit, HELD_OUT: held_out}


def _collect(
    args: argparse.Namespace,
    log: Console,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    sides: dict[str, list[Prompt]],
    settings: CollectionSettings,
    texts: dict[str, Any],
) -> list[PromptBlocks]:
    """The blocks of all prompts; `texts` is what they depend on, so what kept ones must agree in."""
    from ..evaluation.blocks import collect
    from ..evaluation.partial import PartialResults
    from .calibrate_view import CallProgress

    partial = PartialResults(f"{args.json}.blocks.jsonl", texts) if args.json is not None else None
    if partial:
        log.print(f"{partial.path} has the blocks of {len(partial)} calls.", style="dim")
    total = len(settings.temperatures) * sum(len(prompts) for prompts in sides.values())
    try:
        with CallProgress(log, total) as progress:

            def advance(result: PromptBlocks) -> None:
                what = f"{result.prompt_set}, temperature {result.temperature:g}, {result.side}"
                progress.advance(what, result.new_tokens, result.full(draft.config.num_draft_tokens))

            return collect(target, tokenizer, draft, sides, settings, partial, advance)
    except KeyboardInterrupt:
        if partial is not None:
            log.print(f"Interrupted. The blocks of {len(partial)} calls are kept; the same command goes on from them.")
        raise


def _record(calibration: Calibration, fit: list[PromptBlocks], held_out: list[PromptBlocks]) -> dict[str, Any]:
    """Counts and errors of a mode, as they go into config.json."""
    return {
        "blocks": calibration.fit_blocks,
        "dropped": calibration.fit_dropped,
        "prompts": len(fit),
        "held_out_blocks": calibration.held_out_blocks,
        "held_out_dropped": calibration.held_out_dropped,
        "held_out_prompts": len(held_out),
        "ece_before": [round(p.before.ece, 5) for p in calibration.positions],
        "ece_after": [round(p.after.ece, 5) for p in calibration.positions],
    }


def _writable_config(draft: str) -> Path:
    """The config.json that temperatures go into; refused now rather than in an hour.

    Raises:
        DSparkCheckpointError: `draft` is no folder that this package has written, or cannot be written to.
    """
    from ..errors import DSparkCheckpointError
    from .loading import refuse_missing_folder

    refuse_missing_folder(draft)
    file = Path(draft) / "config.json"
    if not file.parent.is_dir():
        raise DSparkCheckpointError(
            f"--draft is {draft!r}, but temperatures are written into the draft's config.json: give a local folder "
            f"(hf download {draft} --local-dir FOLDER), or --dry-run to measure only."
        )
    values = _read_config(file)
    if values.get("model_type") != "dspark":
        raise DSparkCheckpointError(
            f"{file} has model_type {values.get('model_type')!r}; temperatures are kept in 'dspark' folders. Load the "
            "draft and save it with `save_pretrained`, or use --dry-run to measure only."
        )
    if not os.access(file.parent, os.W_OK):
        raise DSparkCheckpointError(f"{file.parent} cannot be written to. Copy it, or use --dry-run to measure only.")
    return file


def _read_config(file: Path) -> dict[str, Any]:
    from ..errors import DSparkCheckpointError

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DSparkCheckpointError(f"config.json of {file.parent} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise DSparkCheckpointError(f"config.json of {file.parent} is a {type(values).__name__}, not an object.")
    return values


def write_calibrations(file: Path, calibrations: dict[str, Calibration], records: dict[str, dict[str, Any]]) -> None:
    """Sets the modes' temperatures, shifts and what they were fitted on in a config.json; all else in it stays.

    Args:
        file: the config.json of a draft's folder.
        calibrations: per mode.
        records: per mode, JSON-ready.

    Raises:
        DSparkConfigError: the values do not fit the configuration; the file is as it was.
    """
    from ..configuration_dspark import DSparkConfig

    values = _read_config(file)
    was_sorted = list(values) == sorted(values)
    new: dict[str, dict[str, Any]] = {
        "confidence_temperatures": {mode: calibration.temperatures for mode, calibration in calibrations.items()},
        "confidence_shifts": {mode: calibration.shifts for mode, calibration in calibrations.items()},
        "confidence_calibration": records,
    }
    for key, modes in new.items():
        values[key] = {**(values.get(key) or {}), **modes}
    DSparkConfig.from_dict(dict(values))
    write_json(file, dict(sorted(values.items())) if was_sorted else values, indent=2)


# --------------------------------------------------------------------------------------------------------------------
# Sweep
# --------------------------------------------------------------------------------------------------------------------
def _sweep(
    args: argparse.Namespace, files: list[str], prompt_sets: list[PromptSet], log: Console, console: Console
) -> int:
    from ..evaluation.partial import PartialResults, fingerprint
    from ..evaluation.sweep import THRESHOLDS, SweepRun, sum_up, sweep
    from .calibrate_view import CallProgress, sweep_tables

    temperatures = tuple(dict.fromkeys(args.temperature or (0.0,)))
    name, _, target, tokenizer, draft = _load(args)
    description = {
        "target": name,
        "target_fingerprint": fingerprint(target),
        "draft": args.draft,
        "draft_fingerprint": fingerprint(draft),
        "confidence_temperatures": draft.config.confidence_temperatures,
        "confidence_shifts": draft.config.confidence_shifts,
        "data": describe_data(files, prompt_sets),
        "temperatures": temperatures,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        **describe_machine(target),
    }
    partial = PartialResults(f"{args.json}.partial.jsonl", description) if args.json is not None else None
    if partial:
        log.print(f"Going on from {partial.path}: {len(partial)} calls are done.", style="dim")
    calls = len(temperatures) * len(THRESHOLDS) * sum(len(prompts.conversations) for prompts in prompt_sets)
    try:
        with CallProgress(log, calls) as progress:

            def advance(result: SweepRun) -> None:
                what = f"{result.prompt_set}, temperature {result.temperature:g}, threshold {result.threshold:g}"
                progress.advance(what, result.committed + 1, result.rounds)

            runs = sweep(
                *(target, tokenizer, draft, prompt_sets, temperatures, args.max_new_tokens, args.seed),
                partial=partial,
                on_result=advance,
            )
    except KeyboardInterrupt:
        if partial is not None:
            log.print(f"Interrupted. {len(partial)} calls are kept; the same command goes on from them.")
        raise
    points = sum_up(runs)
    for table in sweep_tables(points):
        console.print(table)
    if args.json is not None:
        write_json(args.json, {"settings": description, "points": [point.to_dict() for point in points]})
        if partial is not None:
            partial.remove()
    if args.plots is not None:
        from ..evaluation.calibration_plots import write_sweep

        write_sweep(points, args.plots)
    failures = [
        f"{run.prompt_set} prompt {run.index}, threshold {run.threshold:g}: drafting failed ({run.failure})."
        for run in runs
        if run.failure is not None
    ]
    return _report(failures, console)
