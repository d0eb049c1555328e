"""`hf-dspark train`: trains a draft model. Options are the fields of the dataclasses; YAML sets defaults."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dspark import DSparkDraftModel
    from ..training.arguments import DSparkModelArguments, DSparkTrainingArguments
    from ..training.trainer import DSparkTrainer

HELP = "train a draft model for a target (every option may also stand in a YAML file: --config x.yaml)"
PASS_ARGV = True


def run(argv: list[str]) -> int:
    """Parses `argv`, trains (or estimates what that would take), and leaves the draft model in `output_dir`."""
    model_args, args = parse(argv)
    if model_args.estimate:
        estimate(model_args, args)
    else:
        train(model_args, args)
    return 0


def parse(argv: list[str]) -> tuple[DSparkModelArguments, DSparkTrainingArguments]:
    """Command line over YAML over defaults.

    Raises:
        DSparkConfigError: an unknown option or key, a missing one, or a wrong value; one line.
    """
    from transformers import HfArgumentParser

    from ..errors import DSparkConfigError, DSparkError
    from ..training.arguments import DSparkModelArguments, DSparkTrainingArguments

    class Parser(HfArgumentParser):
        """Reports mistakes as this package does, not with a page of usage."""

        def error(self, message: str) -> NoReturn:
            raise DSparkConfigError(f"{message} (see hf-dspark train --help)")

    config = Parser(add_help=False, allow_abbrev=False)
    config.add_argument("--config", metavar="YAML", help="file whose keys set the defaults of the options below")
    parser = Parser(
        (DSparkModelArguments, DSparkTrainingArguments),
        prog="hf-dspark train",
        description=HELP,
        parents=[config],
        allow_abbrev=False,
    )
    file = config.parse_known_args(argv)[0].config
    if file is not None:
        argv = [*_yaml_options(file, {action.dest for action in parser._actions} - {"help", "config"}), *argv]
    try:
        model_args, args, _, unknown = parser.parse_args_into_dataclasses(
            args=argv, return_remaining_strings=True, look_for_args_file=False
        )
    except DSparkError:
        raise
    except ValueError as error:  # of TrainingArguments: values that contradict each other
        raise DSparkConfigError(str(error)) from error
    if unknown:
        parser.error(f"no such option: {' '.join(unknown)}")
    return model_args, args


def _yaml_options(file: str, known: set[str]) -> list[str]:
    """A YAML file as a command line, so that its values are checked in the same way. A null leaves an option unset."""
    import yaml

    from ..errors import DSparkConfigError

    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
        # Plain strings, because YAML has its own idea of words like `no` (a save_strategy) and numbers like 1e-3 ...
        values = yaml.load(text, Loader=yaml.BaseLoader)
        typed = yaml.safe_load(text)  # ... and typed, for nulls and for what is inside a mapping
    except OSError as error:
        raise DSparkConfigError(f"Cannot read {file}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise DSparkConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise DSparkConfigError(f"{file} must hold `option: value` lines, but holds a {type(values).__name__}.")
    unknown = sorted(set(values) - known)
    if unknown:
        raise DSparkConfigError(f"{file}: no such option: {', '.join(unknown)} (see hf-dspark train --help)")
    options: list[str] = []
    for name, value in values.items():
        if typed[name] is None:
            continue
        if isinstance(value, list):
            options += [f"--{name}", *map(str, value)]
        else:
            options.append(f"--{name}={json.dumps(typed[name]) if isinstance(value, dict) else value}")
    return [*options, f"--config={file}"]  # ends a list: what follows is the command line's


def train(model_args: DSparkModelArguments, args: DSparkTrainingArguments) -> None:
    """Loads target and data, builds or loads the draft, trains it, and writes it to `args.output_dir`.

    The folder gets the draft in `model_args.export_dtype`, `training_facts.json`, `trainer_state.json` with all that
    was logged and (with the extra `eval`) a picture of the learning curve; the tokenizer stays with the target;
    checkpoints below it are fp32 and hold what an exact resume needs. With `push_to_hub`, the finished draft is pushed.
    """
    from transformers.trainer_utils import get_last_checkpoint

    from ..errors import DSparkConfigError

    checkpoint = get_last_checkpoint(args.output_dir) if model_args.resume and os.path.isdir(args.output_dir) else None
    if model_args.resume and checkpoint is None:
        raise DSparkConfigError(f"--resume: {args.output_dir} holds no checkpoint. Leave --resume out to start anew.")
    trainer, _target = build_trainer(model_args, args)
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    if trainer.eval_dataset is not None and trainer.state.global_step not in evaluated:
        trainer.evaluate()
    trainer.save_state()
    if trainer.is_world_process_zero() and trainer.eval_dataset is not None and importlib.util.find_spec("matplotlib"):
        from ..evaluation.plots import plot_learning_curve

        name = os.path.basename(os.path.normpath(args.output_dir))
        plot_learning_curve({name: trainer.state.log_history}, os.path.join(args.output_dir, "learning_curve.png"))
    export(trainer, model_args.export_dtype)
    if trainer.is_world_process_zero():
        trainer.save_facts(args.output_dir)
        if args.push_to_hub:
            _push(trainer)


def _push(trainer: DSparkTrainer) -> None:
    """Pushes the finished draft model."""
    from ..errors import DSparkHubError
    from ..hub import push_folder

    args = trainer.args
    try:
        push_folder(
            args.output_dir,
            trainer.hub_model_id,
            commit_message="End of training",
            token=args.hub_token,
            revision=args.hub_revision,
            license=args.hub_license,
            base_model=args.hub_base_model,
            tables_are_own=True,  # the draft is bound to its target
        )
    except DSparkHubError as error:
        raise DSparkHubError(
            f"{error} The finished draft model is in {args.output_dir}; hf-dspark push pushes it."
        ) from error


def estimate(model_args: DSparkModelArguments, args: DSparkTrainingArguments) -> None:
    """Prints what the run would take, from a few of its own steps; writes nothing."""
    import tempfile

    from ..training.estimate import estimate_run
    from .train_view import print_estimate

    with tempfile.TemporaryDirectory() as args.output_dir:  # a Trainer makes its folder at once
        trainer, _target = build_trainer(model_args, args)
        result = estimate_run(trainer)
    if trainer.is_world_process_zero():
        print_estimate(result)


def build_trainer(
    model_args: DSparkModelArguments, args: DSparkTrainingArguments
) -> tuple[DSparkTrainer, PreTrainedModel]:
    """The trainer of the run that the options describe, and its target, which the caller must keep.

    Raises:
        DSparkError: one line on what cannot be loaded, or does not fit.
    """
    from huggingface_hub import ResolvedRevision
    from transformers import set_seed
    from transformers.utils import logging, resolve_revision

    from ..errors import DSparkConfigError, DSparkError
    from ..training.data import load_records, split_records
    from ..training.trainer import DSparkTrainer
    from . import one_line
    from .loading import load_target, progress_line, quiet_libraries

    verbosity = logging.get_verbosity()
    quiet_libraries()  # until training begins: what goes wrong before is one line
    records = load_records(model_args.data, model_args.dataset_split)  # first: it is the cheapest thing to get wrong
    device = model_args.target_device or str(args.device)
    options = argparse.Namespace(dtype=model_args.target_dtype, device=device, threads=None)
    # One process downloads, and the others find it in the cache; but shards are loaded by all at once.
    first = contextlib.nullcontext() if model_args.shard_target else args.main_process_first(desc="target")
    with first, progress_line(args.process_index == 0) as report:
        # A branch moves on; the draft is for the weights of this commit, which its config will name.
        revision = resolve_revision(model_args.target, model_args.target_revision)
        if isinstance(revision, ResolvedRevision):
            model_args.target_revision = revision.resolved
        target, tokenizer = load_target(
            model_args.target,
            options,
            report,
            model_args.target_revision,
            model_args.target_quantization,
            args.world_size if model_args.shard_target else 1,
        )
    target.requires_grad_(False)

    set_seed(args.seed)  # the draft's first weights
    train_records, eval_records = split_records(records, model_args.validation_share, args.seed)
    train_dataset, eval_dataset = (
        DSparkTrainer.encode(part, tokenizer, args, target) if part else None for part in (train_records, eval_records)
    )
    skipped = sum(part.skipped for part in (train_dataset, eval_dataset) if part is not None)
    if skipped and args.process_index == 0:
        print(
            f"{skipped} of {len(records)} records have nothing to train on and are skipped "
            f"(max_length {args.max_length}; hf-dspark data inspect shows why).",
            file=sys.stderr,
        )
    draft = build_draft(model_args, target, train_dataset)
    try:
        trainer = DSparkTrainer(
            model=draft,
            target=target,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            data_names=_data_names(model_args),
        )
    except DSparkError:
        raise
    except (ValueError, RuntimeError) as error:  # an optimiser, a reporter or a strategy that cannot be had here
        raise DSparkConfigError(one_line(error)) from error
    logging.set_verbosity(verbosity)
    return trainer, target


def export(trainer: DSparkTrainer, dtype: str) -> None:
    """Writes the draft to the output folder in `dtype`. Every process must call it: the weights may be sharded."""
    import torch

    from ..modeling_dspark import DSparkDraftModel

    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return
    trained = trainer.draft
    with torch.device("meta"):
        draft = DSparkDraftModel(trained.config, trained.embed_tokens is not None, trained.lm_head is not None)
    kind = getattr(torch, dtype)
    tensors = {name: value.to(kind) if value.is_floating_point() else value for name, value in state.items()}
    draft.load_state_dict(tensors, assign=True)
    draft.generation_config = trained.generation_config
    draft.save_pretrained(trainer.args.output_dir)


def _data_names(model_args: DSparkModelArguments) -> list[str]:
    """Names of files without their folders, or the id and split of a data set."""
    return [
        os.path.basename(source) if os.path.exists(source) else f"{source} ({model_args.dataset_split})"
        for source in model_args.data
    ]


def build_draft(model_args: DSparkModelArguments, target: Any, train_dataset: Any) -> DSparkDraftModel:
    """A new draft model as the options say, or the warm start that `--draft` names."""
    import torch

    from ..modeling_dspark import DSparkDraftModel
    from ..training.data import most_frequent_ids
    from ..training.initialization import initialize_draft
    from .loading import refuse_missing_folder

    if model_args.draft is not None:
        refuse_missing_folder(model_args.draft)
        draft = DSparkDraftModel.from_pretrained(model_args.draft, target=target, dtype=torch.float32)
        # What training changes was fitted on the model as it was.
        draft.config.confidence_temperatures = draft.config.confidence_shifts = None
        draft.config.confidence_calibration = None
    else:
        names = (
            *("num_hidden_layers", "target_layer_ids", "block_size", "intermediate_size", "markov_rank"),
            *("markov_head_type", "enable_confidence_head", "mask_token_id", "num_key_value_heads"),
        )
        fields = {name: getattr(model_args, name) for name in names if getattr(model_args, name) is not None}
        if model_args.draft_vocab_size is not None:
            fields["draft_token_ids"] = most_frequent_ids(
                train_dataset, target.config.get_text_config().vocab_size, model_args.draft_vocab_size
            )
            fields["draft_vocab_size"] = model_args.draft_vocab_size
        draft = DSparkDraftModel.for_target(target, **fields)
        if model_args.initialize:
            initialize_draft(draft, train_dataset)
    draft.config.target_model_name_or_path = model_args.target
    draft.config.target_revision = model_args.target_revision
    return draft
