"""Blocks for calibration: real `generate` calls on prompts, with the confidence head's logits of every round.

Prompts, not blocks, are split into those to fit on and those held out: blocks of one text are alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..candidate_generator import HOST_CONFIDENCE_THRESHOLD, HOST_NUM_ASSISTANT_TOKENS
from ..errors import DSparkConfigError, DSparkDataError
from ..generation.stats import GenerationStats
from ..modeling_dspark import DSparkDraftModel
from .partial import PartialResults
from .prompts import PromptSet, encode
from .runs import generation_kwargs

FIT, HELD_OUT = "fit", "held out"


@dataclass(frozen=True)
class Prompt:
    """One conversation of a prompt set, by its place there."""

    prompt_set: str
    index: int
    conversation: list[dict[str, str]]

    @property
    def digest(self) -> str:
        """A hash of the conversation: the same prompt in two files is one prompt."""
        return hashlib.sha256(json.dumps(self.conversation).encode()).hexdigest()[:16]


def all_prompts(prompt_sets: list[PromptSet]) -> list[Prompt]:
    """The first prompt of every set, then the second of every set, and so on: any beginning is a fair mixture."""
    columns = [[Prompt(s.name, i, c) for i, c in enumerate(s.conversations)] for s in prompt_sets]
    return [prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None]


def split_prompts(
    prompt_sets: list[PromptSet], held_out_share: float, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to fit on, and prompts to measure on: a share of every set, drawn by `seed` and the prompts' texts.

    Raises:
        DSparkConfigError: the share is not between 0 and 1.
        DSparkDataError: one side would be empty.
    """
    if not 0 < held_out_share < 1:
        raise DSparkConfigError(f"held_out_share is {held_out_share}, but must be above 0 and below 1.")
    prompts = all_prompts(prompt_sets)
    side: dict[str, str] = {}
    for prompt_set in prompt_sets:
        new = {p.digest for p in prompts if p.prompt_set == prompt_set.name} - set(side)
        order = sorted(new, key=lambda digest: hashlib.sha256(f"{seed} {digest}".encode()).digest())
        count = round(held_out_share * len(order))
        side.update((digest, HELD_OUT if i < count else FIT) for i, digest in enumerate(order))
    fit, held_out = ([p for p in prompts if side[p.digest] == name] for name in (FIT, HELD_OUT))
    if not fit or not held_out:
        raise DSparkDataError(
            f"{len(prompts)} prompts with held_out_share {held_out_share} give {len(fit)} to fit on and "
            f"{len(held_out)} held out; both need at least one. Give more prompts, or another share."
        )
    return fit, held_out


def refuse_shared_prompts(fit: list[Prompt], held_out: list[Prompt]) -> None:
    """
    Raises:
        DSparkDataError: a held-out prompt is fitted on as well.
    """
    known = {prompt.digest: prompt for prompt in fit}
    for prompt in held_out:
        if prompt.digest in known:
            other = known[prompt.digest]
            raise DSparkDataError(
                f"Held-out prompt {prompt.index} of {prompt.prompt_set!r} is prompt {other.index} of "
                f"{other.prompt_set!r}, which is fitted on; take it out of one of them."
            )


@dataclass(frozen=True)
class CollectionSettings:
    """How to generate.

    Attributes:
        max_new_tokens: the limit of every call.
        temperatures: 0 means greedy; above it, sampling with neither top-k nor top-p. At most one above 0: a draft
            model keeps one vector of confidence temperatures for sampling.
        seed: prompt i is sampled with seed + i.
        blocks: stop a side (fit, held out) once it has that many full blocks; `None`: use every prompt.
    """

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    blocks: int | None = None

    def __post_init__(self) -> None:
        sampled = [t for t in self.temperatures if t > 0]
        if not self.temperatures or min(self.temperatures) < 0 or len(sampled) > 1:
            raise DSparkConfigError(
                f"temperatures {list(self.temperatures)!r}: give 0 (greedy), one above 0, or both; confidences are "
                "calibrated for one sampling temperature."
            )


@dataclass
class PromptBlocks:
    """The rounds of one `generate` call.

    Attributes:
        temperature, prompt_set, index, side: which call, and what it is for (`"fit"` or `"held out"`).
        confidence_logits: per round the raw logit of every draft; empty where nothing was drafted.
        accepted: per round, drafts accepted.
        proposed: per round, drafts whose fate is known. Where the text ended on a draft, nothing is known of those
            after it, so it is that draft's number there.
        new_tokens: of the call.
        failure: the exception that switched drafting off, if any.
    """

    temperature: float
    prompt_set: str
    index: int
    side: str
    confidence_logits: list[list[float]]
    accepted: list[int]
    proposed: list[int]
    new_tokens: int
    failure: str | None = None

    @classmethod
    def from_stats(cls, stats: GenerationStats, temperature: float, prompt: Prompt, side: str) -> PromptBlocks:
        """Of a call that recorded confidences."""
        accepted, proposed = list(stats.accepted), list(stats.proposed)
        # A round commits its accepted drafts and one token of the target's own. Where that one is missing, the last
        # draft ended the text (an eos).
        if accepted and stats.new_tokens < 1 + sum(a + 1 for a in accepted):
            proposed[-1] = accepted[-1]
        logits = [list(row) for row in stats.confidence_logits]
        return cls(
            temperature,
            prompt.prompt_set,
            prompt.index,
            side,
            logits,
            accepted,
            proposed,
            stats.new_tokens,
            stats.failure,
        )

    def full(self, positions: int) -> int:
        """How many full blocks of `positions` drafts there are."""
        return sum(proposed == positions for proposed in self.proposed)


