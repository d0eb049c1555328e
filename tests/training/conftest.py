from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkDraftModel

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(params=sorted(folder.name for folder in GOLDEN.iterdir()))
def golden_case(request):
    """Target, draft and expected tensors of one case of the reference implementation."""
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(folder / "draft", target=target)
    return target, draft, load_file(folder / "expected.safetensors")
