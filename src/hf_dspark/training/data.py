"""Training data: records, the encoded samples with their anchors, and batches of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import DSparkDataError, DSparkDependencyError
from .masks import Sample, encode_conversation
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
        """Encodes records; each sample is cut at `max_length` tokens, and left out when no anchor is in it.

        `.skipped` counts the records of which nothing is left.

        Raises:
            DSparkDataError: an id is not below the target's `vocab_size`, or nothing at all is supervised.
        """
        samples, skipped = [], 0
        for _, encoded in encode_records(records, tokenizer):
            kept = 0
            for ids, mask in encoded:
                ids, mask = ids[:max_length], mask[:max_length]
                if max(ids, default=0) >= vocab_size:
                    raise DSparkDataError(
                        f"The tokenizer gives id {max(ids)}, but the target has vocab_size {vocab_size}: they do not "
                        "belong together. Use the target's own tokenizer."
                    )
                pair = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.int8)
                if has_anchor(pair[1]):
                    samples.append(pair)
                    kept += 1
            skipped += not kept
        if not samples:
            raise DSparkDataError(
                f"Nothing to supervise: none of {skipped} records has two neighbouring tokens of assistant text within "
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


def encode_records(
    records: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[dict[str, Any], list[Sample]]]:
    """Each record with its samples (see `encode_conversation`).

    A record may hold `finished`, `tools` (a list of functions as JSON schema) and `chat_template_kwargs` (a dict).

    Raises:
        DSparkDataError: a record cannot be encoded; the message has its number, from 0.
    """
    for number, record in enumerate(records):
        try:
            samples = encode_conversation(
                tokenizer,
                to_messages(record),
                finished=record.get("finished") is not False,  # `datasets` gives None where a record has no such field
                tools=record.get("tools"),
                template_kwargs=record.get("chat_template_kwargs"),
            )
        except DSparkDataError as error:
            raise DSparkDataError(f"Record {number}: {error}") from error
        yield record, samples


def has_anchor(mask: np.ndarray) -> bool:
    """Whether an integer mask [T] has two neighbouring tokens that are supervised: an anchor and its first label."""
    return bool((mask[:-1] & mask[1:]).any())


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
