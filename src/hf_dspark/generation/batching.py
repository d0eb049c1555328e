"""The decoding loop of several rows: drafting, verification and schedule of all rows together (paper §3.2, §5.3).

A round is: one packed draft pass, one schedule over all rows, one packed forward on Σ(1+ℓ) tokens without padding, and
then each row commits on its own, as a single row does (`committing.py`). Rows finish independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..candidate_generator import DraftBlock
from ..errors import DSparkGenerationError
from ..modeling_dspark import DSparkDraftModel
from .batch_drafting import BatchCandidateGenerator, RowRequest
from .capture import captured_prefill
from .committing import CommittedText
from .loop import Host
from .outputs import OutputRecorder
from .pacing import PACKED, PAUSED, Pacer
from .packed import PackedCache, packed_forward, prove_packable
from .stats import BatchGenerationStats, GenerationStats

PREFILL_TOKENS = 4096  # of all rows in one forward, unless `prefill_chunk_size` says otherwise

# Model inputs that the loop knows how to give to each row; the host's own bookkeeping beside them is not needed.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "inputs_embeds", "cache", "use_cache", "logits_to_keep"}
_IGNORED_INPUTS = {"output_hidden_states", "output_attentions", "cache_position"}


class BatchDecodingLoop:
    """One `generate` call of several rows.

    Args:
        host: the target.
        draft: its draft model.
        input_ids: int64 [R, T], left-padded.
        processors: each row's own.
        stopping_criteria, generation_config, model_kwargs: the call's, as prepared by `generate`.
        pad_token_id: what a row that ends early is filled up with.

    Raises:
        DSparkGenerationError: the call asks for what several rows cannot have; the message names it.
    """

    def __init__(
        self,
        host: Host,
        draft: DSparkDraftModel,
        input_ids: torch.Tensor,
        processors: Sequence[LogitsProcessorList],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        pad_token_id: int,
    ):
        _refuse(generation_config, model_kwargs)
        self.host, self.draft = host, draft
        self.config, self.pad_token_id = generation_config, pad_token_id
        self.embeds = model_kwargs.get("inputs_embeds")
        prompt_length = (input_ids if self.embeds is None else self.embeds).shape[1]
        self.real, self.positions = _real_tokens(model_kwargs, len(input_ids), prompt_length, input_ids.device)
        do_sample = bool(generation_config.do_sample)
        self.texts = [
            CommittedText(
                input_ids[r : r + 1], processors[r], stopping_criteria, do_sample, OutputRecorder(generation_config)
            )
            for r in range(len(input_ids))
        ]
        self.prompts = input_ids
        self.generator = BatchCandidateGenerator(draft, generation_config, processors)
        self.cache = PackedCache(len(input_ids))
        # Without an eos criterion plain `generate` lets rows that have stopped go on until the last one stops.
        self.ends_together = not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.stats = BatchGenerationStats([GenerationStats() for _ in self.texts])
        if draft.confidence_head is not None:
            self.stats.calibrated = self.generator.temperatures is not None
            for row in self.stats.rows:
                row.calibrated = self.stats.calibrated

    def run(self) -> Any:
        """Prefill and rounds; returns what plain `generate` returns."""
        if self.embeds is None:
            rows = [ids[real] for ids, real in zip(self.prompts, self.real)]
            prove_packable(self.host.target, rows, self.host.packed)
        with self.host.packed():
            self._prefill()
            with self.host.decoding():
                while self._active():
                    self._round(self._active())
                if self.ends_together:
                    self._let_all_reach(max(text.new_tokens for text in self.texts))
        for text, row in zip(self.texts, self.stats.rows):
            row.new_tokens = text.new_tokens
            row.failure = self.generator.failure
        self.stats.failure = self.generator.failure
        return self._output()

    def _active(self) -> list[int]:
        return [r for r, text in enumerate(self.texts) if not text.finished]

    def _let_all_reach(self, new_tokens: int) -> None:
        """Rows that have stopped go on, past any stop, until each has `new_tokens` tokens."""
        for text in self.texts:
            short = text.new_tokens < new_tokens
            text.finished = not short
            text.limit_to(text.ids.shape[1] - text.new_tokens + new_tokens)
        while self._active():
            self._round(self._active())

    # ------------------------------------------------------------------------------------------------------------
    # Prefill
    # ------------------------------------------------------------------------------------------------------------
    def _prefill(self) -> None:
        generator = self.generator
        last_logits: dict[int, torch.Tensor] = {}  # [V] by row
        layer_ids = generator.layer_ids
        tapped = generator.model_kwargs_overrides["output_hidden_states"]
        with captured_prefill(self.host.target, layer_ids, generator.features) as features:
            for pieces in self._packs():
                rows = [r for r, _, _ in pieces]
                counts = [end - start for _, start, end in pieces]
                ends = torch.tensor(counts).cumsum(0) - 1
                positions = torch.cat([self.positions[r][start:end] for r, start, end in pieces])
                outputs = packed_forward(
                    self.host.target,
                    self.cache,
                    rows,
                    counts,
                    positions,
                    **self._prompt_inputs(pieces),
                    output_hidden_states=tapped,
                    logits_to_keep=ends.to(self.prompts.device),
                )
                for row, logits in zip(rows, outputs.logits[0]):
                    last_logits[row] = logits
                known = features[-1][0].split(counts)
                for row, part, at in zip(rows, known, positions.split(counts)):
                    generator.observe_row(row, part, at)
        for stats, context_tokens in zip(self.stats.rows, generator.row_context_tokens):
            stats.context_tokens = context_tokens
        self.pacer = Pacer(self.draft, self.host.target, sum(self.cache.lengths) / len(self.texts), way=PACKED)
        for r, text in enumerate(self.texts):
            text.commit(last_logits[r][None, None], None)

    def _prompt_inputs(self, pieces: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
        name, source = ("input_ids", self.prompts) if self.embeds is None else ("inputs_embeds", self.embeds)
        return {name: torch.cat([source[r][self.real[r]][start:end] for r, start, end in pieces])}

    def _packs(self) -> Iterator[list[tuple[int, int, int]]]:
        """The prompts in pieces (row, start, end), as many tokens in a forward as the limit allows."""
        limit = self.config.prefill_chunk_size or PREFILL_TOKENS
        pack: list[tuple[int, int, int]] = []
        room = limit
        for r, positions in enumerate(self.positions):
            start = 0
            while start < len(positions):
                end = min(start + room, len(positions))
                pack.append((r, start, end))
                room -= end - start
                start = end
                if room == 0:
                    yield pack
                    pack, room = [], limit
        if pack:
            yield pack

    # ------------------------------------------------------------------------------------------------------------
    # Rounds
    # ------------------------------------------------------------------------------------------------------------
    def _round(self, active: list[int]) -> None:
        started = perf_counter()
        generator = self.generator
        requests = [RowRequest(r, self.texts[r].ids, self._anchor_position(r), self.texts[r].budget) for r in active]
        limit = max(generator.limit if q.budget is None else min(generator.limit, q.budget) for q in requests)
        plan = self.pacer.plan(limit, len(active))
        if plan.drafting:
            blocks = generator.propose_rows(requests, plan.reason or "full block", self.pacer.decider(plan), plan.depth)
        else:
            blocks = [generator.empty_block(request.ids, plan.reason or "") for request in requests]
        drafted = perf_counter()
        counts = [block.length + 1 for block in blocks]
        tokens = torch.cat([part for q, b in zip(requests, blocks) for part in (q.ids[:, -1], b.token_ids[0])])
        positions = torch.cat([torch.arange(q.position, q.position + n) for q, n in zip(requests, counts)])
        positions = positions.to(tokens.device)
        tapped = generator.model_kwargs_overrides["output_hidden_states"] if generator.failure is None else None
        outputs = packed_forward(
            self.host.target, self.cache, active, counts, positions, tokens, output_hidden_states=tapped
        )
        committed = [
            self.texts[r].commit(rows, block)
            for r, rows, block in zip(active, outputs.logits.split(counts, dim=1), blocks)
        ]
        verified = perf_counter()
        known = None if tapped is None else generator.features(outputs.hidden_states)[0].split(counts)
        for i, (r, (count, _, _)) in enumerate(zip(active, committed)):
            self.cache.crop(r, counts[i] - count)
            if self.texts[r].finished and not self.ends_together:
                generator.forget_row(r)
            elif known is not None:
                at = torch.arange(requests[i].position, requests[i].position + count, device=positions.device)
                generator.observe_row(r, known[i][:count], at)
        self._record(plan, limit, active, blocks, committed, drafted - started, verified - drafted)

    def _anchor_position(self, row: int) -> int:
        return int(self.positions[row][-1]) + self.texts[row].new_tokens

    def _record(
        self,
        plan: Any,
        limit: int,
        active: list[int],
        blocks: Sequence[DraftBlock],
        committed: list[tuple[int, int, int]],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        stats, generator = self.stats, self.generator
        tokens = sum(block.length + 1 for block in blocks)
        stats.tokens.append(tokens)
        stats.active.append(len(active))
        stats.reasons.append(plan.reason or max((b.reason for b in blocks), key=[b.reason for b in blocks].count))
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds
        stats.paused_rounds += plan.reason == PAUSED
        for r, block, (_, accepted, proposed) in zip(active, blocks, committed):
            row = stats.rows[r]
            row.draft_seconds += draft_seconds / len(active)
            row.verify_seconds += verify_seconds / len(active)
            row.paused_rounds += block.reason == PAUSED
            reason = block.reason if proposed == block.length else "NaN logits"
            logits = block.confidence_logits if self.draft.record_confidence else ()
            row.add_round(proposed, accepted, block.scheduled, reason, block.confidences, logits)
        if generator.failure is None:
            confidences = [list(block.confidences) for block in blocks if block.confidences]
            count = sum(count for count, _, _ in committed)
            self.pacer.record(plan, limit, tokens, count, draft_seconds, verify_seconds, confidences, len(active))

    # ------------------------------------------------------------------------------------------------------------
    # Output
    # ------------------------------------------------------------------------------------------------------------
    def _output(self) -> Any:
        longest = max(text.ids.shape[1] for text in self.texts)
        sequences = self.prompts.new_full((len(self.texts), longest), self.pad_token_id)
        for r, text in enumerate(self.texts):
            sequences[r, : text.ids.shape[1]] = text.ids[0]
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_stacked([text.recorder.scores for text in self.texts]),
            logits=_stacked([text.recorder.logits for text in self.texts]),
        )


def _stacked(rows: list[tuple | None]) -> tuple[torch.Tensor, ...] | None:
    """Scores [1, V] by row and token → [R, V] by token; 0 where a row had ended."""
    kept = [row for row in rows if row is not None]
    if not kept:
        return None
    blank = torch.zeros_like(kept[0][0])
    return tuple(
        torch.cat([row[i] if i < len(row) else blank for row in kept]) for i in range(max(len(row) for row in kept))
    )


def _real_tokens(
    model_kwargs: dict[str, Any], rows: int, length: int, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Which prompt tokens are real, bool [R, T], and their absolute positions, int64 [T_r] per row."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    for name, given in (("attention_mask", mask), ("attention_mask or position_ids", positions)):
        if given is not None and given.shape != (rows, length):  # the host makes position_ids from the mask
            raise DSparkGenerationError(
                f"{name} has shape {list(given.shape)}, but several rows with a draft model need one entry per prompt "
                f"token, {[rows, length]}."
            )
    real = torch.ones((rows, length), dtype=torch.bool, device=device) if mask is None else mask.to(device) != 0
    if not bool(real[:, -1].all()):
        raise DSparkGenerationError(
            "The batch is padded on the right: a row ends with padding, and nothing sensible follows it. Tokenize with "
            "padding_side='left'."
        )
    if positions is None:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    return real, [p[r] for p, r in zip(positions.to(device), real)]


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuses, before anything is computed, what several rows cannot have."""
    wrong = None
    if config.cache_implementation not in (None, "dynamic"):
        wrong = f"cache_implementation={config.cache_implementation!r}"
    elif config.return_dict_in_generate and config.output_hidden_states:
        wrong = "output_hidden_states"
    elif config.return_dict_in_generate and config.output_attentions:
        wrong = "output_attentions"
    else:
        given = {name for name, value in model_kwargs.items() if value is not None}
        unknown = sorted(given - _KNOWN_INPUTS - _IGNORED_INPUTS)
        if unknown:
            wrong = f"The model input {', '.join(unknown)}"
    if wrong is not None:
        raise DSparkGenerationError(
            f"{wrong} cannot be had for several rows with a draft model, whose rows are of different lengths while "
            "they are decoded; generate one row at a time, or without `assistant_model`."
        )
