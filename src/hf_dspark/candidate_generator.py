"""`DSparkCandidateGenerator`: the draft's state for one `generate` call, and the drafting of one block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as host_processors
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from .errors import DSparkGenerationError
from .modeling_dspark import DSparkDraftModel

if TYPE_CHECKING:
    from .scheduling.prefix_scheduler import PrefixWalk
    from .scheduling.throughput import ThroughputCurve

logger = logging.get_logger(__name__)

# What `generate` fills in when a knob was not set by the caller (tests compare these with the installed transformers).
HOST_NUM_ASSISTANT_TOKENS = 20
HOST_CONFIDENCE_THRESHOLD = 0.4

# The host's warpers that look at one row of scores and at nothing else: many rows can be processed in one call.
ROW_WISE_PROCESSORS = (
    host_processors.TemperatureLogitsWarper,
    host_processors.TopKLogitsWarper,
    host_processors.TopPLogitsWarper,
    host_processors.TopHLogitsWarper,
    host_processors.MinPLogitsWarper,
    host_processors.TypicalLogitsWarper,
    host_processors.EpsilonLogitsWarper,
    host_processors.EtaLogitsWarper,
    host_processors.InfNanRemoveLogitsProcessor,
    host_processors.LogitNormalization,
    host_processors.SuppressTokensLogitsProcessor,
)

# The host's processors that are pure functions of (input_ids, scores). Drafting uses these and no others: calling a
# stateful one for a token that may be refused would change what it does to the text.
PURE_PROCESSORS = (
    *ROW_WISE_PROCESSORS,
    host_processors.MinLengthLogitsProcessor,
    host_processors.MinNewTokensLengthLogitsProcessor,
    host_processors.RepetitionPenaltyLogitsProcessor,
    host_processors.EncoderRepetitionPenaltyLogitsProcessor,
    host_processors.NoRepeatNGramLogitsProcessor,
    host_processors.EncoderNoRepeatNGramLogitsProcessor,
    host_processors.SequenceBiasLogitsProcessor,
    host_processors.NoBadWordsLogitsProcessor,
    host_processors.ForcedBOSTokenLogitsProcessor,
    host_processors.ForcedEOSTokenLogitsProcessor,
    host_processors.ExponentialDecayLengthPenalty,
    host_processors.SuppressTokensAtBeginLogitsProcessor,
)


def sample_index(weights: torch.Tensor) -> torch.Tensor:
    """Draws an index with probability proportional to `weights` [..., V] ≥ 0 → int64 [...].

    By inverting the cumulative sum in float64, which takes one uniform number per row where `torch.multinomial` draws
    one per entry (20 times the time with 49152 entries on a CPU). A row with NaN gives an arbitrary index and does not
    raise; callers look at the row's sum.
    """
    exact = torch.float32 if weights.device.type == "mps" else torch.float64  # MPS has no float64
    cumulative = weights.cumsum(dim=-1, dtype=exact)
    total = cumulative[..., -1:]
    point = torch.rand(total.shape, dtype=exact, device=weights.device) * total
    # Strictly below the total, so that the last id of positive weight is the last that can be drawn.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    return index.clamp_(max=weights.shape[-1] - 1)


class DraftBlock(NamedTuple):
    """The drafts of one round.

    Attributes:
        token_ids: int64 [1, ℓ], target ids on the device of the text.
        probabilities: fp32 [ℓ, V], q, what each draft was drawn from; `None` when greedy or ℓ = 0.
        usable: bool [ℓ], `False` from the first draft on that came from NaN logits: it counts as not proposed.
        scheduled: the length decided before drafting.
        reason: what decided it (see `GenerationStats.reasons`).
        confidences: c_k of the positions that were looked at; empty when nothing depended on them.
        confidence_logits: their logits, before calibration.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor | None
    usable: torch.Tensor
    scheduled: int
    reason: str
    confidences: tuple[float, ...] = ()
    confidence_logits: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """ℓ."""
        return self.token_ids.shape[1]


class RoundPlan(NamedTuple):
    """What is known of a round before it is drafted (see `generation/pacing.py`).

    Attributes:
        drafting: `False`: a plain step, for `reason`.
        reason: what decides the length where nothing else cuts it; `None`: it is the full block.
        walk: decides the length draft by draft, from confidences.
        keep: a length decided beforehand (lagged policy): the whole block is drafted, for its confidences, and cut.
        curve: decides the lengths of many requests, after all of them are drafted.
        depth: of many requests, the most drafts that are made for each; `None`: full blocks.
    """

    drafting: bool = True
    reason: str | None = None
    walk: PrefixWalk | None = None
    keep: int | None = None
    curve: ThroughputCurve | None = None
    depth: int | None = None


