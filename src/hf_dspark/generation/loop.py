"""The decoding loop behind `target.generate(..., assistant_model=draft)` (DESIGN §6; paper §2 and §3.1).

The host's own assisted loop is not entered: it shows processors tokens that are refused later, looks at stopping
criteria only where a block ends, and feeds the prompt again when a cache already holds it. Here a round is: draft, one
forward on ℓ+1 rows, and then one committed token after the other: processors, choice or accept/refuse, stopping
criteria, streamer; at its end one crop of the cache.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ..candidate_generator import DraftBlock, DSparkCandidateGenerator
from ..errors import DSparkGenerationError, DSparkTargetError
from .capture import captured_prefill
from .committing import CommittedText
from .outputs import OutputRecorder
from .pacing import PAUSED, Pacer
from .stats import GenerationStats


class Host(Protocol):
    """The target and those of its private methods that the loop needs, under public names (see `seam.py`)."""

    target: Any

    def prefill(self, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
        """The host's prefill: user-made caches, embeddings, chunks."""

    def advance(self, model_kwargs: dict[str, Any], count: int, outputs: Any = None) -> dict[str, Any]:
        """The model inputs, extended by `count` tokens."""

    def decode_forward(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
        """The callable for the rounds' forwards, compiled where the host would."""

    def decoding(self) -> Any:
        """The host's context manager around its decoding steps."""

    def packed(self) -> Any:
        """A context manager in which `packed.attend` is the target's attention."""

    def unfinished(self, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        """Whether to go on; with `synced_gpus`, whether any rank has to."""


class DecodingLoop:
    """One `generate` call of one sequence."""

    def __init__(
        self,
        host: Host,
        generator: DSparkCandidateGenerator,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ):
        self.host, self.generator = host, generator
        self.config = generation_config
        self.synced_gpus, self.streamer = synced_gpus, streamer
        self.model_kwargs = model_kwargs
        self.recorder = OutputRecorder(generation_config)
        do_sample = bool(generation_config.do_sample)
        self.text = CommittedText(input_ids, logits_processor, stopping_criteria, do_sample, self.recorder, streamer)
        self.stats = GenerationStats()
        if generator.draft.confidence_head is not None:
            self.stats.calibrated = generator.temperatures is not None
        self._first_anchor = torch.zeros(1, dtype=torch.long)

    @property
    def cache(self) -> Cache:
        """The target's cache; it holds all of the committed text but its last token."""
        return self.model_kwargs["cache"]

    def run(self) -> Any:
        """Prefill and rounds; returns what plain `generate` returns."""
        user_hidden_states = self.model_kwargs.get("output_hidden_states")
        tapped = self.generator.model_kwargs_overrides["output_hidden_states"]
        self.model_kwargs["output_hidden_states"] = self.recorder.requested_hidden_states(tapped)
        try:
            self._prefill()
            # After the prefill: recording during it would keep the whole prompt in every sliding layer.
            self.cache.activate_past_recording()
            forward = self.host.decode_forward(self.config, self.model_kwargs)
            with self.host.decoding():
                while self.host.unfinished(self.text.finished, self.synced_gpus, self.text.ids.device):
                    if self.text.finished:  # only with synced_gpus: the other ranks need this forward, and nothing else
                        self._forward(forward, None)
                        self.cache.crop(-1)
                        continue
                    self._round(forward)
                    if self.generator.failure is not None:
                        self.model_kwargs["output_hidden_states"] = user_hidden_states
        finally:
            for layer in self.cache.layers:  # a cache that outlives the call must not keep recording
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.record_past = False
        if self.streamer is not None:
            self.streamer.end()
        self.stats.new_tokens = self.text.new_tokens
        self.stats.failure = self.generator.failure
        if self.config.return_dict_in_generate:
            return self.recorder.result(self.text.ids, self.cache)
        return self.text.ids

    # ------------------------------------------------------------------------------------------------------------
    # Prefill and rounds
    # ------------------------------------------------------------------------------------------------------------
    def _prefill(self) -> None:
        generator = self.generator
        with captured_prefill(self.host.target, generator.layer_ids, generator.features) as features:
            outputs = self.host.prefill(self.text.ids, self.config, self.model_kwargs)
        rows = sum(part.shape[1] for part in features)
        self.model_kwargs["cache"] = outputs.cache
        positions, real, self._first_anchor = self._prompt_positions(rows)
        for part, part_positions, part_real in zip(
            features,
            positions.split([part.shape[1] for part in features], dim=1),
            [None] * len(features) if real is None else real.split([part.shape[1] for part in features]),
        ):
            if part_real is not None:  # padding has no place in the draft's context
                part, part_positions = part[:, part_real.to(part.device)], part_positions[:, part_real]
            generator.observe(part, part_positions)
        self.stats.context_tokens = generator.context_tokens
        self.pacer = Pacer(generator.draft, self.host.target, int(self.cache.get_seq_length()))
        self.recorder.add_prefill(outputs)
        self.text.commit(outputs.logits[:, -1:], None)
        self.model_kwargs = self.host.advance(self.model_kwargs, 1, outputs)

    def _prompt_positions(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Absolute positions [1, rows] of the tokens just fed, which of them are real, bool [rows] (`None`: all), and
        the position [1] of the first new token."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            mask = None
        positions = self.model_kwargs.get("position_ids")
        if positions is None or positions.dim() != 2:  # absent, or one row per axis of an image model
            if mask is not None:
                positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            else:
                positions = torch.arange(int(self.cache.get_seq_length()), device=self.text.ids.device)[None]
        real = None if mask is None else mask[0, -rows:] != 0
        return positions[:, -rows:], real, positions[0, -1:] + 1

    def _round(self, forward: Any) -> None:
        started = perf_counter()
        generator = self.generator
        anchor_position = self._first_anchor + (self.text.new_tokens - 1)
        budget = self.text.budget
        limit = generator.limit if budget is None else min(generator.limit, budget)
        plan = self.pacer.plan(limit)
        if self.synced_gpus:
            # The draft borrows modules whose weights are gathered from all ranks, and ranks draft differently.
            block = generator.empty_block(self.text.ids, "synced_gpus")
        else:
            block = generator.propose(self.text.ids, anchor_position, budget, plan)
        drafted = perf_counter()
        outputs = self._forward(forward, block)
        length = block.length
        count, accepted, proposed = self.text.commit(outputs.logits[:, -length - 1 :], block)
        verified = perf_counter()
        self.recorder.add_rows(outputs, count, self.host.target, self.cache)
        self.cache.crop(count - length - 1)
        if generator.failure is None:
            features = generator.features(tuple(h if h is None else h[:, :count] for h in outputs.hidden_states))
            offsets = torch.arange(count, device=anchor_position.device)
            generator.observe(features, (anchor_position + offsets)[None])
        self.model_kwargs = self.host.advance(self.model_kwargs, count, outputs)
        self.stats.draft_seconds += drafted - started
        self.stats.verify_seconds += verified - drafted
        self.stats.paused_rounds += block.reason == PAUSED
        if generator.failure is None and not self.synced_gpus:
            confidences = [list(block.confidences)]
            self.pacer.record(plan, limit, length + 1, count, drafted - started, verified - drafted, confidences)
        reason = block.reason if proposed == length else "NaN logits"
        logits = block.confidence_logits if generator.draft.record_confidence else ()
        self.stats.add_round(proposed, accepted, block.scheduled, reason, block.confidences, logits)

    def _forward(self, forward: Any, block: DraftBlock | None) -> Any:
        """The target on the anchor and the drafts of `block`."""
        length = 0 if block is None else block.length
        model_kwargs, ids = self.model_kwargs, self.text.ids
        if block is not None and length > 0:
            ids = torch.cat([ids, block.token_ids], dim=1)
            model_kwargs = self.host.advance(dict(model_kwargs), length)
        inputs = self.host.target.prepare_inputs_for_generation(ids, next_sequence_length=length + 1, **model_kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = length + 1
        return forward(**inputs, return_dict=True)


def check_cache(cache: Cache | None) -> None:
    """Refuses what a round could not undo, before the prefill.

    Raises:
        RuntimeError: there is no cache (`use_cache=False`), in the host's words.
        DSparkTargetError: the target has recurrent layers.
        DSparkGenerationError: the cache cannot be cropped; its layers are named.
    """
    if cache is None:
        raise RuntimeError("Assisted decoding requires a cache")
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        raise DSparkTargetError(
            "The target has recurrent (linear-attention) layers, whose state cannot be taken back to before a refused "
            "draft; generate without `assistant_model`."
        )
    if not cache.is_croppable:
        kinds = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
        raise DSparkGenerationError(
            f"A {type(cache).__name__} with {', '.join(kinds)} cannot take back refused drafts; use the default "
            "dynamic cache with a draft model."
        )
