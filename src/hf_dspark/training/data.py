"""Training data: conversations → token ids with a mask over the assistant's own text, and anchors per sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import DSparkDataError, DSparkDependencyError
from .objective import sample_anchors, slot_mask, slot_weights

FORMATS_HELP = '{"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "response": …}'


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a JSONL file.

    Raises:
        DSparkDataError: the file is missing, empty, or a line is not a JSON object; the message has the line number.
    """
    if not os.path.isfile(path):
        raise DSparkDataError(f"No such data file: {path}. Give a JSONL file with lines {FORMATS_HELP}.")
    records = []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DSparkDataError(f"{path}, line {number} is not JSON ({error.msg}).") from error
            if not isinstance(record, dict):
                raise DSparkDataError(f"{path}, line {number} is not an object; it must be {FORMATS_HELP}.")
            records.append(record)
    if not records:
        raise DSparkDataError(f"{path} has no records. Give a JSONL file with lines {FORMATS_HELP}.")
    return records


def load_records(sources: list[str], split: str = "train") -> list[dict[str, Any]]:
    """Records of JSONL files, or of one `datasets` id (which needs the extra `train`).

    Raises:
        DSparkDataError: a file cannot be read, or the dataset cannot be loaded.
        DSparkDependencyError: `datasets` is not installed.
    """
    looks_like_file = [source.endswith((".jsonl", ".json")) or os.path.exists(source) for source in sources]
    if all(looks_like_file):
        return [record for source in sources for record in read_jsonl(source)]
    if len(sources) > 1:
        raise DSparkDataError(f"data is {sources}, but must be JSONL files, or a single datasets id.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DSparkDependencyError(
            f"{sources[0]!r} is no file, and loading it as a dataset needs: pip install 'hf-dspark[train]'."
        ) from error
    try:
        return list(load_dataset(sources[0], split=split))
    except (OSError, ValueError) as error:
        raise DSparkDataError(f"Cannot load the dataset {sources[0]!r}: {str(error).splitlines()[0]}") from error


def split_records(
    records: list[dict[str, Any]], validation_share: float, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation records: a shuffle that depends on `seed` alone, then the first share is held out.

    Raises:
        DSparkDataError: the share is not in [0, 1), or leaves nothing on one side.
    """
    if not 0 <= validation_share < 1:
        raise DSparkDataError(f"validation_share is {validation_share}, but must be from 0 (none) to below 1.")
    if validation_share == 0:
        return records, []
    order = np.random.default_rng(seed).permutation(len(records))
    held_out = max(1, round(len(records) * validation_share))
    if held_out >= len(records):
        raise DSparkDataError(
            f"{len(records)} record(s) cannot be split: holding out {held_out} leaves none to train on. Set "
            "validation_share to 0, or give more data."
        )
    return [records[i] for i in order[held_out:]], [records[i] for i in order[:held_out]]


def to_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record as a list of chat messages.

    Raises:
        DSparkDataError: it has neither `messages` nor `prompt` and `response`, or they are not of the right kind.
    """
    messages = record.get("messages")
    if messages:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DSparkDataError(f"`messages` must be a list of objects, but is {str(messages)[:60]!r}.")
        return messages
    if "prompt" in record and "response" in record:
        return [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["response"]},
        ]
    raise DSparkDataError(f"A record has the fields {sorted(record)}; it must be {FORMATS_HELP}.")


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], finished: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation under the tokenizer's chat template, and the loss mask over assistant text.

    A template with `{% generation %}` markers is believed. Otherwise the conversation is rendered up to each assistant
    turn, with the generation prompt, and with the turn: the difference is what the model itself writes there, up to
    and including its end-of-turn token.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: the turns.
        finished: `False` when the last answer was cut at a length limit: its end-of-turn was never written, so the
            sequence ends with the answer's text.

    Returns:
        Ids and mask, of equal length.

    Raises:
        DSparkDataError: there is no chat template, or it rewrites earlier turns so that turns cannot be located.
    """
    if not tokenizer.chat_template:
        raise DSparkDataError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Set `tokenizer.chat_template`, or use "
            "the tokenizer of the instruction-tuned target."
        )
    if "{% generation %}" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
        return _cut_unfinished(ids, mask, tokenizer) if not finished else (ids, mask)

    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        upto = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not text.startswith(before) or not text.startswith(upto.rstrip()):
            raise DSparkDataError(
                "The chat template rewrites earlier turns or inserts text before an answer (message "
                f"{i}), so the answer cannot be located. Mark it in the template with {{% generation %}}."
            )
        spans.append((len(before), len(upto.rstrip())))
    if not finished and spans:
        start, end = spans[-1]
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise DSparkDataError(f"An unfinished answer must be text, but its content is a {type(content).__name__}.")
        content = content.rstrip()
        found = text.rfind(content, start, end)
        end = found + len(content) if found >= 0 else end
        text, spans[-1] = text[:end], (start, end)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start <= a and b <= end and b > a for start, end in spans)) for a, b in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask


def _cut_unfinished(ids: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Drops what follows the last supervised text of a cut answer: its end-of-turn token and the template's tail."""
    end = max((i for i, kept in enumerate(mask) if kept), default=-1) + 1
    while end > 0 and ids[end - 1] in tokenizer.all_special_ids:
        end -= 1
    return ids[:end], mask[:end]


