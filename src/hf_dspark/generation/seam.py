"""The seam with transformers: the only file that touches its private methods.

Importing the package wraps three methods of `GenerationMixin`. Each passes through untouched unless `assistant_model`
is a `DSparkDraftModel`.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..candidate_generator import DSparkCandidateGenerator, resolve_knobs
from ..errors import DSparkDependencyError, DSparkGenerationError, DSparkTargetError
from ..modeling_dspark import DSparkDraftModel
from .loop import DecodingLoop, check_cache

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

    def unfinished(self, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        """Whether to go on."""
        return self.target._has_unfinished_sequences(finished, synced_gpus, device=device)


def install() -> None:
    """Checks the installed transformers and wraps its three methods; a second call does nothing.

    Raises:
        DSparkDependencyError: a method, or a parameter of one, is missing.
    """
    check_transformers()
    for name, make in (
        ("_validate_generation_mode", _wrap_validate),
        ("_get_candidate_generator", _wrap_candidate_generator),
        ("_assisted_decoding", _wrap_assisted_decoding),
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
        if input_ids.shape[0] > 1:
            raise ValueError("assisted generate is only supported for batch_size = 1")  # the host's words
        check_cache(model_kwargs.get("cache"))
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
