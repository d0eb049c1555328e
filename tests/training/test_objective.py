"""The objective: which slots count, and fused against plain, values and gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TARGETS, VOCAB, tiny_draft
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_dspark import DSparkDraftModel
from hf_dspark.training.objective import (
    dspark_objective,
    sample_anchors,
    slot_mask,
    slot_weights,
    teacher_forward,
)

KEPT = torch.arange(0, VOCAB, 2)  # a reduced vocabulary that leaves out every odd id


def plain_objective(draft, target, batch, weights, denominator):
    """The same loss written down directly, with full tensors and autograd."""
    ids, anchors, slots = batch["input_ids"], batch["anchors"], batch["slots"]
    features, _ = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    output = draft(features, ids, anchors)
    logits = draft.base_logits(output.hidden_states)
    if output.markov_latents is not None:
        logits = logits + draft.markov_head.markov_w2(output.markov_latents)
    if draft.draft_token_ids is not None:
        full = torch.full((*logits.shape[:-1], VOCAB), -torch.inf)
        logits = full.index_copy(-1, draft.draft_token_ids, logits)
    at = (anchors[..., None] + torch.arange(slots.shape[-1])).clamp(max=ids.shape[1] - 2)
    rows = torch.arange(len(ids))[:, None, None]
    teacher = target(ids).logits.detach()[rows, at]
    labels = ids[rows, at + 1]
    l1 = (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    ce = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    ce = torch.where(ce.isinf(), 0.0, ce)  # a label outside the draft vocabulary
    scale = weights * slots / denominator
    total = (scale * (0.1 * ce + 0.9 * l1)).sum()
    if output.confidence_logits is not None:
        overlap = 1 - 0.5 * l1.detach()
        total = (
            total
            + (scale * binary_cross_entropy_with_logits(output.confidence_logits, overlap, reduction="none")).sum()
        )
    return total


def make_batch(draft, length=24, batch=2, blocks=7):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:, :4] = 0
    mask[1, 15:] = 0
    anchors = torch.stack([sample_anchors(row, blocks, generator) for row in mask])
    return {"input_ids": ids, "anchors": anchors, "slots": slot_mask(mask, anchors, draft.config.num_draft_tokens)}


CASES = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no sequential head": {"markov_rank": 0},
    "no confidence head": {"enable_confidence_head": False},
    "1+N layout": {"sample_from_anchor": False},
    "1+N layout, rnn": {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "reduced vocabulary": {"draft_token_ids": KEPT},
}


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_plain(case, kind, targets):
    target = targets(kind)
    draft = tiny_draft(target, **CASES[case]).train()
    if draft.lm_head is not None:
        draft.lm_head.requires_grad_(case == "reduced vocabulary")  # a trained head gets its gradient too
    batch = make_batch(draft)
    weights = slot_weights(draft.config.num_draft_tokens, 4.0)

    plain = plain_objective(draft, target, batch, weights, 7.5)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    target.zero_grad()  # written down plainly, the loss reaches the borrowed head

    ids = batch["input_ids"]
    features, states = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    output = draft(features, ids, batch["anchors"])
    fused = dspark_objective(draft, output, states, ids, batch["anchors"], batch["slots"], weights, 7.5)
    fused.loss.backward()
    got = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}

    assert batch["slots"].sum() > 20
    torch.testing.assert_close(fused.loss, plain, rtol=1e-5, atol=1e-5)
    assert set(got) == set(expected)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert all(p.grad is None for p in target.parameters())


def test_fused_without_gradient_gives_the_same_numbers(llama):
    draft = tiny_draft(llama)
    batch = make_batch(draft)
    ids, weights = batch["input_ids"], slot_weights(5, 4.0)
    features, states = teacher_forward(llama, draft.config.target_layer_ids, ids, torch.ones_like(ids))

    def loss():
        output = draft(features, ids, batch["anchors"])
        return dspark_objective(draft, output, states, ids, batch["anchors"], batch["slots"], weights, 3.0)

    with_grad = loss()
    with torch.no_grad():
        without = loss()
    assert torch.equal(with_grad.loss.detach(), without.loss)
    assert torch.equal(with_grad.agrees, without.agrees)


def test_teacher_sees_the_normed_state(targets):
    """Features are raw layer outputs; what the head reads is normed; both come from one forward."""
    for name in TARGETS:
        target = targets(name)
        draft = tiny_draft(target)
        ids = make_batch(draft)["input_ids"]
        features, states = teacher_forward(target, [0, 2], ids, torch.ones_like(ids))
        everything = target(ids, output_hidden_states=True)
        assert torch.equal(features, torch.cat([everything.hidden_states[1], everything.hidden_states[3]], dim=-1))
        logits = draft.scale_and_cap(target.get_output_embeddings()(states))
        torch.testing.assert_close(logits, everything.logits)


def test_blocks_see_their_past_only(llama):
    """Changing a token after the anchor's block, or another block's anchor, changes nothing for this block."""
    draft = tiny_draft(llama)
    ids = make_batch(draft)["input_ids"][:1]
    features, _ = teacher_forward(llama, [0, 2], ids, torch.ones_like(ids))
    anchors = torch.tensor([[6, 9]])
    one = draft(features, ids, anchors).hidden_states[:, 0]
    later = features.clone()
    later[:, 6:] = 17.0  # the anchor's own feature does not exist yet
    assert torch.equal(one, draft(later, ids, torch.tensor([[6, 11]])).hidden_states[:, 0])
    earlier = features.clone()
    earlier[:, 5] = 17.0
    assert not torch.allclose(one, draft(earlier, ids, anchors).hidden_states[:, 0])


def test_training_forward_equals_drafting(llama):
    """The block that training computes is the block that `generate` drafts from."""
    from transformers import DynamicCache

    draft = tiny_draft(llama)
    ids = make_batch(draft)["input_ids"][:1]
    features, _ = teacher_forward(llama, [0, 2], ids, torch.ones_like(ids))
    anchor = 9
    trained = draft(features, ids, torch.tensor([[anchor]])).hidden_states[:, 0]
    cache = DynamicCache()
    draft.extend_context(cache, features[:, :4], torch.arange(4)[None])
    draft.extend_context(cache, features[:, 4:anchor], torch.arange(4, anchor)[None])
    drafted, _ = draft.start_block(cache, ids[:, anchor], torch.tensor([anchor]))
    torch.testing.assert_close(trained, drafted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_activation_checkpointing_recomputes_and_changes_nothing(kind, targets):
    target = targets(kind)
    draft = tiny_draft(target, num_hidden_layers=2).train()
    batch = make_batch(draft)
    ids = batch["input_ids"]
    features, _ = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    calls = []
    draft.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    grads = []
    for enable in (False, True):
        if enable:
            draft.activation_checkpointing_enable()
        draft.zero_grad()
        draft(features, ids, batch["anchors"]).hidden_states.square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None})
    assert len(calls) == 1 + 2
    for name, value in grads[0].items():
        torch.testing.assert_close(grads[1][name], value, msg=name)


def test_slot_mask_by_hand():
    #                    0  1  2  3  4  5  6
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1])
    slots = slot_mask(mask, torch.tensor([1, 2, 5, -1]), 3)
    assert slots.tolist() == [
        [True, True, False],  # labels 2, 3, then 4, which is masked out
        [True, False, False],  # label 3; after a gap nothing counts, though 5 is masked in
        [True, False, False],  # label 6, then the end
        [False, False, False],  # absent
    ]


def test_anchors_are_candidates_and_all_are_taken_when_few():
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    assert sample_anchors(mask, 10, torch.Generator()).tolist() == [0, 3, 4]
    drawn = sample_anchors(torch.ones(100), 8, torch.Generator().manual_seed(0))
    assert len(drawn) == 8 and (drawn.diff() > 0).all() and drawn.max() <= 98


def test_weights():
    torch.testing.assert_close(slot_weights(3, 4.0), torch.tensor([1.0, 0.77880078, 0.60653066]))


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """Vocab 152k, sequence 2048, 512 anchors, block 7, hidden 256: the peak that docs/training.md states."""
    import subprocess
    import sys

    script = tmp_path / "peak.py"
    script.write_text(_PEAK)
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    rise_mib = float(printed.split()[-1])
    logits_mib = 512 * 7 * 152_000 * 4 / 2**20  # one fp32 tensor [slots, vocab], which must never exist
    assert rise_mib < 900 < logits_mib  # 745 when measured


_PEAK = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_dspark import DSparkDraftModel
from hf_dspark.training.objective import dspark_objective, slot_weights, teacher_forward
config = LlamaConfig(vocab_size=152_000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
target = LlamaForCausalLM(config).eval().requires_grad_(False)
draft = DSparkDraftModel.for_target(target, num_hidden_layers=2, block_size=7, markov_rank=32, target_layer_ids=[0, 2])
def step(length, anchors):
    ids = torch.randint(152_000, (1, length))
    features, states = teacher_forward(target, [0, 2], ids, torch.ones_like(ids))
    at = torch.arange(length - 8)[torch.randperm(length - 8)[:anchors].sort().values][None]
    slots = torch.ones(1, anchors, 7, dtype=torch.bool)
    out = draft(features, ids, at)
    dspark_objective(draft, out, states, ids, at, slots, slot_weights(7, 4.0), 1000.0).loss.backward()
    draft.zero_grad()
step(32, 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(2048, 512)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_golden_losses(golden_case):
    """Values of the reference implementation: logits, labels, supervised slots and the three sums (1e-4)."""
    target, draft, expected = golden_case
    loss = {name.removeprefix("loss."): value for name, value in expected.items() if name.startswith("loss.")}
    ids, anchors = loss["input_ids"], loss["anchor_positions"]
    features, states = teacher_forward(target, draft.config.target_layer_ids, ids, torch.ones_like(ids))
    num_slots = draft.config.num_draft_tokens
    slots = slot_mask(loss["loss_mask"], torch.where(loss["block_keep_mask"].bool(), anchors, -1), num_slots)
    assert torch.equal(slots, loss["eval_mask"].bool())
    output = draft(features, ids, anchors)
    logits = draft.base_logits(output.hidden_states)
    if output.markov_latents is not None:
        logits = logits + draft.markov_head.markov_w2(output.markov_latents)
    torch.testing.assert_close(logits[slots], loss["draft_logits"][slots], rtol=1e-4, atol=1e-4)
    result = dspark_objective(draft, output, states, ids, anchors, slots, slot_weights(num_slots, 4.0), 1.0)
    torch.testing.assert_close(result.weight.view(1), loss["ce_loss_den"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.ce.view(1), loss["ce_loss_num"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.l1.view(1), loss["l1_loss_num"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.confidence.view(1), loss["confidence_loss_num"], rtol=1e-4, atol=1e-4)
    if output.confidence_logits is not None:
        torch.testing.assert_close(
            output.confidence_logits[slots], loss["confidence_logits"][slots], rtol=1e-4, atol=1e-4
        )
    assert isinstance(draft, DSparkDraftModel)
