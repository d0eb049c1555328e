"""Prompt files for evaluation: JSONL, one prompt a line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import DSparkDataError

_ALLOWED = '{"turns": [text, ...]}, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}'


@dataclass(frozen=True)
class PromptSet:
    """A named list of conversations, each ending with the user's turn.

    Attributes:
        name: the file's name without its extension.
        conversations: per prompt a list of `{"role", "content"}`.
    """

    name: str
    conversations: list[list[dict[str, str]]]


def load_prompts(path: str | os.PathLike, limit: int | None = None) -> PromptSet:
    """Reads the first `limit` prompts of a JSONL file; empty lines are skipped.

    A line is `{"turns": [...]}` (its first turn is used), `{"prompt": ...}`, or `{"messages": [...]}` (a last
    assistant message is dropped: it is what the model is asked to write).

    Raises:
        DSparkDataError: the file cannot be read, a line is none of the three (the message has its number), or there
            is no prompt at all.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DSparkDataError(f"Cannot read the prompt file {os.fspath(path)!r}: {error}.") from error
    conversations: list[list[dict[str, str]]] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(conversations) == limit:
            break
        if line.strip():
            conversations.append(_conversation(line, f"{os.fspath(path)}:{number}"))
    if not conversations:
        raise DSparkDataError(f"{os.fspath(path)!r} has no prompts; each line must be {_ALLOWED}.")
    return PromptSet(Path(path).stem, conversations)


def _conversation(line: str, where: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DSparkDataError(f"{where} is not JSON ({error}); each line must be {_ALLOWED}.") from error
    match row:
        case {"turns": [str(text), *_]} | {"prompt": str(text)}:
            return [{"role": "user", "content": text}]
        case {"messages": [*messages]} if all(_is_message(message) for message in messages):
            if messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if messages:
                return messages
    raise DSparkDataError(f"{where} holds no prompt; it must be {_ALLOWED}.")


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
    return False


def encode(
    tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, str]], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, int64 [1, T], of a conversation and the opening of the assistant's turn.

    Raises:
        DSparkDataError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise DSparkDataError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, which prompts are wrapped in. Use an "
            "instruction-tuned target, or (hf-dspark generate) --no-chat-template."
        )
    encoded: Any = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}
