"""DeepSpec's layout (FORMATS §1): a copy of the target's config plus DSpark keys; canonical tensor names, no prefix."""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import DSparkCheckpointError

_ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
# Copied as they are; the rest of the file describes the target or the training run.
_COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "initializer_range"),
    *("attention_bias", "layer_types", "target_layer_ids", "num_target_layers", "block_size", "mask_token_id"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def recognises(raw: dict[str, Any], tensor_names: set[str]) -> bool:
    """Arch `Qwen3DSparkModel` or `Gemma4DSparkModel` with `target_layer_ids` at top level and canonical tensors.

    The same arch name with a nested `dflash_config` or with other tensor names is a descendant's layout (FORMATS §7).
    """
    architecture = (raw.get("architectures") or [""])[0]
    return (
        architecture in _ARCHITECTURES
        and "target_layer_ids" in raw
        and "dflash_config" not in raw
        and "speculators_model_type" not in raw
        and {"fc.weight", "hidden_norm.weight"} <= tensor_names
    )


def read_config(raw: dict[str, Any], tensor_names: set[str], source: str) -> DSparkConfig:
    """`DSparkConfig` of a DeepSpec file. Rank 0 (its "dflash" checkpoints) is anchor-first as well (FORMATS §1.4)."""
    backbone = _ARCHITECTURES[raw["architectures"][0]]
    values = {key: raw[key] for key in _COPIED if raw.get(key) is not None}
    rope = dict(raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 1e4)})
    if backbone == "gemma4":
        for key, wrong in (("hidden_size_per_layer_input", 0), ("enable_moe_block", False)):
            if raw.get(key):
                raise DSparkCheckpointError(f"{source}: {key} is {raw[key]!r}; only {wrong!r} is built.")
        # The file may mix a flat rope_type with per-layer-type dicts; draft layers are all full attention.
        rope = dict(rope.get("full_attention", rope))
        for key in ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "final_logit_softcapping"):
            if raw.get(key) is not None:
                values[key] = raw[key]
    else:
        if raw.get("use_sliding_window") and raw.get("sliding_window"):
            raise DSparkCheckpointError(
                f"{source}: sliding draft layers (window {raw['sliding_window']}) are not built."
            )
    confident = bool(raw.get("enable_confidence_head", False))
    rank = raw.get("markov_rank", 0)
    return DSparkConfig(
        **values,
        backbone=backbone,
        hidden_act=raw.get("hidden_activation" if backbone == "gemma4" else "hidden_act", "silu"),
        rope_parameters=rope,
        sample_from_anchor=True,
        markov_rank=rank,
        markov_head_type=raw.get("markov_head_type", "vanilla"),
        enable_confidence_head=confident,
        confidence_head_with_markov=confident and bool(raw.get("confidence_head_with_markov", rank > 0)),
        target_model_name_or_path=raw.get("target_model_name_or_path"),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )
