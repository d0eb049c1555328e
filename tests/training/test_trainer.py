"""The trainer's invariants, on a tiny target."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from training_pair import TEMPLATE, arguments, records

from hf_dspark import DSparkDraftModel
from hf_dspark.backbones.attention import apply_rope
from hf_dspark.errors import DSparkConfigError, DSparkDataError, DSparkTargetError
from hf_dspark.training import DSparkTrainer, initialize_draft
from hf_dspark.training.objective import teacher_forward
from hf_dspark.training.states import StateFolder


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


DECLARED = {
    "all": ({}, set()),
    "its own head": ({"train_head": True}, {"lm_head.weight"}),
    "without confidence loss": ({"alpha_conf": 0.0}, set()),
    "confidence detached": ({"detach_confidence": True}, set()),
    "the confidence head alone": ({"trainable": "confidence_head"}, set()),
    "the confidence head alone, without the other losses": (
        {"trainable": "confidence_head", "alpha_ce": 0.0, "alpha_tv": 0.0},
        set(),
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_what_changes_is_what_is_declared(tmp_path, case):
    settings, also = DECLARED[case]
    target = tiny_target()
    frozen = copy.deepcopy(target.state_dict())
    draft = tiny_draft(target, draft_token_ids=torch.arange(44))
    trainer = trainer_for(tmp_path, draft=draft, target=target, **settings)
    declared = {name for name, p in draft.named_parameters() if p.requires_grad}
    confidence = {name for name in weights(draft) if name.startswith("confidence_head.")}
    rest = {name for name in weights(draft) if name not in confidence | {"lm_head.weight", "d2t"}}
    if "trainable" in settings:
        rest = set()
    assert declared == rest | also | (confidence if settings.get("alpha_conf") != 0 else set())
    before = weights(draft)
    trainer.train()
    changed = {name for name, value in weights(draft).items() if not torch.equal(value, before[name])}
    assert changed == declared
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())
    assert "training_max_length" in draft.config.to_dict() and draft.config.training_max_length > 14


def test_a_detached_confidence_head_changes_nothing_else(tmp_path):
    """The rest trains as it does without any confidence loss. The same start in all three, in place of clipping."""

    def trained(**settings):
        trainer = trainer_for(tmp_path, max_steps=3, max_grad_norm=0.0, **settings)
        trainer.train()
        return {n: v for n, v in weights(trainer.draft).items() if not n.startswith("confidence_head.")}

    without, detached, coupled = trained(alpha_conf=0.0), trained(detach_confidence=True), trained()
    assert all(torch.equal(detached[name], value) for name, value in without.items())
    assert not torch.equal(coupled["fc.weight"], without["fc.weight"])


def test_what_cannot_train_is_refused(tmp_path):
    for settings, words in (
        ({"train_head": True}, "draft_vocab_size"),
        ({"trainable": "confidence_head", "alpha_conf": 0.0}, "alpha_conf is 0"),
        ({"trainable": "confidence_head", "train_head": True}, "train_head"),
        ({"trainable": "confidence_head", "muon_learning_rate": 0.02}, "muon_learning_rate"),
        ({"alpha_ce": 0.0, "alpha_tv": 0.0}, "confidence_head"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "persistent"),
    ):
        with pytest.raises(DSparkConfigError, match=words):
            trainer_for(tmp_path, **settings)
    target = tiny_target()
    with pytest.raises(DSparkConfigError, match="has none"):
        headless = tiny_draft(target, enable_confidence_head=False)
        trainer_for(tmp_path, draft=headless, target=target, trainable="confidence_head")


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"dataloader_num_workers": 1}])
def test_what_changes_no_number(tmp_path, settings):
    drafts = []
    for extra in ({}, settings):
        trainer = trainer_for(tmp_path, max_steps=8, **extra)
        trainer.train()
        drafts.append(weights(trainer.draft))
    for name, value in drafts[0].items():
        torch.testing.assert_close(drafts[1][name], value, msg=name)


def test_bf16_autocast_learns_the_same(tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = trainer_for(tmp_path, bf16=bf16, num_train_epochs=20)
        trainer.train()
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        assert {p.dtype for p in trainer.draft.parameters()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_the_target_does_not_drop_out(tmp_path):
    """A target that comes in training mode, as one does from adding an adapter, is no teacher with noise."""
    losses = []
    for mode in (False, True):
        target = tiny_target()
        target.config.attention_dropout = 0.5
        for layer in target.model.layers:
            layer.self_attn.attention_dropout = 0.5
        trainer = trainer_for(tmp_path, target=target.train(mode), max_steps=2)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1]


def test_evaluation_does_not_depend_on_the_batch(tmp_path):
    """One denominator over all held-out slots: answers of different lengths, in batches of 1, 2 and 5."""
    data = [{"prompt": "w1", "response": " ".join(f"w{j + 2}" for j in range(n))} for n in (3, 4, 14, 20, 5)]
    results = []
    for batch in (1, 2, 5):
        trainer = trainer_for(tmp_path, eval_data=data, per_device_eval_batch_size=batch)
        results.append(trainer.evaluate())
    for other in results[1:]:
        for name in ("eval_loss", "eval_acceptance_sample_3", "eval_accepted_length_greedy", "eval_slots"):
            assert other[name] == pytest.approx(results[0][name], rel=1e-5), name


def test_a_head_that_was_trained_is_no_teacher(tmp_path):
    """With kept states and a reduced vocabulary, the draft's own rows stand in for the target's: only when they are."""
    target = tiny_target()
    kept = torch.arange(24) + 8
    changed = tiny_draft(target, draft_token_ids=kept)
    changed.lm_head.weight.data.mul_(1.5)
    results = []
    for folder in (None, str(tmp_path / "states")):
        trainer = trainer_for(tmp_path, draft=changed, target=target, eval_data=records(4), target_states=folder)
        results.append(trainer.evaluate())
    for name in ("eval_loss", "eval_acceptance_greedy_1"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-4), name


@pytest.mark.parametrize("weight", ["alpha_ce", "alpha_tv", "alpha_conf"])
def test_each_part_can_be_switched_off(tmp_path, weight):
    trainer = trainer_for(tmp_path, max_steps=2, **{weight: 0.0})
    before = weights(trainer.draft)
    trainer.train()
    confident = {name for name in before if name.startswith("confidence_head")}
    changed = {name for name, value in weights(trainer.draft).items() if not torch.equal(value, before[name])}
    assert (confident <= changed) == (weight != "alpha_conf")
    declared = {name for name, parameter in trainer.draft.named_parameters() if parameter.requires_grad}
    assert changed == declared
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


@pytest.mark.parametrize("muon", [None, 0.02])
def test_resume_is_exact(tmp_path, muon):
    """Interrupted after a checkpoint and resumed in a new trainer: bit for bit the uninterrupted run."""
    whole = trainer_for(tmp_path / "whole", num_train_epochs=3, muon_learning_rate=muon)
    whole.train()

    # In the middle of the second epoch.
    saving = dict(num_train_epochs=3, save_strategy="steps", save_steps=8, muon_learning_rate=muon)
    trainer_for(tmp_path / "part", **saving).train()
    resumed = trainer_for(tmp_path / "part", draft=tiny_draft(tiny_target(), seed=99), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-8"))

    expected, got = weights(whole.draft), weights(resumed.draft)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_muon_moves_the_matrices_and_adamw_the_rest(tmp_path):
    """Both learning rates follow the schedule, and each optimiser holds what it is meant for."""
    trainer = trainer_for(tmp_path, muon_learning_rate=0.02, lr_scheduler_type="constant", warmup_steps=0)
    trainer.train()
    muon, adamw = trainer.optimizer.optimizer.parts
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.02, 3e-3]
    names = {id(parameter): name for name, parameter in trainer.draft.named_parameters()}
    moved = {names[id(parameter)] for parameter in muon.param_groups[0]["params"]}
    assert "fc.weight" in moved and "layers.0.mlp.up_proj.weight" in moved
    rest = {names[id(parameter)] for parameter in adamw.param_groups[0]["params"]}
    assert "markov_head.markov_w1.weight" in rest and "norm.weight" in rest and not moved & rest
    declared = {name for name, parameter in trainer.draft.named_parameters() if parameter.requires_grad}
    assert moved | rest == declared
    assert trainer.state.log_history[-2]["loss"] < trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("reduced", [False, True])
def test_kept_states_change_nothing(tmp_path, reduced):
    """With the target's states kept on disk: the same draft, and no target forward once they are there."""
    config = {}
    if reduced:
        config = {"draft_vocab_size": 24, "draft_token_ids": torch.arange(24) + 8}
    target = tiny_target()
    online = trainer_for(tmp_path / "online", draft=tiny_draft(target, **config), target=target)
    online.train()

    def kept(calls):
        target = tiny_target()
        trainer = trainer_for(
            tmp_path / "kept",
            draft=tiny_draft(target, **config),
            target=target,
            target_states=str(tmp_path / "states"),
        )
        target.register_forward_hook(lambda *_: calls.append(1))
        trainer.train()
        return trainer

    for expected_calls in (12 + 1, 1):  # every sequence once, then only the check of the head map
        calls: list[int] = []
        trainer = kept(calls)
        assert len(calls) == expected_calls + 1
        for name, value in weights(online.draft).items():
            torch.testing.assert_close(weights(trainer.draft)[name], value, atol=2e-5, rtol=1e-3, msg=name)
    assert not list((tmp_path / "states").rglob("*.part"))


