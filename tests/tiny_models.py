"""Tiny random targets and drafts, built in memory. fp32, a few thousand weights, diverse greedy texts."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_dspark import DSparkDraftModel

VOCAB = 61
SLIDING_WINDOW = 8

# No special ids: the host infers masks from a pad id, and stops at an eos id, that a random prompt may hold by chance.
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _built(model_class: type, config, seed: int = 0, std: float = 0.35) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # wide weights: a narrow random model repeats one token for ever
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.float().eval()


def tiny_llama(**changes) -> LlamaForCausalLM:
    return _built(LlamaForCausalLM, LlamaConfig(**{**_COMMON, **changes}))


def tiny_qwen3(**changes) -> Qwen3ForCausalLM:
    return _built(Qwen3ForCausalLM, Qwen3Config(**{**_COMMON, **changes}))


def tiny_gemma3(**changes) -> Gemma3ForCausalLM:
    """Two of its four layers have a sliding window of `SLIDING_WINDOW` tokens."""
    config = Gemma3TextConfig(**{**_COMMON, "sliding_window": SLIDING_WINDOW, "layer_types": _SLIDING, **changes})
    return _built(Gemma3ForCausalLM, config)


def tiny_gemma4(**changes) -> Gemma4ForCausalLM:
    """Sliding layers, per-kind head sizes, logit soft-cap."""
    specific = {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _SLIDING,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
    }
    return _built(Gemma4ForCausalLM, Gemma4TextConfig(**{**_COMMON, **specific, **changes}))


TARGETS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3, "gemma4": tiny_gemma4}


def tiny_draft(target: PreTrainedModel, std: float = 0.3, **changes) -> DSparkDraftModel:
    """An untrained draft: five drafts per round, every kind of head on request."""
    torch.manual_seed(1)
    settings = dict(num_hidden_layers=1, block_size=5, markov_rank=8, target_layer_ids=[0, 2], intermediate_size=48)
    draft = DSparkDraftModel.for_target(target, **{**settings, **changes}).eval()
    draft.scheduler = None  # full blocks, whatever the clock says; the scheduler's own tests switch it on
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    return draft


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    """int64 [1, length]."""
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
