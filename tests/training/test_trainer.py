"""The trainer's invariants, on a tiny target."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer

from hf_dspark import DSparkDraftModel
from hf_dspark.errors import DSparkConfigError, DSparkDataError, DSparkTargetError
from hf_dspark.training import DSparkTrainer, DSparkTrainingArguments, initialize_from_target

TEMPLATE = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'] }} w43{% endfor %}"
    "{% if add_generation_prompt %} w40 w42{% endif %}"
)


def records(count=12, length=14):
    """Answers that count upwards: easy to learn."""
    return [
        {"prompt": f"w{i % 30 + 1}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(length))}
        for i in range(count)
    ]


def arguments(folder, **changes) -> DSparkTrainingArguments:
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        num_anchors=6,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=3,
    )
    return DSparkTrainingArguments(**{**settings, **changes})


def trainer_for(folder, draft=None, target=None, data=None, eval_data=None, **changes) -> DSparkTrainer:
    target = target if target is not None else tiny_target()
    trainer = DSparkTrainer(
        model=draft if draft is not None else tiny_draft(target),
        target=target,
        args=arguments(folder, **changes),
        train_dataset=records() if data is None else data,
        eval_dataset=eval_data,
        processing_class=tiny_tokenizer(TEMPLATE),
    )
    return trainer


def weights(draft) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in draft.state_dict().items()}


def test_it_learns_and_reports(tmp_path):
    trainer = trainer_for(tmp_path, num_train_epochs=40, eval_data=records(4))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accepted_length_sample"] > before["eval_accepted_length_sample"]
    assert 1 <= after["eval_accepted_length_greedy"] <= 1 + trainer.draft.config.num_draft_tokens
    assert all(0 <= after[f"eval_acceptance_{mode}_{k}"] <= 1 for mode in ("sample", "greedy") for k in (1, 2, 3, 4))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {"ce_loss", "l1_loss", "confidence_loss", "acceptance_greedy_1", "slots"} <= set(logged[0])
    assert all(math.isfinite(entry["loss"]) for entry in logged)


def test_what_changes_is_what_is_declared(tmp_path):
    target = tiny_target()
    frozen = copy.deepcopy(target.state_dict())
    kept = torch.arange(0, 48, 1)[:44]
    draft = tiny_draft(target, draft_token_ids=kept)
    trainer = trainer_for(tmp_path, draft=draft, target=target)
    declared = {name for name, p in draft.named_parameters() if p.requires_grad}
    before = weights(draft)
    trainer.train()
    changed = {name for name, value in weights(draft).items() if not torch.equal(value, before[name])}
    assert changed == declared and "lm_head.weight" not in declared and "d2t" not in changed
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())
    assert "training_max_length" in draft.config.to_dict() and draft.config.training_max_length > 14


@pytest.mark.parametrize("weight", ["alpha_ce", "alpha_tv", "alpha_conf"])
def test_each_part_can_be_switched_off(tmp_path, weight):
    trainer = trainer_for(tmp_path, max_steps=2, **{weight: 0.0})
    before = weights(trainer.draft)
    trainer.train()
    confident = {name for name in before if name.startswith("confidence_head")}
    changed = {name for name, value in weights(trainer.draft).items() if not torch.equal(value, before[name])}
    assert (confident <= changed) == (weight != "alpha_conf")
    assert "fc.weight" in changed


def test_batch_times_accumulation(tmp_path):
    """One batch of 4 = two of 2 = four of 1: one denominator over the accumulated batch."""
    results = []
    for batch, steps in ((4, 1), (2, 2), (1, 4)):
        torch.manual_seed(0)
        trainer = trainer_for(
            tmp_path / str(batch),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
        )
        trainer.train()
        results.append(weights(trainer.draft))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_resume_is_exact(tmp_path):
    """Interrupted after a checkpoint and resumed in a new trainer: bit for bit the uninterrupted run."""
    whole = trainer_for(tmp_path / "whole", num_train_epochs=3)
    whole.train()

    saving = dict(num_train_epochs=3, save_strategy="steps", save_steps=8)  # in the middle of the second epoch
    trainer_for(tmp_path / "part", **saving).train()
    resumed = trainer_for(tmp_path / "part", draft=tiny_draft(tiny_target(), seed=99), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-8"))

    expected, got = weights(whole.draft), weights(resumed.draft)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_checkpoints_are_drafts(tmp_path):
    target = tiny_target()
    trainer = trainer_for(tmp_path, target=target, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    draft = DSparkDraftModel.from_pretrained(tmp_path / "saved", target=target)
    assert all(torch.equal(value, weights(draft)[name]) for name, value in weights(trainer.draft).items())
    assert not any("embed" in name or "lm_head" in name for name in weights(draft))


def test_anchors_change_with_the_epoch(tmp_path):
    trainer = trainer_for(tmp_path, num_train_epochs=3)
    seen = []
    original = trainer.compute_loss

    def spy(model, inputs, **kwargs):
        seen.append((round(trainer.state.epoch or 0), inputs["anchors"].clone()))
        return original(model, inputs, **kwargs)

    trainer.compute_loss = spy
    trainer.train()
    assert trainer.train_dataset.epoch == 2 and len(seen) == 18


def test_refused_before_the_first_step(tmp_path):
    with pytest.raises(DSparkDataError, match="Nothing to supervise"):
        trainer_for(tmp_path, data=[{"messages": [{"role": "user", "content": "w1 w2"}]}])
    with pytest.raises(DSparkTargetError, match="vocab_size"):
        other = tiny_draft(tiny_target())
        other._target_ref, other.config.vocab_size = None, 99
        trainer_for(tmp_path, draft=other)
    with pytest.raises(DSparkDataError, match="processing_class"):
        target = tiny_target()
        DSparkTrainer(tiny_draft(target), target, arguments(tmp_path), train_dataset=records())


def test_a_wrong_head_map_is_noticed(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target, final_logit_softcapping=0.5)
    with pytest.raises(DSparkTargetError, match="head map"):
        trainer_for(tmp_path, draft=draft, target=target).train()


@pytest.mark.parametrize(
    "changes", [{"alpha_tv": -1}, {"loss_decay_gamma": 0}, {"num_anchors": 0}, {"alpha_ce": 0.0, "alpha_tv": 0.0}]
)
def test_argument_values(tmp_path, changes):
    with pytest.raises(DSparkConfigError, match=next(iter(changes))):
        arguments(tmp_path, **changes)


def test_initialize_from_target(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target, num_hidden_layers=2, block_size=4)
    data = trainer_for(tmp_path, draft=draft, target=target).train_dataset
    with pytest.raises(DSparkConfigError, match="2 layer id"):
        initialize_from_target(draft, target, [1], data)
    initialize_from_target(draft, target, [2, 3], data)
    assert torch.equal(draft.layers[1].mlp.down_proj.weight, target.model.layers[3].mlp.down_proj.weight)
    assert not draft._forward_hooks and not target.model.layers[3].self_attn.q_proj._forward_hooks