def test_kept_states_belong_to_their_target(tmp_path):
    """Another fine-tune of the same architecture, or other taps, never read these files."""
    target, other = tiny_target(), tiny_target()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    folders = {
        StateFolder(tmp_path, tiny_draft(which, target_layer_ids=taps)).folder
        for which in (target, other)
        for taps in ([0, 2], [0, 1])
    }
    assert len(folders) == 4
    assert StateFolder(tmp_path, tiny_draft(tiny_target(), target_layer_ids=[0, 2])).folder in folders


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
    with pytest.raises(DSparkDataError, match="train_dataset"):
        target = tiny_target()
        DSparkTrainer(tiny_draft(target), target, arguments(tmp_path)).train()
    with pytest.raises(DSparkTargetError, match="vocab_size"):
        other = tiny_draft(tiny_target())
        other._target_ref, other.config.vocab_size = None, 99
        trainer_for(tmp_path, draft=other)
    with pytest.raises(DSparkDataError, match="processing_class"):
        target = tiny_target()
        DSparkTrainer(tiny_draft(target), target, arguments(tmp_path), train_dataset=records())


def test_target_and_data_that_disagree(tmp_path):
    with pytest.raises(DSparkDataError, match="disagree"):
        trainer_for(tmp_path, check_data=True).train()
    uniform = tiny_target()
    torch.nn.init.normal_(uniform.lm_head.weight, std=1e-3)
    uniform.lm_head.weight.data[43] += 0.1 * torch.ones(32)
    likely = [{"prompt": "w1", "response": " ".join(["w2"] * 9)}]
    ids = DSparkTrainer.encode(likely, tiny_tokenizer(TEMPLATE), arguments(tmp_path), uniform)[0]["input_ids"][None]
    states = uniform.model(ids).last_hidden_state[0, :-1]
    uniform.lm_head.weight.data[2] = torch.linalg.lstsq(states, torch.ones(len(states), 1)).solution[:, 0]
    trainer_for(tmp_path, target=uniform, data=likely, check_data=True, max_steps=1).train()


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


