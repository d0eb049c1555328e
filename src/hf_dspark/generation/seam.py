"""The seam with transformers: the only file that touches its private methods.

Importing the package wraps methods of `GenerationMixin`: three of `generate`, three of continuous batching. Each passes
through untouched unless `assistant_model` is a `DSparkDraftModel`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import logits_process as host_processors
from transformers.generation.configuration_utils import GenerationMode

from ..candidate_generator import PURE_PROCESSORS, DSparkCandidateGenerator, resolve_knobs
from ..errors import DSparkDependencyError, DSparkGenerationError, DSparkTargetError
from ..modeling_dspark import DSparkDraftModel
from .batching import BatchDecodingLoop
from .loop import DecodingLoop, check_cache
from .packed import ATTENTION as PACKED_ATTENTION
from .packed import LAYER_TYPES

SUPPORTED_TRANSFORMERS = ">=5.24"

_WRAPPED = "_hf_dspark_wrapped"
# Every method that this package calls or wraps, with the parameters that it relies on.
_NEEDED: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (GenerationMixin, "_validate_generation_mode", ("generation_mode", "generation_config", "generation_mode_kwargs")),
    (
        GenerationMixin,
        "_get_candidate_generator",
        ("generation_config", "input_ids", "logits_processor", "model_kwargs", "assistant_model"),
    ),
    (
        GenerationMixin,
        "_assisted_decoding",
        (
            *("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
            "assistant_model",
        ),
    ),
    (GenerationMixin, "_prefill", ("input_ids", "generation_config", "model_kwargs", "is_first_iteration")),
    (GenerationMixin, "_update_model_kwargs_for_generation", ("outputs", "model_kwargs", "num_new_tokens")),
    (GenerationMixin, "_valid_auto_compile_criteria", ("model_kwargs", "generation_config")),
    (GenerationMixin, "_optimize_model_for_decode", ()),
    (PreTrainedModel, "_can_set_attn_implementation", ()),
    (GenerationMixin, "_has_unfinished_sequences", ("this_peer_finished", "synced_gpus", "device")),
    (GenerationMixin, "prepare_inputs_for_generation", ("input_ids", "next_sequence_length", "cache")),
    (Cache, "crop", ("tokens_to_remove",)),
    (Cache, "activate_past_recording", ()),
)


class TransformersHost:
    """The `Host` of `loop.py` on a transformers model."""

    def __init__(self, target: Any):
        self.target = target

    def prefill(self, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
        """The host's prefill."""
        return self.target._prefill(input_ids, config, model_kwargs, is_first_iteration=not config.is_assistant)

    def advance(self, model_kwargs: dict[str, Any], count: int, outputs: Any = None) -> dict[str, Any]:
        """The model inputs, extended by `count` tokens."""
        # With several tokens at once the host repeats the last `count` token types instead of the last one.
        steps = [1] * count if model_kwargs.get("token_type_ids") is not None else [count]
        for step in steps:
            model_kwargs = self.target._update_model_kwargs_for_generation(
                {} if outputs is None else outputs, model_kwargs, num_new_tokens=step
            )
        return model_kwargs

    def decode_forward(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
        """The model's own call, or its compiled form where the host would use that."""
        if self.target._valid_auto_compile_criteria(model_kwargs, config):
            return self.target.get_compiled_call(config.compile_config)
        return self.target.__call__

    def decoding(self) -> AbstractContextManager:
        """The host's context for decoding steps."""
        return self.target._optimize_model_for_decode()

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Inside the block the target's attention is that of packed rows; its own is back when the block ends."""
        config = self.target.config.get_text_config(decoder=True)
        own = config._attn_implementation
        config._attn_implementation = PACKED_ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = own

    def unfinished(self, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        """Whether to go on."""
        return self.target._has_unfinished_sequences(finished, synced_gpus, device=device)


def install() -> None:
    """Checks the installed transformers and wraps its methods; a second call does nothing.

    Raises:
        DSparkDependencyError: a method, or a parameter of one, is missing.
    """
    check_transformers()
    for name, make in (
        ("_validate_generation_mode", _wrap_validate),
        ("_get_candidate_generator", _wrap_candidate_generator),
        ("_assisted_decoding", _wrap_assisted_decoding),
        ("init_continuous_batching", _wrap_continuous),
        ("continuous_batching_context_manager", _wrap_continuous_context),
        ("generate_batch", _wrap_generate_batch),
    ):
        original = getattr(GenerationMixin, name)
        if getattr(original, _WRAPPED, False):
            continue
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _WRAPPED, True)
        setattr(GenerationMixin, name, wrapper)


def check_transformers() -> None:
    """Raises `DSparkDependencyError` unless the installed transformers has all that this package builds on."""
    missing = []
    for owner, name, parameters in _NEEDED:
        method = getattr(owner, name, None)
        if method is None:
            missing.append(f"{owner.__name__}.{name}")
            continue
        known = inspect.signature(method).parameters
        missing += [f"{owner.__name__}.{name}({parameter}=)" for parameter in parameters if parameter not in known]
    if missing:
        raise DSparkDependencyError(
            f"hf-dspark supports transformers {SUPPORTED_TRANSFORMERS}, but the installed {transformers.__version__} "
            f"has no {', '.join(missing)}. Install a supported version."
        )


def _wrap_validate(original: Any) -> Any:
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        draft = generation_mode_kwargs.get("assistant_model")
        if isinstance(draft, DSparkDraftModel) and generation_mode == GenerationMode.ASSISTED_GENERATION:
            _refuse(self, draft, generation_config)
            draft.bind_target(self)
            if generation_config.num_return_sequences > 1:  # the host's check is of its own loop
                generation_config = copy.copy(generation_config)
                generation_config.num_return_sequences = 1
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _refuse(target: PreTrainedModel, draft: DSparkDraftModel, config: GenerationConfig) -> None:
    """Refuses, before anything is computed, what cannot be done without changing the text."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise DSparkTargetError(f"{name} is an encoder-decoder; a DSpark draft model needs a decoder-only target.")
    if target._is_stateful:
        raise DSparkTargetError(
            f"{name} keeps a recurrent state, which cannot be taken back to before a refused draft; generate without "
            "`assistant_model`."
        )
    if config.assistant_ensemble_weight is not None:
        raise DSparkGenerationError(
            f"assistant_ensemble_weight is {config.assistant_ensemble_weight}, which mixes the draft's distribution "
            "into the target's and so changes the text; leave it unset with a DSpark draft model."
        )
    others = {
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "use_mtp": config.use_mtp or None,
        "assistant_early_exit": config.assistant_early_exit,
    }
    for option, value in others.items():
        if value is not None:
            raise DSparkGenerationError(
                f"{option}={value} and a DSpark draft model are two ways to draft; use one of them in a call."
            )
    resolve_knobs(draft, config)


def _refuse_layers(target: PreTrainedModel) -> None:
    """Refuses, before anything is computed, a target whose rows cannot be packed."""
    name = type(target).__name__
    config = target.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    reason = None
    if not target._can_set_attn_implementation():
        reason = "its attention is not transformers' attention interface"
    elif kinds:
        reason = f"it has layers of the kind {', '.join(kinds)}, and not only {' and '.join(LAYER_TYPES)}"
    if reason is not None:
        raise DSparkTargetError(
            f"The rows of a batch cannot be packed for {name}: {reason}. Generate one row at a time with a draft model."
        )


def _refuse_rows(synced_gpus: bool, streamer: Any, cache: Any) -> None:
    """Refuses, before anything is computed, what several rows cannot have."""
    user_made = cache is not None and getattr(cache, "_is_user_defined", False)
    for option, given in (
        ("synced_gpus", synced_gpus),
        ("A streamer", streamer is not None),
        (f"A user-made cache ({type(cache).__name__})", user_made),
    ):
        if given:
            raise DSparkGenerationError(
                f"{option} cannot be had for several rows with a draft model, whose rows are of different lengths "
                "while they are decoded; generate one row at a time, or without `assistant_model`."
            )


def row_processors(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of one row of a batch, as its own single-row call would have them.

    Pure ones are shared, those that hold something per row get that row's, and any other is copied, because it may
    remember the text that it has seen.

    Raises:
        DSparkGenerationError: one cannot be had per row; the message names it.
    """
    own = LogitsProcessorList()
    for processor in processors:
        kind = type(processor)
        if kind is host_processors.UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise DSparkGenerationError(
                "guidance_scale runs the target a second time over the whole batch in step, which rows of different "
                "lengths cannot do; generate one row at a time with a draft model."
            )
        if kind is host_processors.PrefixConstrainedLogitsProcessor:
            processor = copy.copy(processor)
            allowed = processor._prefix_allowed_tokens_fn
            processor._prefix_allowed_tokens_fn = functools.partial(_allowed_of_row, allowed, row)
        elif kind is host_processors.RepetitionPenaltyLogitsProcessor:
            if isinstance(processor.prompt_ignore_length, torch.Tensor):  # each row's padding
                processor = copy.copy(processor)
                processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        elif kind is host_processors.EncoderRepetitionPenaltyLogitsProcessor:
            processor = copy.copy(processor)
            processor.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
        elif kind is host_processors.EncoderNoRepeatNGramLogitsProcessor:
            processor = copy.copy(processor)
            processor.batch_size, processor.generated_ngrams = 1, [processor.generated_ngrams[row]]
        elif kind not in PURE_PROCESSORS:
            try:
                processor = copy.deepcopy(processor)
            except Exception as error:
                raise DSparkGenerationError(
                    f"{kind.__name__} cannot be copied for each row ({type(error).__name__}: {error}); give it a "
                    "__deepcopy__, or generate one row at a time with a draft model."
                ) from error
        own.append(processor)
    return own


def _allowed_of_row(allowed: Any, row: int, batch_id: int, ids: torch.Tensor) -> Any:
    return allowed(row, ids)


def _wrap_candidate_generator(original: Any) -> Any:
    def _get_candidate_generator(self, *args, **kwargs):
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        draft = arguments.get("assistant_model")
        if not isinstance(draft, DSparkDraftModel):
            return original(self, *args, **kwargs)
        return DSparkCandidateGenerator(draft, arguments["generation_config"], arguments["logits_processor"])

    return _get_candidate_generator


def _wrap_assisted_decoding(original: Any) -> Any:
    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        assistant_tokenizer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        if not isinstance(assistant_model, DSparkDraftModel):
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        check_cache(model_kwargs.get("cache"))
        if input_ids.shape[0] > 1:
            _refuse_layers(self)
            _refuse_rows(synced_gpus, streamer, model_kwargs.get("cache"))
            pad = generation_config._pad_token_tensor
            batch = BatchDecodingLoop(
                TransformersHost(self),
                assistant_model,
                input_ids,
                [row_processors(logits_processor, row) for row in range(len(input_ids))],
                stopping_criteria,
                generation_config,
                model_kwargs,
                0 if pad is None else int(pad),
            )
            result = batch.run()
            assistant_model.last_stats = batch.stats
            return result
        generator = self._get_candidate_generator(
            generation_config=generation_config,
            input_ids=input_ids,
            inputs_tensor=inputs_tensor,
            logits_processor=logits_processor,
            model_kwargs=model_kwargs,
            assistant_model=assistant_model,
        )
        loop = DecodingLoop(
            TransformersHost(self),
            generator,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            model_kwargs,
        )
        result = loop.run()
        assistant_model.last_stats = loop.stats
        return result

    return _assisted_decoding


# The draft of a call that makes its manager two calls further down, as the host's own entry points do.
_continuous_draft: ContextVar[DSparkDraftModel | None] = ContextVar("_continuous_draft", default=None)


def _wrap_continuous(original: Any) -> Any:
    def init_continuous_batching(self, *args, assistant_model=None, **kwargs):
        draft = assistant_model if assistant_model is not None else _continuous_draft.get()
        if draft is None:
            return original(self, *args, **kwargs)
        return _manager(self, draft, inspect.signature(original).bind(self, *args, **kwargs).arguments)

    return init_continuous_batching


def _wrap_continuous_context(original: Any) -> Any:
    @contextmanager
    def continuous_batching_context_manager(self, *args, assistant_model=None, **kwargs):
        with _drafting_with(assistant_model), original(self, *args, **kwargs) as manager:
            yield manager

    return continuous_batching_context_manager


def _wrap_generate_batch(original: Any) -> Any:
    def generate_batch(self, *args, assistant_model=None, **kwargs):
        with _drafting_with(assistant_model):
            return original(self, *args, **kwargs)

    return generate_batch


@contextmanager
def _drafting_with(draft: Any) -> Iterator[None]:
    token = _continuous_draft.set(draft if draft is not None else _continuous_draft.get())
    try:
        yield
    finally:
        _continuous_draft.reset(token)


def _manager(target: Any, draft: Any, arguments: dict[str, Any]) -> Any:
    """A manager with `draft`, checked before anything is allocated."""
    from .continuous import DSparkContinuousBatchingManager

    if not isinstance(draft, DSparkDraftModel):
        raise DSparkGenerationError(
            f"assistant_model is a {type(draft).__name__}, but continuous batching takes a DSparkDraftModel only."
        )
    cached = getattr(target, "_cached_continuous_batching_manager", None)
    if cached is not None:
        if getattr(cached, "draft", None) is draft:
            cached.switch_to_cb_friendly_attn(target)
            return cached
        raise DSparkGenerationError(
            "The target keeps a manager that was made without this draft model; call "
            "`target.destroy_cached_continuous_batching_manager()` first."
        )
    config = copy.copy(arguments.get("generation_config") or target.generation_config)
    if config.eos_token_id is None:
        config.eos_token_id = -1  # the engine's word for none
    _refuse(target, draft, config)
    _refuse_layers(target)
    draft.bind_target(target)
    engine = arguments.get("continuous_batching_config") or ContinuousBatchingConfig()
    return DSparkContinuousBatchingManager(target, config, engine, arguments.get("workload_hints"), draft)
