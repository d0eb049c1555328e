"""What trains is declared, gradients are the same however they are computed, and two processes are one."""

from __future__ import annotations

import json

import pytest
import torch
from test_trainer import trainer_for, weights
from tiny_pair import save_pair, tiny_draft, tiny_target, tiny_tokenizer
from training_pair import TEMPLATE, records

from hf_dspark.cli import main
from hf_dspark.errors import DSparkConfigError


def changed_by(trainer):
    before = weights(trainer.draft)
    trainer.train()
    return {name for name, value in weights(trainer.draft).items() if not torch.equal(value, before[name])}


def test_the_confidence_head_alone(tmp_path):
    trainer = trainer_for(tmp_path, trainable="confidence_head", max_steps=3)
    declared = {name for name, p in trainer.draft.named_parameters() if p.requires_grad}
    assert changed_by(trainer) == declared == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_the_drafts_own_head(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target, draft_token_ids=torch.arange(44))
    trainer = trainer_for(tmp_path, draft=draft, target=target, train_head=True, max_steps=3)
    assert "lm_head.weight" in changed_by(trainer)
    with pytest.raises(DSparkConfigError, match="train_head is set, but this draft has the target's own output head"):
        trainer_for(tmp_path, train_head=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"trainable": "confidence_head", "train_head": True}, "leaves nothing for train_head"),
        ({"trainable": "confidence_head", "muon_learning_rate": 0.1}, "leaves nothing for muon_learning_rate"),
        ({"trainable": "confidence_head", "alpha_conf": 0.0}, "alpha_conf is 0"),
        ({"alpha_ce": 0.0, "alpha_tv": 0.0}, "trainable to 'confidence_head'"),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, message):
    with pytest.raises(DSparkConfigError, match=message):
        trainer_for(tmp_path, **changes)


def gradients(tmp_path, **changes):
    trainer = trainer_for(tmp_path, data=records(2), **changes)
    if changes.get("gradient_checkpointing"):
        trainer.draft.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.draft.train()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    trainer.compute_loss(trainer.draft, batch).backward()
    return {name: p.grad for name, p in trainer.draft.named_parameters() if p.grad is not None}


def test_checkpointing_changes_no_gradient(tmp_path):
    plain = gradients(tmp_path / "a")
    kept = gradients(tmp_path / "b", gradient_checkpointing=True)
    assert plain.keys() == kept.keys() and "layers.0.self_attn.q_proj.weight" in plain
    for name, gradient in plain.items():
        torch.testing.assert_close(kept[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_a_detached_confidence_gives_the_rest_no_gradient(tmp_path):
    """Its loss moves its own head as before, and nothing else."""
    both = gradients(tmp_path / "a")
    detached = gradients(tmp_path / "b", detach_confidence=True)
    without = gradients(tmp_path / "c", alpha_conf=0.0)
    head = {name for name in both if name.startswith("confidence_head")}
    assert head and head.isdisjoint(without)
    for name in head:
        torch.testing.assert_close(detached[name], both[name])
    for name, gradient in without.items():
        torch.testing.assert_close(detached[name], gradient, msg=name)
    assert not torch.allclose(both["fc.weight"], detached["fc.weight"])


@pytest.fixture
def files(tmp_path):
    """Paths of a target with a chat template, and of data for it."""
    target, _ = save_pair(tmp_path / "pair")
    tiny_tokenizer(TEMPLATE).save_pretrained(target)
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps(record) for record in records(12)))
    return target, str(data)


def command(files, folder, *options):
    target, data = files
    return [
        *("train", "--target", target, "--data", data, "--output_dir", str(folder), "--block_size", "4"),
        *("--num_hidden_layers", "1", "--target_layer_ids", "0", "2", "--markov_rank", "4", "--validation_share", "0"),
        *("--num_anchors", "6", "--save_strategy", "no", "--report_to", "none", "--use_cpu", "--bf16", "False"),
        *("--check_data", "False", "--export_dtype", "float32", "--seed", "3", *options),
    ]


@pytest.mark.slow
def test_an_estimate_writes_nothing(files, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(command(files, folder, "--estimate", "True", "--max_steps", "30")) == 0
    printed = capsys.readouterr().out
    assert "30" in printed and not folder.exists()


def test_quantising_names_its_extra(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "bitsandbytes" else object())
    assert main(command(files, tmp_path / "out", "--target_quantization", "nf4")) == 2
    error = capsys.readouterr().err
    assert "hf-dspark[quantized]" in error and len(error.strip().splitlines()) == 1