def test_initialization_knows_pairs_and_the_last_position(tmp_path):
    """Answers that count upwards: after w5 comes w6. The untrained draft knows, and looks at the newest feature."""
    target = tiny_target()
    draft = tiny_draft(target, markov_rank=24, num_key_value_heads=4, head_dim=32)
    data = trainer_for(tmp_path, draft=draft, target=target, data=records(30)).train_dataset
    state = torch.get_rng_state()
    initialize_draft(draft, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draft.norm.weight, target.model.norm.weight)
    previous = torch.arange(3, 28)
    bias = draft.markov_head.markov_w2(draft.markov_head.markov_w1(previous))
    assert (bias.argmax(dim=-1) == previous + 1).float().mean() > 0.9

    # The score of the first layer depends on the distance alone, and is largest at the position before the anchor.
    ids = data[0]["input_ids"][None]
    features, _ = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    ctx, length = draft.fuse(features), ids.shape[1]
    layer = draft.layers[0]
    key, _ = layer.self_attn.context_keys_values(ctx, draft.rotary_emb(ctx, torch.arange(length)[None]))
    cos, sin = draft.rotary_emb(ctx, torch.tensor([[length]]))
    query = layer.self_attn.q_norm(
        layer.self_attn.q_proj(layer.input_layernorm(draft.embed(ids[:, -1:]))).view(1, 4, 32)
    )
    scores = apply_rope(query, cos, sin)[0] @ key[0].transpose(1, 2)  # [4 heads, 1, length] by broadcasting
    assert (scores.diagonal(dim1=0, dim2=1).T.argmax(dim=-1) == length - 1).float().mean() >= 0.75
