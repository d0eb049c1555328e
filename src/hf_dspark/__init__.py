"""hf-dspark: DSpark speculative decoding for Hugging Face transformers.

Importing the package registers the Auto classes and teaches `generate` to accept a `DSparkDraftModel` as
`assistant_model`; nothing else changes. The two training classes are imported when they are first asked for.
"""

from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel

from .candidate_generator import DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .errors import DSparkError
from .generation.seam import install
from .generation.stats import GenerationStats
from .modeling_dspark import DSparkDraftModel
from .scheduling import PrefixScheduler, SequentialTemperatureScaling, ThroughputCurve

if TYPE_CHECKING:
    from .training import DSparkTrainer, DSparkTrainingArguments
else:

    def __getattr__(name):
        if name not in ("DSparkTrainer", "DSparkTrainingArguments"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import training  # brings the host's Trainer along

        return getattr(training, name)


__version__ = "0.1.0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
install()

__all__ = [
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkError",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "GenerationStats",
    "PrefixScheduler",
    "SequentialTemperatureScaling",
    "ThroughputCurve",
    "__version__",
]
