"""Targets that are more than their base weights: LoRA adapters (peft), nf4 layers (bitsandbytes), offloaded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from test_trainer import TEMPLATE, records, trainer_for, weights
from tiny_pair import save_pair, tiny_draft, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_dspark import DSparkDraftModel
from hf_dspark.cli import main
from hf_dspark.errors import DSparkConfigError, DSparkDependencyError
from hf_dspark.training import DSparkTrainer
from hf_dspark.training.objective import teacher_forward

PROMPT = torch.tensor([[3, 4, 5, 6]])


def with_adapter(target, modules=("q_proj", "up_proj"), kind="wrapped"):
    """The target with a LoRA adapter that does something; dropout is on until someone calls `eval`."""
    # transformers' own `add_adapter` asks for a newer peft than wrapping does.
    peft = pytest.importorskip("peft", minversion="0.22" if kind == "added" else None)
    config = peft.LoraConfig(r=4, target_modules=list(modules), lora_dropout=0.5, init_lora_weights=False)
    torch.manual_seed(5)
    if kind == "wrapped":
        return peft.get_peft_model(target, config).train()
    target.add_adapter(config)
    return target.train()


@pytest.mark.parametrize("kind", ["wrapped", "added"])
@pytest.mark.parametrize("modules", [("q_proj", "up_proj"), ("lm_head", "q_proj")])
def test_trains_for_the_adapted_target_and_drafts_for_it(tmp_path, kind, modules):
    target = with_adapter(tiny_target(), modules, kind)
    frozen = copy.deepcopy({name: value for name, value in target.state_dict().items()})
    draft = tiny_draft(target)
    trainer = trainer_for(tmp_path, draft=draft, target=target, num_train_epochs=20, eval_data=records(4))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())

    # The teacher is the adapted model.
    ids = torch.arange(3, 15)[None]
    _, states = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    torch.testing.assert_close(draft.base_logits(states), target(input_ids=ids).logits)
    assert not torch.allclose(target(input_ids=ids).logits, tiny_target()(ids).logits, atol=0.1)

    plain = target.generate(input_ids=PROMPT, do_sample=False, max_new_tokens=24)
    drafted = target.generate(input_ids=PROMPT, do_sample=False, max_new_tokens=24, assistant_model=draft)
    assert torch.equal(plain, drafted)
    assert sum(draft.last_stats.proposed) > 0
    assert len(plain[0]) > 4


def test_an_adapted_head_is_not_its_base_weight():
    """A draft's own copy of the base head stays: the adapted head is another map."""
    target = tiny_target()
    own = DSparkDraftModel(tiny_draft(target).config, own_embed_tokens=True, own_lm_head=True)
    own.lm_head.weight.data.copy_(target.lm_head.weight)
    own.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    own.bind_target(with_adapter(tiny_target(), ("lm_head",)))
    assert own.lm_head is not None and own.embed_tokens is None


def test_an_adapter_folder_from_the_command_line(tmp_path):
    pytest.importorskip("peft")
    target_path, _ = save_pair(tmp_path)
    tiny_tokenizer(TEMPLATE).save_pretrained(target_path)
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(target_path))
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer(TEMPLATE).save_pretrained(tmp_path / "adapter")
    out = train_command(tmp_path, "--target", str(tmp_path / "adapter"))
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    draft = DSparkDraftModel.from_pretrained(out, target=target)
    assert draft.config.target_model_name_or_path == str(tmp_path / "adapter")


def train_command(tmp_path, *options):
    import json

    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in records(8)))
    out = tmp_path / "out"
    settings = "--num_hidden_layers 1 --block_size 4 --markov_rank 4 --target_layer_ids 0 2 --validation_share 0 "
    settings += "--num_anchors 6 --max_steps 3 --bf16 no --use_cpu true --check_data no --save_strategy no "
    settings += "--report_to none --disable_tqdm true"
    argv = ["train", "--data", str(data), "--output_dir", str(out), *settings.split(), *options]
    assert main(argv) == 0
    return out


def larger_target():
    """Rows of whole quantisation blocks, 64 weights, as any real model has: bitsandbytes on a CPU takes no others."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_target().config)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def nf4_target(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    larger_target().save_pretrained(tmp_path / "plain")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=quantized, device_map="cpu")


def test_trains_for_a_quantised_target_and_drafts_for_it(tmp_path, nf4_target):
    draft = tiny_draft(nf4_target, draft_token_ids=torch.arange(44))
    trainer = trainer_for(tmp_path, draft=draft, target=nf4_target, num_train_epochs=20, eval_data=records(4))
    before = trainer.evaluate()["eval_loss"]
    # Not its weights: on a CPU, bitsandbytes packs them anew for a forward, and back again for a state dict.
    with torch.no_grad():
        logits = nf4_target(PROMPT).logits
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    with torch.no_grad():
        assert torch.equal(nf4_target(PROMPT).logits, logits)  # untouched
    plain = nf4_target.generate(PROMPT, do_sample=False, max_new_tokens=24)
    drafted = nf4_target.generate(PROMPT, do_sample=False, max_new_tokens=24, assistant_model=draft)
    assert torch.equal(plain, drafted) and sum(draft.last_stats.proposed) > 0


def test_quantising_from_the_command_line(tmp_path):
    pytest.importorskip("bitsandbytes")
    target_path = str(tmp_path / "target")
    larger_target().save_pretrained(target_path)
    tiny_tokenizer(TEMPLATE).save_pretrained(target_path)
    out = train_command(tmp_path, "--target", target_path, "--target_quantization", "nf4", "--target_dtype", "float32")
    assert (out / "model.safetensors").exists()


def test_quantising_without_the_library(monkeypatch):
    from argparse import Namespace

    from hf_dspark.cli import loading

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DSparkDependencyError, match=r"hf-dspark\[quantized\]"):
        loading.load_target("anything", Namespace(dtype="auto", device="cpu", threads=None), quantization="nf4")


def test_an_offloaded_target_trains_the_same(tmp_path):
    """Weights that are brought in for each forward, as with a `device_map` that spills over."""
    from accelerate import disk_offload

    drafts = []
    for offloaded in (False, True):
        target = tiny_target()
        draft = tiny_draft(target)
        if offloaded:
            disk_offload(target, str(tmp_path / "disk"), execution_device=torch.device("cpu"))
            assert target.model.layers[0].mlp.up_proj.weight.device.type == "meta"
        trainer = trainer_for(tmp_path, draft=draft, target=target, max_steps=3)
        trainer.train()
        drafts.append(weights(draft))
    for name, value in drafts[0].items():
        torch.testing.assert_close(drafts[1][name], value, msg=name)
    assert isinstance(trainer, DSparkTrainer)
    with pytest.raises(DSparkConfigError, match=r"target_states .* is offloaded"):
        trainer_for(tmp_path, draft=draft, target=target, target_states=str(tmp_path / "states"))
