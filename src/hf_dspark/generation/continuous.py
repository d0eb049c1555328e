"""DSpark in transformers' continuous batching: its engine, whose decoding requests bring their drafts along.

The host's engine packs queries of different lengths into one step, so a decoding request with ℓ drafts is to it a
small prefill of 1 + ℓ tokens. What is added here: proposals before a step is scheduled, the logits of every row that
is checked, acceptance, and lengths taken back in the paged cache. Besides `seam.py` this is the only file that reaches
into the host's private parts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.utils import logging

from ..candidate_generator import ROW_WISE_PROCESSORS, DraftBlock
from ..errors import DSparkGenerationError
from ..modeling_dspark import DSparkDraftModel
from .batch_drafting import BatchCandidateGenerator, RowRequest
from .pacing import PAGED, PAUSED, Pacer
from .packed import PAGED_ATTENTION
from .verification import verify_greedy, verify_sampled

logger = logging.get_logger(__name__)


@dataclass
class ContinuousStats:
    """What the draft model did for a manager so far; totals, so that a server may run for ever.

    Attributes:
        steps: forwards that held at least one decoding request.
        request_steps: the same, counted once per decoding request.
        proposed, accepted: drafts that were verified, and those of them that were committed.
        paused_steps: steps without drafts because drafting did not pay.
        draft_seconds: wall time of drafting.
        shared_tokens: prompt tokens that came from another request's cache (prefix sharing): the draft has no features
            for them, and drafts for that request with less context.
        failure: the exception that switched drafting off, if any.
    """

    steps: int = 0
    request_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    paused_steps: int = 0
    draft_seconds: float = 0.0
    shared_tokens: int = 0
    failure: str | None = None

    @property
    def accepted_length(self) -> float:
        """Tokens per decoding request and step, the target's own included; 1 is what plain decoding has."""
        return 1 + self.accepted / self.request_steps if self.request_steps else 1.0


@dataclass
class _Drafted:
    """A request's place in the draft's context, and its proposal for the coming step."""

    state: RequestState
    row: int
    block: DraftBlock | None = None


@dataclass
class _Committed:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    accepted: int = 0


