"""`hf-dspark train`: trains a draft model for a target. Options are the fields of the dataclasses; YAML sets defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDraftModel
    from ..training.arguments import DSparkModelArguments, DSparkTrainingArguments

HELP = "train a draft model for a target (every option may also stand in a YAML file: --config x.yaml)"
PASS_ARGV = True


def run(argv: list[str]) -> int:
    """Parses `argv`, trains, and leaves the draft model in `output_dir`."""
    model_args, args = parse(argv)
    train(model_args, args)
    return 0


def parse(argv: list[str]) -> tuple[DSparkModelArguments, DSparkTrainingArguments]:
    """Command line over YAML over defaults.

    Raises:
        DSparkConfigError: an unknown option or key, a missing one, or a wrong value; one line.
    """
    from transformers import HfArgumentParser

    from ..errors import DSparkConfigError
    from ..training.arguments import DSparkModelArguments, DSparkTrainingArguments

    class Parser(HfArgumentParser):
        """Reports mistakes as this package does, not with a page of usage."""

        def error(self, message: str) -> Any:
            raise DSparkConfigError(f"{message} (see hf-dspark train --help)")

    parser = Parser((DSparkModelArguments, DSparkTrainingArguments), prog="hf-dspark train", description=HELP)
    parser.add_argument("--config", metavar="YAML", help="file whose keys set the defaults of the options below")
    argv = list(argv)
    file = _config_file(argv)
    if file is not None:
        values = _read_yaml(file)
        actions = {action.dest: action for action in parser._actions}
        unknown = sorted(set(values) - set(actions))
        if unknown:
            raise DSparkConfigError(f"{file}: no such option: {', '.join(unknown)} (see hf-dspark train --help)")
        for name in values:
            actions[name].required = False
        parser.set_defaults(**values)
    model_args, args, _ = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    return model_args, args


def _config_file(argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _read_yaml(file: str) -> dict[str, Any]:
    import yaml

    from ..errors import DSparkConfigError

    try:
        with open(file, encoding="utf-8") as stream:
            values = yaml.safe_load(stream)
    except OSError as error:
        raise DSparkConfigError(f"Cannot read {file}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise DSparkConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise DSparkConfigError(f"{file} must hold `option: value` lines, but holds a {type(values).__name__}.")
    return values


def train(model_args: DSparkModelArguments, args: DSparkTrainingArguments) -> DSparkDraftModel:
    """Loads target and data, builds or loads the draft, trains it, and writes it to `args.output_dir`.

    The folder gets the draft in `model_args.export_dtype`, the tokenizer stays with the target; checkpoints below it
    are fp32 and hold what an exact resume needs.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from ..demo_weights import resolve_target
    from ..errors import DSparkConfigError, DSparkTargetError
    from ..training.data import load_records, split_records
    from ..training.trainer import DSparkTrainer

    records = load_records(model_args.data, model_args.dataset_split)  # first: it is the cheapest thing to get wrong
    checkpoint = get_last_checkpoint(args.output_dir) if model_args.resume and os.path.isdir(args.output_dir) else None
    if model_args.resume and checkpoint is None:
        raise DSparkConfigError(f"--resume: {args.output_dir} holds no checkpoint. Leave --resume out to start anew.")
    path = resolve_target(model_args.target, print)
    try:
        target = AutoModelForCausalLM.from_pretrained(
            path, revision=model_args.target_revision or "main", dtype=model_args.target_dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(path, revision=model_args.target_revision or "main")
    except (OSError, ValueError) as error:
        raise DSparkTargetError(f"Cannot load the target {model_args.target!r}: {error}") from error
    target.eval().requires_grad_(False)
    target.to(args.device)

    set_seed(args.seed)  # the draft's first weights
    train_records, eval_records = split_records(records, model_args.validation_share, args.seed)
    train_dataset, eval_dataset = (
        DSparkTrainer.encode(part, tokenizer, args, target) if part else None for part in (train_records, eval_records)
    )
    draft = build_draft(model_args, target, train_dataset)
    trainer = DSparkTrainer(
        model=draft,
        target=target,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_state()
    if trainer.is_world_process_zero():
        draft.to(getattr(torch, model_args.export_dtype)).save_pretrained(args.output_dir)
    return draft


def build_draft(model_args: DSparkModelArguments, target: Any, train_dataset: Any) -> DSparkDraftModel:
    """A new draft model as the options say, or the warm start that `--draft` names."""
    import torch

    from ..modeling_dspark import DSparkDraftModel
    from ..training.data import most_frequent_ids
    from ..training.initialization import initialize_from_target

    if model_args.draft is not None:
        draft = DSparkDraftModel.from_pretrained(model_args.draft, target=target, dtype=torch.float32)
    else:
        names = ("num_hidden_layers", "target_layer_ids", "block_size", "intermediate_size", "markov_rank")
        names += ("markov_head_type", "enable_confidence_head", "mask_token_id")
        fields = {name: getattr(model_args, name) for name in names if getattr(model_args, name) is not None}
        if model_args.draft_vocab_size is not None:
            fields["draft_token_ids"] = most_frequent_ids(
                train_dataset, target.config.get_text_config().vocab_size, model_args.draft_vocab_size
            )
        draft = DSparkDraftModel.for_target(target, **fields)
        if model_args.initialize_from_target:
            initialize_from_target(draft, target, model_args.initialize_from_target, train_dataset)
    draft.config.target_model_name_or_path = model_args.target
    draft.config.target_revision = model_args.target_revision
    return draft
