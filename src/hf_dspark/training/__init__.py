"""Training: arguments, data, the fused objective, and the trainer."""

from .arguments import DSparkModelArguments, DSparkTrainingArguments
from .data import DSparkCollator, DSparkDataset
from .initialization import initialize_draft
from .masks import encode_conversation
from .objective import dspark_objective, sample_anchors, slot_mask, slot_weights
from .trainer import DSparkTrainer

__all__ = [
    "DSparkCollator",
    "DSparkDataset",
    "DSparkModelArguments",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "dspark_objective",
    "encode_conversation",
    "initialize_draft",
    "sample_anchors",
    "slot_mask",
    "slot_weights",
]
