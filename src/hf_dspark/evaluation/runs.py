"""One timed `generate` call, measured alike with and without a draft model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from transformers.generation.streamers import BaseStreamer

from ..generation.stats import GenerationStats
from ..modeling_dspark import DSparkDraftModel

PLAIN = "plain"


@dataclass
class Run:
    """What one `generate` call gave. Times are wall-clock seconds from the start of the call.

    Attributes:
        name: `"plain"`, or the draft model's name.
        tokens: the new token ids, without the prompt.
        first_token_seconds: when the first new token was there (prefill).
        total_seconds: when the call returned.
        stats: the draft model's `last_stats`; `None` for plain runs.
    """

    name: str
    tokens: list[int]
    first_token_seconds: float
    total_seconds: float
    stats: GenerationStats | None = None

    @property
    def decode_tokens(self) -> int:
        """New tokens, the first excluded: it comes from the prefill."""
        return len(self.tokens) - 1

    @property
    def decode_seconds(self) -> float:
        """Time from the first token to the end of the call."""
        return self.total_seconds - self.first_token_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, the first token excluded; `None` when there was only one token."""
        return ratio(self.decode_tokens, self.decode_seconds) if self.decode_tokens > 0 else None

    def from_draft(self) -> list[bool]:
        """Per new token, whether it is an accepted draft token; the others are the target's own."""
        flags = [False]
        for accepted in self.stats.accepted if self.stats is not None else ():
            flags += [True] * accepted + [False]
        # The text may end inside a block, on a draft token: then that round has no token of the target's own.
        flags = flags[: len(self.tokens)]
        return flags + [False] * (len(self.tokens) - len(flags))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `Run.from_dict` gives the run back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """The inverse of `to_dict`."""
        stats = values["stats"]
        return cls(**{**values, "stats": None if stats is None else GenerationStats(**stats)})


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`; `None` when either is missing or the denominator is not positive."""
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def decode_speedup(plain: Run, draft: Run) -> float | None:
    """Plain seconds per token / draft seconds per token, the first token of both excluded."""
    return ratio(ratio(plain.decode_seconds, plain.decode_tokens), ratio(draft.decode_seconds, draft.decode_tokens))


def end_to_end_speedup(plain: Run, draft: Run) -> float | None:
    """Plain seconds per token / draft seconds per token over the whole calls."""
    return ratio(ratio(plain.total_seconds, len(plain.tokens)), ratio(draft.total_seconds, len(draft.tokens)))


class TokenClock(BaseStreamer):
    """A streamer that notes when the first new token arrived, and hands every new token on.

    `generate` calls `put` with the prompt first, then with every committed token or block of tokens. A draft model's
    loop does the same, so both kinds of run are timed at the same point.
    """

    def __init__(self, on_tokens: Any = None):
        """`on_tokens`: called with each list of new ids, inside the timed call: it must be quick."""
        self.first_token_at: float | None = None
        self._on_tokens = on_tokens
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt (ignored), then new ids."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self._on_tokens is not None:
            self._on_tokens(value.reshape(-1).tolist())

    def end(self) -> None:
        """Nothing is held back, so there is nothing to flush."""


def generation_kwargs(
    max_new_tokens: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> dict[str, Any]:
    """Keywords of `generate` for a temperature; 0 means greedy. `top_k=0` and `top_p=1` switch the two off."""
    if temperature == 0:
        # None also unsets what the target's generation_config may ask for, so that the host has nothing to warn about.
        choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    else:
        choice = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {"max_new_tokens": max_new_tokens, **choice}


def timed_generate(
    target: Any,
    inputs: dict[str, torch.Tensor],
    draft: DSparkDraftModel | None = None,
    name: str = PLAIN,
    seed: int | None = None,
    on_tokens: Any = None,
    **kwargs: Any,
) -> Run:
    """Runs `target.generate(**inputs, **kwargs)`, with `draft` where one is given, and times it.

    Args:
        target: the target, a `PreTrainedModel` that generates.
        inputs: `input_ids` and `attention_mask`, int64 [1, T].
        name: the run's name in the records.
        seed: set before the call, for sampling.
        on_tokens: called with each list of new ids as it is committed.
        kwargs: those of `generate`.
    """
    if draft is not None:
        kwargs["assistant_model"] = draft
    if seed is not None:
        torch.manual_seed(seed)
    clock = TokenClock(on_tokens)
    device_type = target.device.type
    _synchronize(device_type)  # work left over from before is not this run's
    start = time.perf_counter()
    output = target.generate(**inputs, streamer=clock, **kwargs)
    _synchronize(device_type)
    total = time.perf_counter() - start
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    first = clock.first_token_at - start if clock.first_token_at is not None else total
    return Run(name, tokens, first, total, cast(GenerationStats, draft.last_stats) if draft is not None else None)


def _synchronize(device_type: str) -> None:
    if device_type != "cpu":
        torch.accelerator.synchronize()