def resolve_knobs(draft: DSparkDraftModel, generation_config: GenerationConfig) -> tuple[int, float | None]:
    """The cap on drafts per round, and the confidence threshold (`None`: off).

    Precedence: the call's value if it differs from the host's global defaults, the draft's `generation_config`, then
    γ and off.

    Raises:
        DSparkGenerationError: a value is outside its range, or a threshold is set and the draft has no confidence head.
    """
    own = draft.generation_config
    block = draft.config.num_draft_tokens
    limit, threshold = generation_config.num_assistant_tokens, generation_config.assistant_confidence_threshold
    if limit is None or limit == HOST_NUM_ASSISTANT_TOKENS:
        limit = own.num_assistant_tokens
    if threshold is None or threshold == HOST_CONFIDENCE_THRESHOLD:
        threshold = own.assistant_confidence_threshold
    if limit is None:
        limit = block
    if limit < 1:
        raise DSparkGenerationError(
            f"num_assistant_tokens is {limit}, but must be from 1 to the block's {block} drafts."
        )
    if limit > block:
        logger.warning_once(
            f"num_assistant_tokens is {limit}, but this draft model gives {block} drafts per round; {block} is used."
        )
        limit = block
    if threshold is not None and not 0 <= threshold <= 1:
        raise DSparkGenerationError(f"assistant_confidence_threshold is {threshold}, but must be from 0 to 1.")
    if threshold == 0:
        threshold = None
    if threshold is not None and draft.confidence_head is None:
        raise DSparkGenerationError(
            f"assistant_confidence_threshold is {threshold}, but this draft has no confidence head. Leave it unset."
        )
    return limit, threshold


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts blocks for one sequence and keeps the draft's context between rounds.

    It follows transformers' protocol (`get_candidates` with `requires_model_outputs`), so any loop that speaks it can
    drive it; this package's own loop calls `observe` and `propose`, which the protocol's method is made of.

    After an exception in the draft it proposes nothing more and keeps the reason in `failure`.
    """

    requires_model_outputs = True

    def __init__(
        self,
        draft: DSparkDraftModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        """
        Args:
            draft: a draft model with a bound target (or with tables of its own).
            generation_config: the call's, as prepared by `generate`; `do_sample`, `max_length` and the knobs are read.
            logits_processor: the call's processors, of which the pure ones are used for drafting.
        """
        self.draft = draft
        self.layer_ids = list(draft.config.target_layer_ids)
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": [i + 1 for i in self.layer_ids]}
        self.limit, self.threshold = resolve_knobs(draft, generation_config)
        self.do_sample = bool(generation_config.do_sample)
        self.max_length: int | None = generation_config.max_length
        self.processors: Any = LogitsProcessorList(p for p in logits_processor or () if type(p) in PURE_PROCESSORS)
        self.failure: str | None = None
        self.context_tokens = 0
        self._cache = DynamicCache()
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._draft_token_ids = draft.draft_token_ids
        # With a reduced draft vocabulary, processors that name ids or read the text need rows of the target's width.
        self._by_target_ids = any(
            type(p) not in ROW_WISE_PROCESSORS or type(p) is host_processors.SuppressTokensLogitsProcessor
            for p in self.processors
        )
        mode = "sample" if self.do_sample else "greedy"
        temperatures = draft.config.confidence_temperatures or {}
        self.temperatures = temperatures.get(mode)
        self.shifts = (draft.config.confidence_shifts or {}).get(mode)
        # On a CPU a confidence can be read at once, and what is dropped is not drafted. Elsewhere reading would wait
        # for the device at every step: all is drafted, and cut by the same rule.
        self.reads_at_once = draft.device.type == "cpu"
        self._saw_prefill = False

    # ------------------------------------------------------------------------------------------------------------
    # Context
    # ------------------------------------------------------------------------------------------------------------
    def features(self, hidden_states: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Context features [1, T, L·Ht] from the target's `hidden_states` (entry i+1 is the output of layer i)."""
        device = self.draft.device  # layers of a split target may be on several devices
        return torch.cat([hidden_states[i + 1].to(device) for i in self.layer_ids], dim=-1)

    def observe(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Notes verified tokens: their features [1, T, L·Ht] and absolute positions int64 [1, T].

        They enter the draft's context when the next block is drafted, so the last round's never cost anything.
        """
        if self.failure is None and features.shape[1] > 0:
            self._pending.append((features, positions))
            self.context_tokens += features.shape[1]

    def _extend_context(self) -> None:
        if self._pending:
            features, positions = (
                torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in zip(*self._pending)
            )
            self._pending = []
            self.draft.extend_context(self._cache, features, positions)

    # ------------------------------------------------------------------------------------------------------------
    # One block
    # ------------------------------------------------------------------------------------------------------------
    def propose(
        self,
        input_ids: torch.Tensor,
        anchor_position: torch.Tensor,
        budget: int | None,
        plan: RoundPlan = RoundPlan(),  # noqa: B008 (immutable)
    ) -> DraftBlock:
        """Drafts the next block.

        Args:
            input_ids: int64 [1, T], the text so far; its last token is the anchor.
            anchor_position: int64 [1], the anchor's absolute position.
            budget: the most drafts that are of use (what is left to `max_length`, less one); `None`: no limit.
            plan: whether to draft, and what decides the length.
        """
        length, reason = self.limit, plan.reason or "full block"
        if length < self.draft.config.num_draft_tokens:
            reason = "num_assistant_tokens"
        if budget is not None and budget < length:
            length, reason = max(budget, 0), "length budget"
        if self.failure is not None:
            return self.empty_block(input_ids, "exception")
        if length == 0:
            return self.empty_block(input_ids, reason)
        if self.context_tokens == 0:
            return self.empty_block(input_ids, "no context")
        if not plan.drafting:
            return self.empty_block(input_ids, plan.reason or reason)
        try:
            self._extend_context()
            anchor = input_ids[:, -1].to(self.draft.device)
            hidden, state = self.draft.start_block(self._cache, anchor, anchor_position)
            base_logits = self.draft.base_logits(hidden[:, :length])  # one product for all rows
        except Exception as error:
            self._fail(error)
            return self.empty_block(input_ids, "exception")
        return self._sequential(base_logits, hidden, state, input_ids, anchor, plan, reason)

    def _sequential(
        self,
        base_logits: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        prefix: torch.Tensor,
        previous: torch.Tensor,
        plan: RoundPlan,
        reason: str,
    ) -> DraftBlock:
        """The sequential stage, left to right: draft k is drawn before anything about draft k+1 is known.

        What ends it early (scheduler, threshold, exception) is known before the draft at that position is drawn, and
        the drafts before it stay: withholding one because of what followed it would bias the text.
        """
        scheduled = base_logits.shape[1]
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []  # q of each draft, or its top logit when greedy
        seen: list[torch.Tensor] = []  # confidence logits [1]
        looks = self.draft.record_confidence or not (self.threshold is plan.walk is plan.keep is None)
        confidence_head = self.draft.confidence_head if looks else None
        input_ids = prefix
        stop: str | None = None
        for k in range(scheduled):
            try:
                logits, embedding, state = self.draft.sequential_step(base_logits[:, k], hidden[:, k], previous, state)
                if confidence_head is not None:
                    seen.append(confidence_head(hidden[:, k], embedding))
                    stop = self._stop(float(seen[-1]), k, plan) if self.reads_at_once else None
                    if stop is not None:
                        break
                token, row = self._choose(logits, prefix)
            except Exception as error:
                self._fail(error)
                stop = "exception"
                break
            tokens.append(token)
            rows.append(row)
            previous = token.to(previous.device)
            if self.processors:
                prefix = torch.cat([prefix, token.to(prefix.device)[:, None]], dim=1)
        confidence_logits = tuple(torch.cat(seen).tolist()) if seen else ()
        length = len(tokens)
        if not self.reads_at_once:
            stops = (self._stop(logit, k, plan) for k, logit in enumerate(confidence_logits[:length]))
            length, stop = next(((k, why) for k, why in enumerate(stops) if why is not None), (length, stop))
        if plan.keep is not None:
            length = min(length, plan.keep)
        if stop is not None and stop != "exception":
            scheduled = length
        elif plan.keep is not None and plan.keep < scheduled:
            scheduled, reason = plan.keep, plan.reason or reason
        elif plan.walk is not None and stop is None and reason == "full block":
            reason = plan.walk.reason
        reason = stop or reason
        confidences = tuple(self._calibrate(logit, k) for k, logit in enumerate(confidence_logits))
        block = self.empty_block(input_ids, reason, scheduled)
        block = block._replace(confidences=confidences, confidence_logits=confidence_logits)
        if length == 0:
            return block
        marks = torch.stack([row.sum() for row in rows[:length]]).to(input_ids.device)
        return block._replace(
            token_ids=torch.stack(tokens[:length], dim=1).to(input_ids.device),
            probabilities=torch.cat(rows[:length]).to(input_ids.device) if self.do_sample else None,
            usable=marks.isnan().cumsum(0) == 0,
        )

    def _choose(self, logits: torch.Tensor, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft logits [R, Vd] → the drafts, int64 [R], and fp32 q [R, V] (sampling) or the top logits [R] (greedy).

        NaN logits give an arbitrary id and a NaN q or top logit; they are not looked at here, which would wait for
        the device at every step.
        """
        reduced = self._draft_token_ids
        if reduced is not None and self._by_target_ids:
            wide = logits.new_full((len(logits), self.draft.config.vocab_size), -torch.inf)
            logits, reduced = wide.index_copy_(1, reduced, logits), None
        if self.processors:
            logits = self.processors(prefix, logits.to(device=prefix.device, dtype=torch.float32, copy=True))
        if self.do_sample:
            row = logits.softmax(dim=-1, dtype=torch.float32)
            index = sample_index(row)
        else:
            row, index = logits.max(dim=-1)
        if reduced is None:
            return index, row
        reduced = reduced.to(index.device)
        if self.do_sample:
            row = row.new_zeros((len(row), self.draft.config.vocab_size)).index_copy_(1, reduced, row)
        return reduced[index], row

    def _calibrate(self, logit: float, k: int) -> float:
        """c_k."""
        if self.temperatures is not None:
            logit /= self.temperatures[k]
        if self.shifts is not None:
            logit += self.shifts[k]
        return 0.5 * (1 + math.tanh(0.5 * logit))  # the logistic function, in a form that cannot overflow

    def _stop(self, logit: float, k: int, plan: RoundPlan) -> str | None:
        """Why the draft at position k is not verified, from its confidence logit; `None`: it is."""
        confidence = self._calibrate(logit, k)
        if self.threshold is not None and not confidence >= self.threshold:
            return "threshold"
        if plan.walk is not None and not plan.walk.admit(confidence):
            return plan.walk.reason
        return None

    def empty_block(self, input_ids: torch.Tensor, reason: str, scheduled: int = 0) -> DraftBlock:
        """No drafts, so a round that is a plain step."""
        return DraftBlock(
            token_ids=input_ids[:, :0],
            probabilities=None,
            usable=torch.ones(0, dtype=torch.bool, device=input_ids.device),
            scheduled=scheduled,
            reason=reason,
        )

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._pending = []
        self._cache = DynamicCache()
        logger.warning(f"The draft model failed ({self.failure}); the text goes on without it.")

    # ------------------------------------------------------------------------------------------------------------
    # transformers' protocol
    # ------------------------------------------------------------------------------------------------------------
    def get_candidates(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for the next round, for a loop that speaks transformers' protocol.

        Args:
            input_ids: int64 [1, T], the text so far.
            model_kwargs: the loop's model inputs; `position_ids` and `attention_mask` cover the text so far.
            model_outputs: the target's last outputs, with `hidden_states` (see `model_kwargs_overrides`).
            is_first_iteration: no draft is possible before the target has seen the prompt.
            n_last_matches: how many drafts of the last round were accepted.

        Returns:
            int64 [1, T+ℓ], and log q [1, ℓ, V] in fp32 (-inf at ids the draft cannot give) or `None` when greedy.
            `(input_ids, None)` when nothing is proposed.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        model_kwargs = model_kwargs or {}
        features = self.features(model_outputs.hidden_states)
        fed = n_last_matches + 1 if self._saw_prefill else features.shape[1]
        self._saw_prefill = True
        mask = model_kwargs.get("attention_mask")
        positions = model_kwargs.get("position_ids")
        if positions is None or positions.dim() != 2:
            full = torch.ones_like(input_ids) if mask is None else mask
            positions = (full.long().cumsum(-1) - 1).clamp(min=0)
        features, context_positions = features[:, :fed], positions[:, -fed - 1 : -1]
        if mask is not None:
            real = mask[0, -fed - 1 : -1].bool()
            features, context_positions = features[:, real.to(features.device)], context_positions[:, real]
        self.observe(features, context_positions)
        budget = None if self.max_length is None else self.max_length - input_ids.shape[1] - 1
        block = self.propose(input_ids, positions[:, -1], budget)
        length = int(block.usable.sum())
        if length == 0:
            return input_ids, None
        candidates = torch.cat([input_ids, block.token_ids[:, :length]], dim=1)
        q = block.probabilities
        return candidates, None if q is None else q[None, :length].log()

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the length of a block is fixed by the knobs."""
