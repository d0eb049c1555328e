"""`DSparkTrainer`: a transformers Trainer whose model is the draft and whose frozen target runs beside it (online)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from .. import hub
from ..errors import DSparkConfigError, DSparkDataError, DSparkHubError
from ..hub_errors import HUB_FAILURES, explained
from ..modeling_dspark import DSparkDraftModel, DSparkDraftOutput
from .arguments import DSparkTrainingArguments
from .checks import check_data, check_head_map, head_is_targets
from .data import DSparkCollator, DSparkDataset
from .facts import describe_run, read_runs, write_runs
from .objective import ObjectiveOutput, dspark_objective, teacher_forward
from .optimizer import MuonAdamW, split_parameters
from .states import StateFolder, TeacherStates

logger = logging.get_logger(__name__)

_CHECKED_SAMPLES = 8


class DSparkTrainer(Trainer):
    """Trains a draft model against its frozen target (paper §3.3, DESIGN §8).

    The target is not part of the module tree: its weights are neither saved nor changed, and no hidden states are
    cached on disk. It is put into evaluation mode. What of the draft trains: what had `requires_grad` when it came,
    without its own vocabulary tables (but the head with `args.train_head`) and without a confidence head that
    `alpha_conf` 0 gives no loss; or, with `args.trainable` "confidence_head", that head alone.

    Args:
        model: the draft; it is bound to `target` if it is not yet.
        target: the frozen target, on its own device or devices.
        args: `DSparkTrainingArguments`.
        train_dataset, eval_dataset: a `DSparkDataset`, or records (a `datasets.Dataset`, or a list of dicts) with
            `messages` or `prompt` and `response`, which are encoded here.
        processing_class: the target's tokenizer.
        data_names: what the data is called, for the model card: names of files, or the id of a data set.
        kwargs: the rest of `Trainer`'s.

    Whatever it saves has a `training_facts.json` beside it, which the model card is made from. With `push_to_hub=True`
    every save is pushed with a card.

    Raises:
        DSparkTargetError: draft and target do not fit.
        DSparkDataError: nothing to supervise, or ids outside the target's vocabulary.
        DSparkConfigError: the draft lacks the head that `args` wants trained.
        DSparkHubError: with `push_to_hub=True`: the Hub refuses, or there is no licence or base model for the card.
    """

    # The loss is divided by Σw over the whole accumulated batch and all ranks, not per micro-batch.
    loss_is_scaled_for_ga = True

    args: DSparkTrainingArguments
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        model: DSparkDraftModel,
        target: PreTrainedModel,
        args: DSparkTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_names: list[str] | None = None,
        **kwargs: Any,
    ):
        model.bind_target(target)
        _declare_trainable(model, args)
        self.target = target.eval()  # dropout, of an adapter for one, would make it another teacher
        self.draft = model
        self.data_names = data_names or []
        # A draft that was trained before: its runs are part of what it is.
        source = model.config.name_or_path
        self._earlier_runs = read_runs(source)
        self.started_from = os.path.basename(os.path.normpath(source)) if source and os.path.isdir(source) else source
        self._slots = torch.zeros((), dtype=torch.long)  # trained on in this run
        self._seconds = 0.0  # of this run, but for what passed since `_started`
        self._started: float | None = None
        num_slots = model.config.num_draft_tokens
        super().__init__(
            model=model,
            args=args,
            train_dataset=self.encode(train_dataset, processing_class, args, target),
            eval_dataset=self.encode(eval_dataset, processing_class, args, target),
            data_collator=DSparkCollator(num_slots, args.loss_decay_gamma),
            processing_class=processing_class,
            **kwargs,
        )
        self.add_callback(_EpochOfAnchors(self.train_dataset))
        self._kept_states = None if args.target_states is None else StateFolder(args.target_states, model)
        # A head that was trained says nothing about the target, whatever it says about the draft.
        self._head_is_targets = self._kept_states is not None and head_is_targets(model)
        self._meters = _Meters(num_slots)
        self._eval_meters = _Meters(num_slots)
        longest = max((len(ids) for ids, _ in self.train_dataset.samples), default=0) if self.train_dataset else 0
        if longest:
            model.config.training_max_length = longest

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, after checks that a wrong pair or wrong data would only fail much later, or never.

        Raises:
            DSparkTargetError: the draft's head map does not give the target's logits.
            DSparkDataError: the target finds the data less likely than random ids (unless `check_data=False`).
        """
        if self.train_dataset is None:
            raise DSparkDataError("There is nothing to train on: pass `train_dataset`.")
        samples = [self.train_dataset[i] for i in range(min(_CHECKED_SAMPLES, len(self.train_dataset)))]
        check_head_map(self.draft, self.target, samples[0]["input_ids"][None])
        if self.args.check_data:
            check_data(self.target, samples)
        self._begin_run(args[0] if args else kwargs.get("resume_from_checkpoint"))
        try:
            return super().train(*args, **kwargs)
        finally:
            self._seconds, self._started = self._spent(), None

    @staticmethod
    def encode(
        dataset: Any, tokenizer: PreTrainedTokenizerBase | None, args: DSparkTrainingArguments, target: PreTrainedModel
    ) -> DSparkDataset | None:
        """Turns records into a `DSparkDataset` with the limits and seeds of `args`; one that is encoded stays as is."""
        if dataset is None or isinstance(dataset, DSparkDataset):
            return dataset
        if tokenizer is None:
            raise DSparkDataError("Records need the target's tokenizer: pass it as `processing_class`.")
        return DSparkDataset.from_records(
            dataset,
            tokenizer,
            max_length=args.max_length,
            num_anchors=args.num_anchors,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        )

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Σ w_k over all micro-batches and ranks: the one denominator of the three losses."""
        if not batch_samples:
            return None
        self._drop_repeats(batch_samples[-1])
        weight = torch.stack([batch["slot_weight"] for batch in batch_samples]).sum().to(device)
        slots = torch.stack([batch["slots"].sum() for batch in batch_samples]).sum().to(weight)  # exact below 2^24
        total, slots = self.accelerator.reduce(torch.stack([weight, slots]), reduction="sum")
        self._slots = self._slots.to(device) + slots.long()
        return total

    def _drop_repeats(self, batch: dict[str, torch.Tensor]) -> None:
        """Takes the slots from samples with which accelerate filled up the last batch of several processes.

        Without this, an epoch whose last batch is not full would train on some samples twice, and count them twice.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return
        slots = batch["slots"]
        real = state.remainder - self.accelerator.process_index * len(slots)
        slots[max(real, 0) :] = False
        batch["slot_weight"] = (slots * self.data_collator.weights.to(slots.device)).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ObjectiveOutput]:
        """The three losses over the batch, with the target's forward in front."""
        teacher = self._teacher(inputs["input_ids"], inputs["attention_mask"])
        denominator = inputs["slot_weight"] if num_items_in_batch is None else num_items_in_batch

        def objective(output: DSparkDraftOutput) -> ObjectiveOutput:
            return dspark_objective(
                self.draft,
                output,
                teacher.states,
                inputs["input_ids"],
                inputs["anchors"],
                inputs["slots"],
                self.data_collator.weights,
                denominator,
                self.args.alpha_ce,
                self.args.alpha_tv,
                self.args.alpha_conf,
                teacher.log_total,
                teacher.top,
            )

        with self.accelerator.autocast():
            result = model(
                features=teacher.features,
                input_ids=inputs["input_ids"],
                anchor_positions=inputs["anchors"],
                attention_mask=inputs["attention_mask"],
                detach_confidence=self.args.detach_confidence,
                objective=objective,
            )
        (self._meters if model.training else self._eval_meters).add(result)
        # Gradients are averaged over ranks, the denominator is already global.
        loss = result.loss * self.accelerator.num_processes if model.training else result.loss
        return (loss, result) if return_outputs else loss

    def _teacher(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> TeacherStates:
        if self._kept_states is not None:
            kept = self._kept_states(input_ids, attention_mask)
            return kept if self._head_is_targets else TeacherStates(kept.features, kept.states)
        layer_ids = self.draft.config.target_layer_ids
        states = teacher_forward(self.target, layer_ids, input_ids, attention_mask)
        return TeacherStates(*(part.to(input_ids.device) for part in states))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """`MuonAdamW` when `muon_learning_rate` is set, else the Trainer's own."""
        if self.optimizer is None and self.args.muon_learning_rate is not None:
            matrices, others = split_parameters(self.draft)
            adamw = {
                "lr": self.args.learning_rate,
                "betas": (self.args.adam_beta1, self.args.adam_beta2),
                "eps": self.args.adam_epsilon,
                "weight_decay": self.args.weight_decay,
            }
            self.optimizer = MuonAdamW(matrices, others, self.args.muon_learning_rate, adamw)
        return super().create_optimizer(model)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Loss only: the acceptance metrics are summed beside it."""
        inputs = self._prepare_inputs(inputs)
        self._drop_repeats(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = cast(torch.Tensor, self.compute_loss(model, inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Adds expected accepted length and acceptance by position, when sampling and when greedy.

        The loss is that of all slots under one denominator, as in training, not a mean over batches.
        """
        self._eval_meters.reset()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._eval_meters.summary(self.accelerator)
        factors = {"ce": self.args.alpha_ce, "l1": self.args.alpha_tv, "confidence": self.args.alpha_conf}
        metrics["loss"] = sum(factor * metrics[f"{name}_loss"] for name, factor in factors.items())
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the parts of the loss and the acceptance since the last log."""
        if "loss" in logs and self._meters.count:
            logs.update(self._meters.summary(self.accelerator))
            self._meters.reset()
        super().log(logs, start_time)

    # ------------------------------------------------------------------------------------------------------------
    # Facts, card and Hub
    # ------------------------------------------------------------------------------------------------------------
    def _begin_run(self, checkpoint: str | bool | None) -> None:
        """Sets the counters of a run that starts, or of one that is resumed."""
        if isinstance(checkpoint, bool):
            checkpoint = get_last_checkpoint(self.args.output_dir) if checkpoint else None
        if not checkpoint and self.state.global_step:  # `train` once more: another run of the same draft
            self._earlier_runs = self.runs
        self._slots.zero_()
        self._seconds = 0.0
        if checkpoint:
            *self._earlier_runs, interrupted = read_runs(checkpoint) or [{"slots": 0, "seconds": 0.0}]
            self._slots += interrupted["slots"]
            self._seconds = interrupted["seconds"]
        self._started = time.monotonic()

    def _spent(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """What `training_facts.json` holds: this run so far, after those of a draft that was trained before."""
        if not self.state.global_step:
            return self._earlier_runs
        return [*self._earlier_runs, describe_run(self, self._spent(), int(self._slots))]

    def save_facts(self, folder: str | os.PathLike) -> None:
        """Writes `training_facts.json` into a draft's folder; nothing where nothing was trained."""
        if self.runs:
            write_runs(folder, self.runs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.save_facts(output_dir if output_dir is not None else self.args.output_dir)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As `Trainer`, after a check that a card can be made: the first save would be late to find out.

        Raises:
            DSparkHubError: there is no licence or base model for the card, or the Hub refuses.
        """
        if self.is_world_process_zero():
            args = self.args
            folder = Path(args.output_dir)
            hub.check_publishable(self.draft.config, args.hub_license, args.hub_base_model, folder)
        name = self.args.hub_model_id or os.path.basename(os.path.abspath(self.args.output_dir))
        with explained(DSparkHubError, name, writing=True):
            super().init_hf_repo(token, private)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
    ) -> None:
        """Writes README.md into `output_dir`, where a draft model was saved, or adds to the one that is there.

        Args:
            language, tags, dataset: more metadata; `dataset` is a Hub id.
            license: by default `hub_license`, or that of the target's card.
            model_name: the heading; by default the repository's name.
            finetuned_from: the target's Hub id; by default `hub_base_model`, or the one that the config names.

        Raises:
            DSparkHubError: there is no licence or base model, or an existing card cannot be merged.
        """
        if self.is_world_process_zero():
            self._write_card(
                self.args.output_dir,
                license=license or self.args.hub_license,
                base_model=finetuned_from or self.args.hub_base_model,
                tags=[tags] if isinstance(tags, str) else tags or (),
                language=language,
                datasets=dataset,
                title=model_name,
            )

    def _write_card(self, draft_folder: str, **options: Any) -> None:
        """The card of the draft in `draft_folder`, into `output_dir`."""
        repo_id = self.hub_model_id or self.args.hub_model_id or os.path.basename(os.path.abspath(self.args.output_dir))
        there = None
        if self.hub_model_id is not None:
            # Without a network the training goes on; a card that was merged before lies in `output_dir`.
            with contextlib.suppress(*HUB_FAILURES):
                there = hub.published_card(repo_id, self.args.hub_revision, self.args.hub_token)
        publication = hub.prepare(
            draft_folder,
            repo_id,
            facts_folder=self.args.output_dir,
            published_card=there,
            tables_are_own=True,  # bound to its target, so only tables that differ are saved
            token=self.args.hub_token,
            **options,
        )
        card = Path(self.args.output_dir) / hub.CARD
        temporary = card.with_suffix(".tmp")
        temporary.write_bytes(publication.card.encode())
        os.replace(temporary, card)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """A push of a save, with the card as of this save."""
        if self.is_world_process_zero():
            self.save_facts(self.args.output_dir)
            try:
                self._write_card(checkpoint_folder, license=self.args.hub_license, base_model=self.args.hub_base_model)
            except (
                DSparkHubError
            ) as error:  # a card in the repository that was broken meanwhile: not worth the training
                logger.warning(f"{checkpoint_folder} is not pushed. {error}")
                return
        super()._push_from_checkpoint(checkpoint_folder)


class _EpochOfAnchors(TrainerCallback):
    """Tells the dataset which epoch it is in, also when training resumes in the middle of one."""

    def __init__(self, dataset: DSparkDataset | None):
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.dataset is not None:
            self.dataset.epoch = math.floor((state.epoch or 0.0) + 1e-6)


class _Meters:
    """Sums over supervised slots: losses, acceptance by position, accepted length of full blocks."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, result: ObjectiveOutput) -> None:
        slots = result.slots
        overlap = torch.zeros(slots.shape, device=slots.device)
        agrees = torch.zeros(slots.shape, device=slots.device)
        overlap[slots], agrees[slots] = result.overlap, result.agrees.float()
        full = slots.all(dim=-1)  # only whole blocks tell an accepted length
        parts = {
            "ce": result.ce,
            "l1": result.l1,
            "confidence": result.confidence,
            "weight": result.weight,
            "slots": slots.sum(dim=(0, 1)).float(),
            "overlap": overlap.sum(dim=(0, 1)),
            "agrees": agrees.sum(dim=(0, 1)),
            "blocks": full.sum().float(),
            "length_sample": overlap[full].cumprod(dim=-1).sum(),
            "length_greedy": agrees[full].cumprod(dim=-1).sum(),
        }
        self.count += 1
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach()

    def summary(self, accelerator: Any) -> dict[str, float]:
        """Means over all ranks. Accepted lengths count the bonus token."""
        sums = {name: accelerator.reduce(value.clone(), reduction="sum") for name, value in self.sums.items()}
        weight, blocks, slots = sums["weight"].clamp(min=1e-9), sums["blocks"].clamp(min=1), sums["slots"].clamp(min=1)
        out = {f"{name}_loss": (sums[name] / weight).item() for name in ("ce", "l1", "confidence")}
        for mode, key in (("sample", "overlap"), ("greedy", "agrees")):
            out[f"accepted_length_{mode}"] = 1.0 + (sums[f"length_{mode}"] / blocks).item()
            for k, value in enumerate((sums[key] / slots).tolist(), start=1):
                out[f"acceptance_{mode}_{k}"] = value
        out["slots"] = sums["slots"].sum().item()
        return out


def _declare_trainable(draft: DSparkDraftModel, args: DSparkTrainingArguments) -> None:
    """Freezes what `args` does not train."""
    if args.train_head and draft.lm_head is None:
        raise DSparkConfigError(
            "train_head is set, but this draft has the target's own output head, which never changes. A draft owns one "
            "with draft_vocab_size below vocab_size."
        )
    if args.trainable == "confidence_head":
        if draft.confidence_head is None:
            raise DSparkConfigError("trainable is 'confidence_head', but this draft has none (enable_confidence_head).")
        draft.requires_grad_(False)
        draft.confidence_head.requires_grad_(True)
        return
    if draft.embed_tokens is not None:
        draft.embed_tokens.requires_grad_(False)
    if draft.lm_head is not None:
        draft.lm_head.requires_grad_(args.train_head)
    if draft.confidence_head is not None and args.alpha_conf == 0:
        draft.confidence_head.requires_grad_(False)