def stack(results: list[PromptBlocks], positions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All rounds as arrays for `SequentialTemperatureScaling.fit`.

    Returns:
        Confidence logits, float64 [N, γ], NaN where nothing was drafted; accepted and proposed, int64 [N].
    """
    rows = [row for result in results for row in result.confidence_logits]
    logits = np.full((len(rows), positions), np.nan)
    for i, row in enumerate(rows):
        logits[i, : len(row)] = row
    accepted = np.array([a for result in results for a in result.accepted], dtype=np.int64)
    proposed = np.array([p for result in results for p in result.proposed], dtype=np.int64)
    return logits, accepted, proposed


@contextlib.contextmanager
def fixed_drafting(draft: DSparkDraftModel, threshold: float = 0.0, record: bool = False) -> Iterator[dict[str, Any]]:
    """Within it the draft gives full blocks, or up to a static threshold on c_k; nothing else decides their length.

    Gives keywords for `generate`: the host's own defaults, which leave both knobs to the draft's `generation_config`
    whatever the target's says. (A threshold of 0.4 could not be asked for in the call: it is the host's default.)
    """
    before = draft.scheduler, draft.record_confidence, draft.generation_config
    draft.scheduler, draft.record_confidence = None, record
    draft.generation_config = GenerationConfig(
        num_assistant_tokens=draft.config.num_draft_tokens, assistant_confidence_threshold=threshold
    )
    try:
        yield {
            "num_assistant_tokens": HOST_NUM_ASSISTANT_TOKENS,
            "assistant_confidence_threshold": HOST_CONFIDENCE_THRESHOLD,
        }
    finally:
        draft.scheduler, draft.record_confidence, draft.generation_config = before


def generate_stats(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    prompt: Prompt,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    threshold: float = 0.0,
    record: bool = False,
) -> GenerationStats:
    """Generates for one prompt and returns what the draft model did; the text itself is of no interest here."""
    inputs = encode(tokenizer, prompt.conversation, target.device)
    kwargs = generation_kwargs(max_new_tokens, temperature)
    torch.manual_seed(seed + prompt.index)
    with fixed_drafting(draft, threshold, record) as knobs:
        target.generate(**inputs, assistant_model=draft, **kwargs, **knobs)
    return cast(GenerationStats, draft.last_stats)


def collect(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    sides: dict[str, list[Prompt]],
    settings: CollectionSettings,
    partial: PartialResults | None = None,
    on_result: Callable[[PromptBlocks], None] = lambda result: None,
) -> list[PromptBlocks]:
    """Generates with full blocks and records every round.

    Args:
        target: the target model.
        tokenizer: the target's, with a chat template.
        draft: a draft model with a confidence head.
        sides: prompts by what they are for.
        settings: how to generate, and how many blocks are wanted.
        partial: where finished prompts are kept; those already there are not run again.
        on_result: called after each prompt, also for those found in `partial`.

    Raises:
        DSparkConfigError: the draft has no confidence head.
        DSparkDataError: the tokenizer has no chat template.
        DSparkTargetError: the draft does not fit the target.
    """
    if draft.confidence_head is None:
        raise DSparkConfigError("This draft model has no confidence head, so there is nothing to calibrate.")
    draft.bind_target(target)
    results = []
    for temperature in settings.temperatures:
        for side, prompts in sides.items():
            found = 0
            for prompt in prompts:
                if settings.blocks is not None and found >= settings.blocks:
                    break
                key = (temperature, prompt.digest, prompt.index)
                row = partial.get(key) if partial is not None else None
                if row is not None:  # file names and the split may be others by now
                    result = PromptBlocks(**{**row, "prompt_set": prompt.prompt_set, "side": side})
                else:
                    stats = generate_stats(
                        target,
                        tokenizer,
                        draft,
                        prompt,
                        temperature,
                        settings.max_new_tokens,
                        settings.seed,
                        record=True,
                    )
                    result = PromptBlocks.from_stats(stats, temperature, prompt, side)
                    if partial is not None:
                        partial.add(key, asdict(result))
                found += result.full(draft.config.num_draft_tokens)
                results.append(result)
                on_result(result)
    return results
