"""`DSparkDraftModel`: saving, loading, strictness, shared tables, Auto classes, foreign layouts."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, random_prompt, tiny_draft, tiny_gemma4, tiny_llama
from transformers import AutoModel, DynamicCache

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.errors import DSparkCheckpointError, DSparkConfigError, DSparkTargetError
from hf_dspark.modeling_dspark import head_logits

GREEDY = dict(max_new_tokens=10, do_sample=False)
HEADS = [{"markov_rank": 0}, *({"markov_head_type": kind} for kind in ("vanilla", "gated", "rnn"))]


def rewrite(folder, change):
    """Applies `change` to the tensors of a saved draft."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **values):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **values}))


# ----------------------------------------------------------------------------------------------------------------------
# Saving and loading
# ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma4])
def test_save_and_load(tmp_path, build, head):
    target = build()
    draft = tiny_draft(target, **head)
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path, target=target)
    ours, theirs = draft.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    prompt = random_prompt(6)
    target.generate(prompt, assistant_model=draft, **GREEDY)
    target.generate(prompt, assistant_model=again, **GREEDY)
    assert again.last_stats.accepted == draft.last_stats.accepted and sum(again.last_stats.proposed) > 0


def test_the_targets_tables_are_never_written(tmp_path):
    target = tiny_llama(tie_word_embeddings=True)
    draft = tiny_draft(target)
    target.generate(random_prompt(6), assistant_model=draft, **GREEDY)  # bound and used
    draft.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not any("embed" in name or "lm_head" in name or "target" in name for name in names)
    assert names == set(draft.state_dict())
    assert DSparkDraftModel.from_pretrained(tmp_path, target=target).lm_head is None


def test_generation_config_is_saved(tmp_path, llama):
    draft = tiny_draft(llama)
    assert draft.generation_config.num_assistant_tokens is None
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.assistant_confidence_threshold = 0.25
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path, target=llama)
    assert again.generation_config.num_assistant_tokens == 3
    llama.generate(random_prompt(6), assistant_model=again, **GREEDY)
    assert max(again.last_stats.proposed) <= 3


def test_dtype_is_the_checkpoints_unless_given(tmp_path, llama):
    tiny_draft(llama).to(torch.bfloat16).save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path, target=llama).dtype == torch.bfloat16
    assert DSparkDraftModel.from_pretrained(tmp_path, target=llama, dtype=torch.float32).dtype == torch.float32


def test_auto_model(tmp_path, llama):
    draft = tiny_draft(llama)
    draft.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is DSparkDraftModel
    assert torch.equal(again.markov_head.markov_w2.weight, draft.markov_head.markov_w2.weight)


def test_reduced_vocabulary(tmp_path, llama):
    ids = torch.arange(1, VOCAB, 3)
    draft = tiny_draft(llama, draft_token_ids=ids)
    draft.lm_head.weight.data.copy_(llama.lm_head.weight[ids])
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path, target=llama)
    assert again.draft_token_ids.tolist() == ids.tolist()
    assert {"lm_head.weight", "d2t"} <= set(load_file(tmp_path / "model.safetensors"))
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(again.base_logits(hidden), llama.lm_head(hidden)[:, ids])
    rewrite(tmp_path, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(DSparkCheckpointError, match="d2t"):
        DSparkDraftModel.from_pretrained(tmp_path)
    for wrong in (torch.tensor([3, 2, 5]), torch.tensor([0, VOCAB]), torch.tensor([1, 1])):
        with pytest.raises(DSparkConfigError, match="draft_token_ids"):
            tiny_draft(llama, draft_token_ids=wrong)


# ----------------------------------------------------------------------------------------------------------------------
# Strictness
# ----------------------------------------------------------------------------------------------------------------------
CHANGES = {
    "missing: markov_head.markov_w2.weight": lambda tensors: tensors.pop("markov_head.markov_w2.weight"),
    "unexpected: extra.weight": lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}),
    "missing: fc.weight; unexpected: model.fc.weight": lambda tensors: tensors.update(
        {"model.fc.weight": tensors.pop("fc.weight")}
    ),
    "mismatched: norm.weight [7], not [32]": lambda tensors: tensors.update({"norm.weight": torch.zeros(7)}),
}


