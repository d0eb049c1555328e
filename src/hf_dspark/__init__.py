"""hf-dspark: DSpark speculative decoding for Hugging Face transformers.

Importing the package registers the Auto classes and teaches `generate` to accept a `DSparkDraftModel` as
`assistant_model`; nothing else changes.
"""

from transformers import AutoConfig, AutoModel

from .candidate_generator import DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .errors import DSparkError
from .generation.seam import install
from .generation.stats import GenerationStats
from .modeling_dspark import DSparkDraftModel

__version__ = "0.1.0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
install()

__all__ = [
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkError",
    "GenerationStats",
    "__version__",
]
