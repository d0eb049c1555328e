"""This package's own layout: `model_type` "dspark", a flat config.json, canonical tensor names (FORMATS §0)."""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import DSparkCheckpointError


def recognises(raw: dict[str, Any], tensor_names: set[str]) -> bool:
    """Whether raw config.json is of this layout."""
    return raw.get("model_type") == DSparkConfig.model_type


def read_config(raw: dict[str, Any], tensor_names: set[str], source: str) -> DSparkConfig:
    """The configuration as it stands in the file."""
    config = DSparkConfig.from_dict(raw)
    if config.draft_vocab_size < config.vocab_size and not {"lm_head.weight", "d2t"} <= tensor_names:
        raise DSparkCheckpointError(
            f"{source}: draft_vocab_size {config.draft_vocab_size} is below vocab_size {config.vocab_size}, so the "
            "file must hold lm_head.weight and d2t, and one of them is missing."
        )
    return config
