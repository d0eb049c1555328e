"""Names the draft layouts that this package does not load, so that refusing one says what it is (FORMATS §7)."""

from __future__ import annotations

from typing import Any


def name_foreign_layout(raw: dict[str, Any], tensor_names: set[str]) -> str:
    """A description of an unsupported checkpoint, from raw config.json and the names of its tensors."""
    architecture = (raw.get("architectures") or ["?"])[0]
    nested = raw.get("dflash_config") or {}

    def some(*parts: str) -> bool:
        return any(part in name for name in tensor_names for part in parts)

    if "speculators_model_type" in raw:
        return f"a speculators checkpoint ({raw['speculators_model_type']!r})"
    if "dspark_block_size" in (raw.get("text_config") or {}) or architecture.startswith("DeepseekV41"):
        return "a DeepSeek-V4.1 target with a built-in draft (mtp.*)"
    if "dspark_block_size" in raw or "dspark_target_layer_ids" in raw:
        return "a DeepSeek-V4 target with a built-in draft (mtp.*)"
    if some("mtp_dspark."):
        return "a Mistral checkpoint with an undocumented mtp_dspark.* draft"
    if some("enorm", "eh_proj"):
        return "a classic multi-token-prediction (MTP) checkpoint"
    if some("mtp.0.main_proj", "main_proj"):
        return "a DeepSeek-V4 draft (main_proj)"
    if raw.get("model_type") == "k3_dspark" or some("context_proj.weight", "kv_a_proj_with_mqa"):
        return "a Kimi-K3 MLA draft"
    if "Eagle3" in architecture:
        return f"an EAGLE-3 draft ({architecture})"
    if architecture in ("DFlash2DraftModel", "LiLiCorrDraftModel") or some("candidate_selector.", "lilicorr."):
        return f"a DFlash2 or LiLiCorr draft ({architecture})"
    if nested.get("projector_type") in ("domino", "dflash2", "lilicorr"):
        return f"a {nested['projector_type']!r} draft"
    if raw.get("model_type") == "muse_glimmer_assistant" or some("encoder.fc.weight"):
        return "transformers' own DFlash draft (muse_glimmer_assistant)"
    if "shift_label" in nested or "use_confidence_head" in nested or "markov_w1.weight" in tensor_names:
        return "a ModelOpt DSpark draft (dflash_config with shift_label)"
    if raw.get("rope_is_neox_style") is False:
        return "an LFM2.5 DSpark draft (interleaved RoPE)"
    if nested.get("projector_type") == "dspark" or architecture == "DSparkDraftModel":
        return "a SpecForge DSpark draft (nested dflash_config)"
    if architecture == "DFlashDraftModel" or nested:
        return "a z-lab DFlash draft (1+N layout)"
    return f"a {raw.get('model_type', 'nameless')!r} model ({architecture}) without a DSpark draft in it"
