"""Throughput of many requests at once: plain batches, transformers' continuous batching, and batches with a draft."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerBase

from ..generation.stats import BatchGenerationStats, GenerationStats
from ..modeling_dspark import DSparkDraftModel
from .partial import PartialResults
from .prompts import encode
from .runs import generation_kwargs

PLAIN, CONTINUOUS, FULL, SCHEDULED = "plain", "continuous", "full blocks", "scheduled"
CONTINUOUS_SCHEDULED = "continuous + draft"
WARM_UP_TOKENS = 8
_PAGE = 32  # tokens of a page of the continuous cache


@dataclass
class Chunk:
    """One group of requests that ran together.

    Attributes:
        mode: of `modes`.
        concurrency: how many requests there may be at once; the last group of the prompts may have fewer.
        requests: how many there were.
        tokens: new tokens of all requests.
        seconds: wall time from the first to the last, prefill included.
        request_speeds: new tokens per second of each request, until it was finished. In a batch a request is taken to
            have finished in proportion to its share of the batch's steps.
        verified: drafts verified per request and round; 0 without a draft.
        accepted_length: tokens per request and round; 1 without a draft.
    """

    mode: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    request_speeds: list[float]
    verified: float = 0.0
    accepted_length: float = 1.0


@dataclass
class ModeResult:
    """A mode at one concurrency: medians and means over its groups.

    Attributes:
        tokens_per_second: all new tokens over all seconds.
        speed: median over the groups of plain seconds per token over this mode's, measured in turn.
        request_speed: mean tokens per second of a request.
        verified, accepted_length: means over requests and rounds.
    """

    mode: str
    concurrency: int
    tokens_per_second: float
    speed: float
    request_speed: float
    verified: float
    accepted_length: float


def modes(lengths: Sequence[int], continuous: bool = True) -> list[str]:
    """What is measured; `lengths` are fixed block lengths besides the full one."""
    own = [FULL, *(f"length {n}" for n in lengths), SCHEDULED]
    return [PLAIN, CONTINUOUS, *own, CONTINUOUS_SCHEDULED] if continuous else [PLAIN, *own]


def measure(
    target: Any,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    conversations: Sequence[list[dict[str, str]]],
    concurrencies: Sequence[int],
    measured_modes: Sequence[str],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    partial: PartialResults | None = None,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
) -> list[Chunk]:
    """Runs every group of prompts in every mode, one mode after the other, in turning order: drift hits all alike.

    Args:
        target, draft: the pair.
        tokenizer: the target's, with a chat template.
        conversations: the prompts; groups of each concurrency are taken from them in order.
        partial: keeps finished groups, by (concurrency, mode, group).
        on_chunk: called with each result, also with those that were kept.
    """
    results = []
    scheduler = draft.scheduler
    try:
        for concurrency in concurrencies:
            warm: set[str] = set()
            for index, group in enumerate(_groups(conversations, concurrency)):
                turn = index % len(measured_modes)
                for mode in [*measured_modes[turn:], *measured_modes[:turn]]:
                    key = (float(concurrency), mode, index)
                    row = None if partial is None else partial.get(key)
                    if row is None:
                        if mode not in warm:
                            _run(target, tokenizer, draft, group, mode, WARM_UP_TOKENS, temperature, concurrency)
                            warm.add(mode)
                        torch.manual_seed(seed + index)
                        chunk = _run(target, tokenizer, draft, group, mode, max_new_tokens, temperature, concurrency)
                        if partial is not None:
                            partial.add(key, asdict(chunk))
                    else:
                        chunk = Chunk(**row)
                    results.append(chunk)
                    on_chunk(chunk)
    finally:
        draft.scheduler = scheduler
    return results


def summarize(chunks: Sequence[Chunk]) -> list[ModeResult]:
    """One result per concurrency and mode, in the order of the first groups."""
    by_place: dict[tuple[int, str], list[Chunk]] = {}
    for chunk in chunks:
        by_place.setdefault((chunk.concurrency, chunk.mode), []).append(chunk)
    results = []
    for (concurrency, mode), own in by_place.items():
        plain = by_place[concurrency, PLAIN]
        speeds = [(p.seconds / p.tokens) / (c.seconds / c.tokens) for p, c in zip(plain, own)]
        requests = sum(chunk.requests for chunk in own)
        results.append(
            ModeResult(
                mode=mode,
                concurrency=concurrency,
                tokens_per_second=sum(c.tokens for c in own) / sum(c.seconds for c in own),
                speed=statistics.median(speeds),
                request_speed=statistics.mean(speed for c in own for speed in c.request_speeds),
                verified=sum(c.verified * c.requests for c in own) / requests,
                accepted_length=sum(c.accepted_length * c.requests for c in own) / requests,
            )
        )
    return results


def _groups(conversations: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(conversations), size):
        yield conversations[start : start + size]


def _run(
    target: Any,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    group: Sequence[list[dict[str, str]]],
    mode: str,
    max_new_tokens: int,
    temperature: float,
    concurrency: int,
) -> Chunk:
    kwargs = generation_kwargs(max_new_tokens, temperature)
    if mode in (CONTINUOUS, CONTINUOUS_SCHEDULED):
        draft.scheduler = "auto"
        own_draft = draft if mode == CONTINUOUS_SCHEDULED else None
        return _run_continuous(target, tokenizer, own_draft, group, kwargs, concurrency)
    prompts = [encode(tokenizer, conversation, target.device)["input_ids"][0] for conversation in group]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if mode != PLAIN:
        draft.scheduler = "auto" if mode == SCHEDULED else None
        kwargs["assistant_model"] = draft
        if mode.startswith("length "):
            kwargs["num_assistant_tokens"] = int(mode.removeprefix("length "))
    start = time.perf_counter()
    output = target.generate(**inputs, **kwargs, pad_token_id=pad)
    _synchronize(target)
    seconds = time.perf_counter() - start
    counts = _new_tokens(output[:, width:], target)
    steps: Sequence[int] = counts
    verified, accepted_length = 0.0, 1.0
    if mode != PLAIN:
        stats = cast("GenerationStats | BatchGenerationStats", draft.last_stats)
        rows = [stats] if isinstance(stats, GenerationStats) else stats.rows
        counts, steps = [row.new_tokens for row in rows], [row.rounds + 1 for row in rows]
        taken = max(sum(row.rounds for row in rows), 1)
        verified = sum(sum(row.proposed) for row in rows) / taken
        accepted_length = stats.accepted_length
    longest = max(steps)
    speeds = [count / (seconds * own / longest) for count, own in zip(counts, steps)]
    return Chunk(mode, concurrency, len(group), sum(counts), seconds, speeds, verified, accepted_length)


def _run_continuous(
    target: Any,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel | None,
    group: Sequence[list[dict[str, str]]],
    kwargs: dict[str, Any],
    concurrency: int,
) -> Chunk:
    prompts = [encode(tokenizer, conversation, "cpu")["input_ids"][0].tolist() for conversation in group]
    own = {name: value for name, value in target.generation_config.to_dict().items() if name.endswith("token_id")}
    config = GenerationConfig(**own, **{name: value for name, value in kwargs.items() if value is not None})
    pages = max(len(prompt) for prompt in prompts) // _PAGE + kwargs["max_new_tokens"] // _PAGE + 2
    engine = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=pages * concurrency,
        max_batch_tokens=max(sum(len(prompt) for prompt in prompts), 8 * concurrency),
        max_requests_per_batch=concurrency,
    )
    more = {} if draft is None else {"assistant_model": draft}
    with target.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=engine, block=True, timeout=5, **more
    ) as manager:
        start = time.perf_counter()
        manager.add_requests(prompts)
        outputs: list[Any] = []
        while len(outputs) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs.append(result)
            elif not manager.is_running():
                break
        seconds = time.perf_counter() - start
        stats = None if draft is None else manager.draft_stats
    counts = [len(output.generated_tokens) for output in outputs]
    speeds = [count / (output.lifespan[1] - output.lifespan[0]) for count, output in zip(counts, outputs)]
    if stats is None:
        return Chunk(CONTINUOUS, concurrency, len(group), sum(counts), seconds, speeds)
    verified = stats.proposed / max(stats.request_steps, 1)
    return Chunk(
        CONTINUOUS_SCHEDULED, concurrency, len(group), sum(counts), seconds, speeds, verified, stats.accepted_length
    )


def _new_tokens(texts: torch.Tensor, target: Any) -> list[int]:
    """New tokens of each row, its end-of-sequence token included, the padding after it not."""
    ends = target.generation_config.eos_token_id
    ends = set() if ends is None else set(ends if isinstance(ends, list) else [ends])
    return [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in texts.tolist()]


def _synchronize(target: Any) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize()
