"""`TargetWriter`: what a target writes behind prompts, in batches; and the sampling settings, seeds and stops of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DSparkConfigError
from ..modeling_dspark import DSparkDraftModel


@dataclass(frozen=True)
class Sampling:
    """How text is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    Raises:
        DSparkConfigError: a value is outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise DSparkConfigError(f"top_k is {self.top_k}, but must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise DSparkConfigError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (off).")

    def generate_kwargs(self) -> dict[str, Any]:
        """Keywords of `generate`. None also unsets what the target's generation_config may ask for."""
        choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if self.temperature > 0:
            choice = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"max_new_tokens": self.max_new_tokens, **choice}


@dataclass(frozen=True)
class Stops:
    """Where a text ends: at any of these token ids, or at one of these strings. Neither is part of the text."""

    ids: list[int] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """A text of the target.

    Attributes:
        text: without its end; control tokens inside it stand as they are.
        tokens: how many were generated, the end included.
        finished: whether it came to an end, rather than to the length limit.
    """

    text: str
    tokens: int
    finished: bool


def digest(*parts: Any) -> int:
    """A 63-bit number from JSON-ready values, the same everywhere: for seeds, ids and choices."""
    hashed = hashlib.sha256(json.dumps(parts, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass"))
    return int.from_bytes(hashed.digest()[:8], "big") >> 1


def weights_fingerprint(target: PreTrainedModel) -> str:
    """A hash of the first values of every tensor: quick, and another one after any training."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(target.state_dict().items()):
        first = tensor.detach().flatten()[:64].cpu().contiguous()
        hashed.update(
            f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + first.view(torch.uint8).numpy().tobytes()
        )
    return hashed.hexdigest()[:16]


class TargetWriter:
    """Writes on behind prompts with `target.generate`, padded on the left.

    A text depends on the prompt, the settings, and when sampling on the seed and on the other prompts of its batch.
    Greedy texts do not depend on the batch, up to floating-point ties. With a draft model the texts have the same
    distribution; a seed gives the same *sampled* text again only without one, because measured times decide how much is
    drafted.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: DSparkDraftModel | None = None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.draft = draft
        config = target.config.get_text_config(decoder=True)
        # Not every architecture has a limit.
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a rendered prompt; the template has written its special tokens."""
        return list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def fits(self, prompt_tokens: int, sampling: Sampling) -> bool:
        """Whether a prompt of this length leaves room for the longest answer."""
        return self.context_length is None or prompt_tokens + sampling.max_new_tokens <= self.context_length

    def end_ids(self) -> list[int]:
        """The ids at which the target's `generation_config` ends a text."""
        ids = self.target.generation_config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], sampling: Sampling, stops: Stops, seed: int) -> list[Written]:
        """One text per prompt.

        Args:
            prompts: token ids.
            sampling: for all of them.
            stops: where texts end.
            seed: of the whole batch.
        """
        rows = [torch.tensor(prompt) for prompt in prompts]
        pad = stops.ids[0] if stops.ids else 0  # behind an end its own id does not matter
        device = self.target.device
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(device)
        kwargs = sampling.generate_kwargs()
        if self.draft is not None:
            kwargs["assistant_model"] = self.draft
        if stops.strings:
            kwargs |= {"stop_strings": stops.strings, "tokenizer": self.tokenizer}
        torch.manual_seed(seed)
        output = self.target.generate(
            input_ids=input_ids, attention_mask=mask, eos_token_id=stops.ids or None, pad_token_id=pad, **kwargs
        )
        return [self._written(row, stops) for row in output[:, input_ids.shape[1] :].tolist()]

    def _written(self, ids: list[int], stops: Stops) -> Written:
        end = next((i for i, id in enumerate(ids) if id in stops.ids), None)
        kept = ids if end is None else ids[:end]
        # Verbatim, so that the trainer's encoding of the text gives the same tokens again.
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for string in stops.strings:
            before, found, _ = text.partition(string)
            if found:
                tokens = len(self.tokenizer(before + found, add_special_tokens=False)["input_ids"])
                return Written(before, tokens, True)
        return Written(text, len(kept) + (end is not None), end is not None)