class DSparkDataset(Dataset):
    """Encoded samples; each item also carries its anchors, a function of (seed, epoch, sample id) and nothing else.

    `epoch` is set by the trainer. It is no `set_epoch` method, because accelerate's data loader would call that with
    its own count of iterations, which starts at 0 again when a run is resumed.

    Items are dicts of tensors: `input_ids` int64 [T], `loss_mask` int64 [T], `anchors` int64 [A].

    Args:
        samples: pairs (ids, mask) of equal length.
        num_anchors: at most so many anchors per sample and epoch.
        seed: of the anchor draw.
    """

    def __init__(self, samples: list[tuple[np.ndarray, np.ndarray]], num_anchors: int, seed: int):
        self.samples = samples
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0
        self.skipped = 0
        self.supervised_tokens = int(sum(mask.sum() for _, mask in samples))

    @classmethod
    def from_records(
        cls,
        records: Iterable[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        num_anchors: int,
        seed: int,
        vocab_size: int,
    ) -> DSparkDataset:
        """Encodes records, cut at `max_length` tokens; samples with no anchor are left out and counted in `.skipped`.

        Raises:
            DSparkDataError: an id is not below the target's `vocab_size`, or nothing at all is supervised.
        """
        samples, skipped = [], 0
        for ids, mask in _encode_all(records, tokenizer):
            ids, mask = ids[:max_length], mask[:max_length]
            if max(ids, default=0) >= vocab_size:
                raise DSparkDataError(
                    f"The tokenizer gives id {max(ids)}, but the target has vocab_size {vocab_size}: they do not "
                    "belong together. Use the target's own tokenizer."
                )
            pair = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.int8)
            if not (pair[1][:-1] & pair[1][1:]).any():
                skipped += 1
                continue
            samples.append(pair)
        if not samples:
            raise DSparkDataError(
                f"Nothing to supervise: none of {skipped} samples has two neighbouring tokens of assistant text within "
                f"max_length={max_length}. Check that the data has assistant turns, and the chat template."
            )
        dataset = cls(samples, num_anchors, seed)
        dataset.skipped = skipped
        return dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = self.samples[index]
        loss_mask = torch.from_numpy(mask.astype(np.int64))
        # Mixed, so that neighbouring seeds, epochs and samples share nothing.
        mixed = np.random.SeedSequence([self.seed, self.epoch, index]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0] >> np.uint64(1)))
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "loss_mask": loss_mask,
            "anchors": sample_anchors(loss_mask, self.num_anchors, generator),
        }

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """int64 [vocab_size]: how often each id is supervised."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids, mask in self.samples:
            counts += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
        return counts


def _encode_all(
    records: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    for number, record in enumerate(records):
        try:
            yield encode_conversation(tokenizer, to_messages(record), finished=record.get("finished", True))
        except (DSparkDataError, TemplateError) as error:  # a template may refuse the order of roles, for one
            raise DSparkDataError(f"Record {number}: {error}") from error


def most_frequent_ids(dataset: DSparkDataset, vocab_size: int, count: int) -> torch.Tensor:
    """Ascending int64 [count]: the ids supervised most often, for a reduced draft vocabulary. Ties go to lower ids."""
    order = np.argsort(-dataset.token_counts(vocab_size), kind="stable")[:count]
    return torch.from_numpy(np.sort(order))


class DSparkCollator:
    """Pads on the right: `input_ids`, `attention_mask` [B, T], `anchors` [B, A], `slots` bool [B, A, n].

    Absent anchors point at position 0 and have no slots. `slot_weight` is Σ w_k over the batch, which the trainer adds
    up over ranks and accumulation steps into the one common denominator (DESIGN §8).
    """

    def __init__(self, num_slots: int, loss_decay_gamma: float, pad_token_id: int = 0):
        self.num_slots = num_slots
        self.weights = slot_weights(num_slots, loss_decay_gamma)
        self.pad_token_id = pad_token_id

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """One batch of the items of a `DSparkDataset`."""

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [item[name] for item in items], batch_first=True, padding_value=value
            )

        anchors = padded("anchors", -1)
        slots = slot_mask(padded("loss_mask", 0), anchors, self.num_slots)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        input_ids = padded("input_ids", self.pad_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "anchors": anchors.clamp(min=0),
            "slots": slots,
            "slot_weight": (slots * self.weights).sum(),
        }
