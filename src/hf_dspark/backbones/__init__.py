"""Draft-model backbones: one module per family, each a decoder layer that reads `[context ; block]`."""

from ..configuration_dspark import DSparkConfig
from .gemma4 import Gemma4DraftLayer, Gemma4RMSNorm
from .qwen3 import Qwen3DraftLayer, Qwen3RMSNorm


def draft_layer(config: DSparkConfig) -> Qwen3DraftLayer | Gemma4DraftLayer:
    """One decoder layer of the backbone that `config.backbone` names."""
    return Gemma4DraftLayer(config) if config.backbone == "gemma4" else Qwen3DraftLayer(config)


def draft_norm(config: DSparkConfig) -> Qwen3RMSNorm | Gemma4RMSNorm:
    """One RMSNorm over the hidden size, of the backbone that `config.backbone` names."""
    norm = Gemma4RMSNorm if config.backbone == "gemma4" else Qwen3RMSNorm
    return norm(config.hidden_size, eps=config.rms_norm_eps)