class DSparkBatchProcessor(ContinuousBatchProcessor):
    """The host's batch processor, with drafts.

    It is made by the host's manager, as the host's own kind, and given its draft by `attach`.
    """

    def attach(self, draft: DSparkDraftModel, target: PreTrainedModel, config: GenerationConfig) -> None:
        """Takes the draft model; called once, before the first step."""
        self.draft, self.target, self.generation_config = draft, target, config
        self.stats = ContinuousStats()
        for allocator in self.cache.cache_allocators.values():
            if allocator.layer_type == SLIDING_ATTENTION:
                # A ring of exactly the window would have lost what a refused draft has overwritten. Attention itself
                # keeps to the window.
                allocator.sliding_window += draft.config.num_draft_tokens
                if self.cache.read_cache_limit is not None:
                    self.cache.read_cache_limit = allocator.sliding_window
        self._begin()

    def reset(self) -> None:
        """For another generation loop."""
        super().reset()
        self._begin()

    def _begin(self) -> None:
        self.generator = BatchCandidateGenerator(
            self.draft, self.generation_config, [self.logit_processor.logits_processor]
        )
        self.pacer = Pacer(self.draft, self.target, 0, way=PAGED)
        self._free_rows = [0]
        self._drafted: dict[str, _Drafted] = {}
        self._plan: Any = None
        self._limit = 0
        self._draft_seconds = 0.0

    # ------------------------------------------------------------------------------------------------------------
    # Before a step: proposals
    # ------------------------------------------------------------------------------------------------------------
    @torch.no_grad()  # the engine's thread has none of its own
    def prepare_next_batch(self) -> bool:
        """Drafts for the decoding requests, then lets the host schedule the step."""
        started = perf_counter()
        self._propose()
        self._draft_seconds = perf_counter() - started
        return super().prepare_next_batch()

    def _propose(self) -> None:
        active = self.scheduler.active_requests
        for request_id, own in list(self._drafted.items()):
            if active.get(request_id) is not own.state:  # finished, cancelled, failed, or begun anew
                self._forget(request_id)
        decoding = [state for state in active.values() if state.status == RequestStatus.DECODING]
        waiting = [state for state in decoding if len(state.tokens_to_process) == 1 and state.generated_tokens]
        self._plan = None
        if not waiting:
            return
        room = self.max_batch_tokens // len(decoding) - 1  # a decoding request is never split over two steps
        requests = []
        for state in waiting:
            left = state._new_tokens_limit - state.generated_len() - 1
            ids = torch.tensor([state.tokens_to_process], device=self.model_device)
            requests.append(RowRequest(self._place(state).row, ids, state.position_offset, max(min(left, room), 0)))
        self._limit = max(min(self.generator.limit, request.budget or 0) for request in requests)
        self.pacer.set_context(sum(request.position for request in requests) / len(requests))
        self._plan = self.pacer.plan(self._limit, len(requests))
        self.stats.paused_steps += self._plan.reason == PAUSED
        if not self._plan.drafting:
            return
        prefill = sum(len(state.remaining_prefill_tokens) for state in active.values())
        prefill += sum(len(state.remaining_prefill_tokens) for state in self.scheduler.waiting_requests.values())
        other = min(prefill, max(self.max_batch_tokens - len(decoding), 0))
        decide = self.pacer.decider(self._plan, other)
        blocks = self.generator.propose_rows(requests, self._plan.reason or "full block", decide, self._plan.depth)
        for state, block in zip(waiting, blocks):
            own = self._drafted[state.request_id]
            if block.length and self.cache.can_store_request_tokens(state, 1 + block.length, dry_run=True):
                own.block = block
                state.tokens_to_process = [*state.tokens_to_process, *block.token_ids[0].tolist()]
        self.stats.failure = self.generator.failure

    def _place(self, state: RequestState) -> _Drafted:
        """The request's row; a new one on its first sight."""
        own = self._drafted.get(state.request_id)
        if own is None or own.state is not state:
            if own is not None:
                self._forget(state.request_id)
            row = self._free_rows.pop() if self._free_rows else self.generator.add_row()
            own = self._drafted[state.request_id] = _Drafted(state, row)
        return own

    def _forget(self, request_id: str) -> None:
        own = self._drafted.pop(request_id)
        self.generator.forget_row(own.row)
        self._free_rows.append(own.row)

    # ------------------------------------------------------------------------------------------------------------
    # A step: forward and acceptance
    # ------------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _generation_step(self, model: Any) -> None:
        """The forward on every row that is checked, and what each request commits."""
        started = perf_counter()
        inputs: Any = self.inputs_and_outputs.get_model_kwargs(use_padding=False)
        batch = self.inputs_and_outputs.requests_in_batch
        counts = [future.query_length for future in batch]
        read: list[int] = []  # rows of the pack whose logits are needed
        start = 0
        for future in batch:
            end = start + future.query_length
            own = self._drafted.get(future.state.request_id)
            checked = 1 if own is None or own.block is None else 1 + own.block.length
            if future.has_new_token:
                read += range(end - checked, end)
            start = end
        tapped = self.generator.model_kwargs_overrides["output_hidden_states"]
        wanted = tapped if self.generator.failure is None else None
        index = torch.tensor(read, dtype=torch.long, device=self.model_device)  # empty: pieces of prompts alone
        outputs = model(**inputs, output_hidden_states=wanted, logits_to_keep=index)
        scores = outputs.logits[0].float()  # [rows read, V]
        if self.logit_processor.do_processing and read:
            scores = self.logit_processor(inputs["input_ids"][0, index], scores, inputs["logits_processor_args"])
        features = None if wanted is None else self.generator.features(outputs.hidden_states)[0].split(counts)
        self._commit(scores, features, perf_counter() - started, started)

    def _commit(
        self, scores: torch.Tensor, features: Sequence[torch.Tensor] | None, seconds: float, started: float
    ) -> None:
        batch = self.inputs_and_outputs.requests_in_batch
        probabilities = scores.softmax(dim=-1) if self.do_sample or self.return_logprobs else scores
        last: list[int] = []
        last_logprobs: list[float] = []
        at, tokens, committed_tokens, decoding = 0, 0, 0, 0
        confidences = []
        for i, future in enumerate(batch):
            state = future.state
            own = self._place(state)
            block, own.block = own.block, None
            before = state.position_offset - future.query_length
            tokens += future.query_length
            processed = future.query_length  # tokens of this step that stay in the cache
            if future.has_new_token:
                rows = probabilities[at : at + (1 if block is None else 1 + block.length)]
                at += len(rows)
                committed = self._choose(state, rows, block)
                if state.generated_len() > 0:
                    decoding += 1
                    processed = len(committed.tokens)
                    committed_tokens += processed
                    if block is not None:
                        self.stats.proposed += int(block.usable.sum())
                        self.stats.accepted += committed.accepted
                        confidences.append(list(block.confidences))
                self._take_back(future, before, processed)
                self._commit_all_but_last(state, committed)
                last.append(committed.tokens[-1])
                last_logprobs += committed.logprobs[-1:] if committed.logprobs is not None else []
            if features is not None:
                self._observe(own, before, features[i][:processed])
        output = self.inputs_and_outputs.output_ids
        output[0, : len(last)] = torch.tensor(last, dtype=torch.int32, device=output.device)
        if self.return_logprobs:
            output[1, : len(last)] = torch.tensor(last_logprobs, device=output.device).view(torch.int32)
        if decoding:
            self.stats.steps += 1
            self.stats.request_steps += decoding
            self.stats.draft_seconds += self._draft_seconds
        whole = decoding == len(batch) and self.generator.failure is None and self._plan is not None
        if whole:  # steps with a prefill in them say nothing about what drafts cost
            spent = perf_counter() - started
            self.pacer.record(
                self._plan, self._limit, tokens, committed_tokens, self._draft_seconds, spent, confidences,
                decoding,
            )  # fmt: skip

    @torch.no_grad()
    def update_batch(self) -> None:
        """The host's: the last token of each request, ends, deliveries, forks."""
        super().update_batch()
        for request_id, state in self.scheduler.active_requests.items():
            parent = self._drafted.get(request_id.partition("__child#")[0])
            if request_id not in self._drafted and parent is not None:  # a further sequence of the same prompt
                self.generator.copy_row(parent.row, self._place(state).row)

    def _choose(self, state: RequestState, rows: torch.Tensor, block: DraftBlock | None) -> _Committed:
        """What a request commits from its rows [ℓ+1, V], up to its end."""
        drafts = q = usable = None
        if block is not None:
            drafts, q, usable = block.token_ids[0], block.probabilities, block.usable
        verdict = verify_sampled(rows, drafts, q, usable) if self.do_sample else verify_greedy(rows, drafts, usable)
        room = state._new_tokens_limit - state.generated_len()
        end = next((k + 1 for k, token in enumerate(verdict.tokens) if token in state._eos_token_ids), math.inf)
        count = max(int(min(len(verdict.tokens), room, end)), 1)
        tokens = verdict.tokens[:count]
        logprobs = None
        if self.return_logprobs:
            logprobs = [rows[k, token].log().item() for k, token in enumerate(tokens)]
        return _Committed(tokens, logprobs, min(count, verdict.accepted))

    def _take_back(self, future: Any, before: int, processed: int) -> None:
        """Gives the request the length that it has after acceptance; complete blocks are counted for that length."""
        state = future.state
        state.position_offset = before
        future.complete_blocks = self.cache.count_new_complete_blocks(state, processed)
        state.position_offset = before + processed

    def _commit_all_but_last(self, state: RequestState, committed: _Committed) -> None:
        """The host's own update commits the last token, and sees to the end of a request."""
        for k, token in enumerate(committed.tokens[:-1]):
            state.update_and_check_completion(token, None if committed.logprobs is None else committed.logprobs[k])
            if state.streaming:
                self.output_router.deliver(state.to_generation_output())

    def _observe(self, own: _Drafted, before: int, features: torch.Tensor) -> None:
        known = self.generator.row_context_tokens[own.row]
        if known == 0 and before > 0:
            self.stats.shared_tokens += before
        positions = torch.arange(before, before + len(features), device=features.device)
        self.generator.observe_row(own.row, features, positions)