@pytest.mark.parametrize("listed, change", CHANGES.items(), ids=CHANGES)
def test_tensors_that_do_not_fit_are_listed(tmp_path, llama, listed, change):
    tiny_draft(llama).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(DSparkCheckpointError) as error:
        DSparkDraftModel.from_pretrained(tmp_path, target=llama)
    assert listed in str(error.value)


def test_missing_files(tmp_path, llama):
    with pytest.raises(DSparkCheckpointError, match=r"config\.json"):
        DSparkDraftModel.from_pretrained(tmp_path)
    tiny_draft(llama).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DSparkCheckpointError, match=r"no model\.safetensors"):
        DSparkDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 50}, r"vocab_size 50 \(the draft was made for 61\)"),
        ({"num_hidden_layers": 6}, r"num_hidden_layers 6 \(the draft was made for 4\)"),
        ({"hidden_size": 16}, r"hidden_size 16 \(the draft was made for 32\)"),
    ],
)
def test_a_wrong_target_is_refused_with_both_values(tmp_path, llama, changes, message):
    tiny_draft(llama).save_pretrained(tmp_path)
    with pytest.raises(DSparkTargetError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path, target=tiny_llama(**changes))


# ----------------------------------------------------------------------------------------------------------------------
# Tables: own, equal, shared
# ----------------------------------------------------------------------------------------------------------------------
def with_tables(folder, target, embedding=None, head=None):
    """A saved draft whose file also holds tables of its own."""
    tiny_draft(target).save_pretrained(folder)
    own = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    rewrite(folder, lambda tensors: tensors.update({k: v.clone() for k, v in own.items() if v is not None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_tables_are_dropped(tmp_path, llama, dtype):
    """Compared in the checkpoint's dtype: a bf16 copy of an fp32 table is a copy."""
    with_tables(tmp_path, llama, llama.model.embed_tokens.weight.to(dtype), llama.lm_head.weight.to(dtype))
    draft = DSparkDraftModel.from_pretrained(tmp_path, target=llama, dtype=dtype)
    assert draft.embed_tokens is None and draft.lm_head is None
    assert not any("embed" in name or "lm_head" in name for name in draft.state_dict())


def test_tables_that_differ_are_kept_and_used(tmp_path, llama):
    head = llama.lm_head.weight.clone()
    head[-1, 0] += 1e-3  # one number, outside the rows that are looked at first
    with_tables(tmp_path, llama, llama.model.embed_tokens.weight * 1.5, head)
    draft = DSparkDraftModel.from_pretrained(tmp_path, target=llama)
    assert torch.equal(draft.lm_head.weight, head)
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(draft.embed(ids), llama.model.embed_tokens(ids) * 1.5)
    hidden = torch.randn(1, 32)
    torch.testing.assert_close(draft.base_logits(hidden), hidden @ head.T)
    draft.save_pretrained(tmp_path / "again")
    assert {"lm_head.weight", "embed_tokens.weight"} <= set(load_file(tmp_path / "again" / "model.safetensors"))


def test_a_draft_without_a_target_says_so(tmp_path, llama):
    tiny_draft(llama).save_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path)
    with pytest.raises(DSparkTargetError, match="no target is bound"):
        draft.embed(torch.tensor([[1]]))
    prompt = random_prompt(5)
    assert torch.equal(llama.generate(prompt, assistant_model=draft, **GREEDY), llama.generate(prompt, **GREEDY))


def test_the_target_is_held_weakly_and_outside_the_module_tree():
    target = tiny_llama()
    draft = tiny_draft(target)
    assert not any(module is target for module in draft.modules())
    assert pickle.loads(pickle.dumps(draft))._target_ref is None
    del target
    with pytest.raises(DSparkTargetError, match="no target is bound"):
        _ = draft.target


def test_soft_cap_and_logit_scale_belong_to_the_base_logits():
    target = tiny_gemma4(final_logit_softcapping=3.0)
    draft = tiny_draft(target)
    prompt = random_prompt(6)
    with torch.no_grad():
        out = target(prompt, output_hidden_states=True)
        last = out.hidden_states[-1]  # after the final norm
        torch.testing.assert_close(draft.base_logits(last), out.logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(head_logits(target, last), out.logits, atol=1e-2)


def test_embedding_scale_is_the_modules():
    target = tiny_gemma4()
    draft = tiny_draft(target)
    ids = random_prompt(4)
    torch.testing.assert_close(draft.embed(ids), target.get_input_embeddings()(ids))
    assert not torch.allclose(draft.embed(ids), target.get_input_embeddings().weight[ids])


# ----------------------------------------------------------------------------------------------------------------------
# Drafting and training see the same
# ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma4])
@torch.no_grad()
def test_forward_equals_block_by_block(build, sample_from_anchor, head):
    """The training forward, teacher-forced, gives what drafting gives when it happens to draft the true tokens."""
    target = build()
    draft = tiny_draft(target, sample_from_anchor=sample_from_anchor, **head)
    ids = random_prompt(20, seed=4)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)
    anchors = torch.tensor([[3, 9, 14]])
    out = draft(features, ids, anchors)
    for a, anchor in enumerate(anchors[0].tolist()):
        cache = DynamicCache()
        draft.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
        hidden, state = draft.start_block(cache, ids[:, anchor], torch.tensor([anchor]))
        torch.testing.assert_close(hidden[0], out.hidden_states[0, a], atol=1e-4, rtol=1e-4)
        base = draft.base_logits(hidden)
        for k in range(draft.config.num_draft_tokens):
            logits, embedding, state = draft.sequential_step(base[:, k], hidden[:, k], ids[:, anchor + k], state)
            theirs = draft.base_logits(out.hidden_states[:, a, k])
            if draft.markov_head is not None:
                theirs = theirs + draft.markov_head.markov_w2(out.markov_latents[:, a, k])
            torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
            confidence = draft.confidence_head(hidden[:, k], embedding)
            torch.testing.assert_close(confidence, out.confidence_logits[:, a, k], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_context_grows_in_pieces(llama):
    draft = tiny_draft(llama)
    features, positions = torch.randn(1, 12, 64), torch.arange(5, 17)[None]
    whole, pieces = DynamicCache(), DynamicCache()
    draft.extend_context(whole, features, positions)
    for part in (slice(0, 7), slice(7, 8), slice(8, 12)):
        draft.extend_context(pieces, features[:, part], positions[:, part])
    ours, theirs = (draft.start_block(cache, torch.tensor([3]), torch.tensor([17]))[0] for cache in (pieces, whole))
    torch.testing.assert_close(ours, theirs)
    assert pieces.get_seq_length() == 12  # the block itself leaves nothing behind


# ----------------------------------------------------------------------------------------------------------------------
# Foreign layouts
# ----------------------------------------------------------------------------------------------------------------------
FOREIGN = {
    "speculators": ({"speculators_model_type": "eagle3"}, {}, "a speculators checkpoint"),
    "z-lab": ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, {}, "z-lab DFlash"),
    "specforge": (
        {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}},
        {},
        "SpecForge DSpark",
    ),
    "modelopt": ({"dflash_config": {"shift_label": True}}, {"markov_w1.weight"}, "ModelOpt DSpark"),
    "eagle": ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "EAGLE-3"),
    "deepseek v4": ({"dspark_block_size": 4, "model_type": "deepseek_v4"}, {}, "DeepSeek-V4 target"),
    "mtp": ({"model_type": "deepseek_v3"}, {"model.layers.61.eh_proj.weight"}, "multi-token-prediction"),
    "transformers' own": ({"model_type": "muse_glimmer_assistant"}, {}, "transformers' own DFlash"),
    "plain": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {}, "a 'llama' model"),
}


@pytest.mark.parametrize("raw, names, message", FOREIGN.values(), ids=FOREIGN)
def test_foreign_layouts_are_refused_by_name(tmp_path, raw, names, message):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({name: torch.zeros(1) for name in (names or {"x.weight"})}, tmp_path / "model.safetensors")
    with pytest.raises(DSparkCheckpointError, match=message) as error:
        DSparkDraftModel.from_pretrained(tmp_path)
    assert "does not load" in str(error.value)


def test_config_of_a_draft_is_no_qwen3(tmp_path, llama):
    tiny_draft(llama).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dspark"
    edit_config(tmp_path, model_type="qwen3")
    with pytest.raises(DSparkCheckpointError, match="does not load"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_for_target_is_a_config_and_weights(llama):
    draft = DSparkDraftModel.for_target(llama, num_hidden_layers=2, block_size=4, target_layer_ids=[0, 1, 2])
    assert isinstance(draft.config, DSparkConfig) and draft.target is llama
    assert draft.fc.weight.shape == (32, 96) and len(draft.layers) == 2
    assert draft.config.target_model_name_or_path is None
