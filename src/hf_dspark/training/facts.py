"""What a training run was: gathered by the trainer, kept beside the draft, told by its model card."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import SchedulerType

from ..card import TRAINING_FACTS
from .data import DSparkDataset

if TYPE_CHECKING:
    from .trainer import DSparkTrainer


def read_runs(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The runs that a draft's folder tells of, oldest first; empty where it tells nothing."""
    file = Path(folder) / TRAINING_FACTS
    return json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []


def write_runs(folder: str | os.PathLike, runs: list[dict[str, Any]]) -> None:
    """Writes them, to a temporary name first."""
    file = Path(folder) / TRAINING_FACTS
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def describe_run(trainer: DSparkTrainer, seconds: float, slots: int) -> dict[str, Any]:
    """A run so far.

    Args:
        trainer: its arguments, state and data are read.
        seconds: spent in `train`, those before an interruption included.
        slots: supervised slots trained on.
    """
    from .. import __version__

    args, state = trainer.args, trainer.state
    curve = [
        {
            "step": entry["step"],
            "greedy": entry["eval_accepted_length_greedy"],
            "sample": entry["eval_accepted_length_sample"],
        }
        for entry in state.log_history
        if "eval_accepted_length_greedy" in entry
    ]
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    return {
        "started_from": trainer.started_from,
        "data": {
            "names": trainer.data_names,
            "train": _amount(trainer.train_dataset),
            "held_out": _amount(trainer.eval_dataset),
        },
        "steps": state.global_step,
        "epochs": round(state.epoch or 0.0, 4),
        "sequences_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "num_anchors": args.num_anchors,
        "slots": slots,
        "learning_rate": args.learning_rate,
        "muon_learning_rate": args.muon_learning_rate,
        "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
        "loss": {name: getattr(args, name) for name in ("alpha_ce", "alpha_tv", "alpha_conf", "loss_decay_gamma")},
        "max_length": args.max_length,
        "seed": args.seed,
        "precision": "bf16 autocast" if args.bf16 else "fp16 autocast" if args.fp16 else "fp32",
        "seconds": round(seconds, 1),
        "hardware": _hardware(args.device, args.world_size),
        "versions": {"hf-dspark": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "metrics": {name: value for name, value in (evaluations[-1] if evaluations else {}).items() if name != "step"},
        "curve": list({point["step"]: point for point in curve}.values()),
    }


def _amount(dataset: DSparkDataset | None) -> dict[str, int] | None:
    if dataset is None:
        return None
    return {
        "samples": len(dataset),
        "tokens": sum(len(ids) for ids, _ in dataset.samples),
        "supervised_tokens": dataset.supervised_tokens,
    }


def _hardware(device: torch.device, processes: int) -> str:
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        threads = torch.get_num_threads()
        kind = f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"
    else:
        kind = device.type
    return kind if processes == 1 else f"{processes} × {kind}"