class DSparkContinuousBatchingManager(ContinuousBatchingManager):
    """The host's manager with a draft model. Everything of its interface is the host's.

    Attributes:
        draft_stats: `ContinuousStats`, from the first step on.

    Raises:
        DSparkGenerationError: a setting cannot be had together with drafts; the message names it.
    """

    _original_attn_impl: str | None

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any,
        draft: DSparkDraftModel,
    ):
        engine = copy.copy(continuous_batching_config)
        _refuse(engine)
        if engine.use_async_batching or any(engine.cuda_graph_booleans):
            logger.warning(
                "With a draft model the positions of a step are known only after the one before it: asynchronous "
                "batching and CUDA graphs are switched off."
            )
        engine.use_async_batching = engine.use_cuda_graph = False
        engine.varlen_compile_config = engine.decode_compile_config = None
        engine.use_default_compile_configs = False
        engine.max_blocks_per_request = 0  # the block-table kernels take one query per request
        super().__init__(model, generation_config, engine, workload_hints)
        self.draft = draft
        self.draft_stats: ContinuousStats | None = None
        try:
            self._check_processors()
        except DSparkGenerationError:
            if self._original_attn_impl is not None:
                self.model.set_attn_implementation(self._original_attn_impl)
            raise

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Flash kernels where the host has them, else a call of attention per request: the host's one mask over all
        requests costs several times as much."""
        super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)
        if model.config._attn_implementation in ("sdpa", "paged|eager"):
            if self._original_attn_impl is None:
                self._original_attn_impl = model.config._attn_implementation
            model.config._attn_implementation = PAGED_ATTENTION

    def _check_processors(self) -> None:
        wanted = self.model._get_logits_processor(self.generation_config)
        kept = self.logit_processor.logits_processor
        dropped = [type(p).__name__ for p in wanted if type(p) not in {type(k) for k in kept}]
        dropped += [type(p).__name__ for p in kept if type(p) not in ROW_WISE_PROCESSORS]
        if dropped:
            raise DSparkGenerationError(
                f"Continuous batching drops {', '.join(dropped)} or cannot show it a request's text, so the drafts "
                "would be checked against something else than `generate` says. Unset what asks for it, or use "
                "`generate` with a batch."
            )

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if not isinstance(processor, DSparkBatchProcessor):
            processor.__class__ = DSparkBatchProcessor  # the host's manager names the class that it makes
            assert isinstance(processor, DSparkBatchProcessor)
            processor.attach(self.draft, self.model, self.generation_config)
        self.draft_stats = processor.stats
        return processor


def _refuse(engine: ContinuousBatchingConfig) -> None:
    if engine.per_request_processors:
        raise DSparkGenerationError(
            "per_request_processors=True gives each request a distribution of its own, which drafting for all of them "
            "in one pass does not follow; leave it False with a draft model."
        )
    if engine.scheduler_type != "fifo":
        raise DSparkGenerationError(
            f"scheduler_type is {engine.scheduler_type!r}, which may cut a request's drafts in two; with a draft model "
            "it must be 'fifo'."
        )
