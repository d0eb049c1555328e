"""What a call leaves behind, the knobs, the statistics, and transformers' candidate protocol."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from scripted_drafts import Script, scripted_draft
from tiny_models import TARGETS, random_prompt, tiny_draft
from transformers import GenerationConfig, GenerationMixin

import hf_dspark.candidate_generator as candidate_generator
from hf_dspark import DSparkCandidateGenerator, GenerationStats
from hf_dspark.candidate_generator import resolve_knobs

PROMPT = random_prompt(9)
GREEDY = dict(max_new_tokens=16, do_sample=False)


def hooks(model):
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def test_nothing_stays_behind():
    target = TARGETS["gemma3"]()
    draft = tiny_draft(target)
    target.generate(PROMPT, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)  # the host's own hooks
    before = hooks(target), hooks(draft)
    configs = [copy.deepcopy(c.to_dict()) for m in (target, draft) for c in (m.config, m.generation_config)]
    attributes = set(vars(target)), set(vars(draft))

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        target.generate(PROMPT, assistant_model=draft, **GREEDY)
        counts.append(tensors())
    assert counts[1] == counts[2]
    assert (hooks(target), hooks(draft)) == before
    assert configs == [c.to_dict() for m in (target, draft) for c in (m.config, m.generation_config)]
    assert (set(vars(target)), set(vars(draft))) == attributes


def test_hooks_are_gone_after_a_failed_prefill():
    target = TARGETS["qwen3"]()
    draft = tiny_draft(target)
    target.generate(PROMPT, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    before = hooks(target)
    with pytest.raises(IndexError):
        target.generate(torch.tensor([[1, 2, 10_000]]), assistant_model=draft, **GREEDY)
    assert hooks(target) == before


def test_knob_defaults_are_the_hosts():
    defaults = GenerationConfig._get_default_generation_params()
    assert defaults["num_assistant_tokens"] == candidate_generator.HOST_NUM_ASSISTANT_TOKENS
    assert defaults["assistant_confidence_threshold"] == candidate_generator.HOST_CONFIDENCE_THRESHOLD


def test_knob_precedence(llama):
    draft = tiny_draft(llama)

    def knobs(**values):
        return resolve_knobs(draft, GenerationConfig(**values))

    assert knobs() == knobs(num_assistant_tokens=20, assistant_confidence_threshold=0.4) == (5, None)
    assert knobs(num_assistant_tokens=3, assistant_confidence_threshold=0.2) == (3, 0.2)
    assert knobs(num_assistant_tokens=9) == (5, None)  # clamped to the block
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.assistant_confidence_threshold = 0.7
    assert knobs() == knobs(num_assistant_tokens=20) == (2, 0.7)
    assert knobs(num_assistant_tokens=4, assistant_confidence_threshold=0.0) == (4, None)


def test_fewer_drafts_are_the_prefix_of_the_full_block(llama):
    """Never a smaller block: the backbone sees all γ slots whatever is drafted."""
    draft, blocks = tiny_draft(llama), {}
    original = draft.start_block
    for limit in (5, 2):
        blocks[limit] = []
        draft.start_block = lambda *a, n=limit: (blocks[n].append(original(*a)), blocks[n][-1])[1]
        llama.generate(PROMPT, assistant_model=draft, num_assistant_tokens=limit, max_new_tokens=20, do_sample=False)
        stats = draft.last_stats
        assert max(stats.proposed) == limit == max(stats.scheduled)
        assert stats.reasons[0] == ("full block" if limit == 5 else "num_assistant_tokens")
    torch.testing.assert_close(blocks[5][0][0], blocks[2][0][0])
    assert blocks[2][0][0].shape[1] == 5


def test_threshold(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    text = plain[0, PROMPT.shape[1] :].tolist()
    for stops_at, chances in ((2, [0.9, 0.8, 0.1, 0.9, 0.9]), (0, [0.3] * 5), (5, [0.5] * 5)):
        draft = scripted_draft(llama, "oracle", text)
        steps = []
        draft.confidence_head.forward = lambda h, e, s=steps, c=chances: (
            s.append(1),
            torch.logit(torch.tensor([c[(len(s) - 1) % 5]])),
        )[1]
        draft.config.confidence_temperatures = None
        drafted = []
        step = draft.sequential_step
        draft.sequential_step = lambda *a, d=drafted, f=step: (d.append(1), f(*a))[1]
        out = llama.generate(
            PROMPT, assistant_model=draft, assistant_confidence_threshold=0.5 - 1e-6, max_new_tokens=8, do_sample=False
        )
        stats = draft.last_stats
        assert torch.equal(out, plain[:, : out.shape[1]])
        assert stats.proposed[0] == stats.scheduled[0] == stats.accepted[0] == stops_at
        assert stats.reasons[0] == ("threshold" if stops_at < 5 else "full block")
        if stops_at == 0:
            assert stats.rounds == 7 and not any(stats.proposed)


def test_confidence_is_not_computed_when_nobody_asks(llama):
    draft = tiny_draft(llama)
    draft.confidence_head.forward = None
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert draft.last_stats.failure is None


@torch.no_grad()
def test_statistics_of_a_call(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    draft = scripted_draft(llama, "oracle", plain[0, PROMPT.shape[1] :].tolist())
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    # 16 tokens: one from the prefill, 5 + 1 twice, then three left, of which two are drafted.
    assert stats.new_tokens == 16 and stats.rounds == 3
    assert stats.proposed == stats.accepted == stats.scheduled == [5, 5, 2]
    assert stats.reasons == ["full block", "full block", "length budget"]
    assert stats.accepted_length == 5.0 and stats.acceptance_rate == 1.0
    assert stats.acceptance_by_position == [1.0] * 5
    assert stats.context_tokens == 9 and stats.paused_rounds == 0
    assert stats.draft_seconds > 0 and stats.verify_seconds > 0


def test_statistics_by_themselves():
    stats = GenerationStats(new_tokens=8, context_tokens=3)
    for proposed, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        stats.add_round(proposed, accepted, proposed, "full block")
    assert stats.rounds == 4 and stats.accepted_length == 7 / 4
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2]
    text = str(stats)
    assert "\n" not in text and "accepted length 1.75" in text and "4 of 8 drafts" in text
    assert json.loads(json.dumps(stats.to_dict()))["acceptance_by_position"][2] == 0.5
    empty = GenerationStats(new_tokens=1)
    assert empty.accepted_length == 1.0 and empty.acceptance_by_position == [] and str(empty)


def test_an_eos_inside_a_block_counts_only_what_was_committed(llama):
    text = llama.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    draft = scripted_draft(llama, "oracle", text)
    llama.generate(PROMPT, assistant_model=draft, eos_token_id=text[3], **GREEDY)
    assert draft.last_stats.proposed == [5] and draft.last_stats.accepted == [3]
    assert draft.last_stats.new_tokens == 4 and draft.last_stats.accepted_length == 3.0


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("choice", [{"do_sample": False}, {"do_sample": True, "top_k": 1}])
def test_the_hosts_own_loop_can_drive_the_generator(targets, name, choice, monkeypatch):
    """transformers' candidate protocol: what our loop uses is usable by others."""
    target = targets(name)
    plain = target.generate(PROMPT, max_new_tokens=20, **choice)
    text = plain[0, PROMPT.shape[1] :].tolist()
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding.__wrapped__)
    made = []
    original = GenerationMixin._get_candidate_generator
    monkeypatch.setattr(
        GenerationMixin, "_get_candidate_generator", lambda self, **k: (made.append(original(self, **k)), made[-1])[1]
    )
    for is_wrong in (lambda i: False, lambda i: i % 3 == 0, lambda i: True):
        draft = tiny_draft(target)
        script = Script(draft, text, is_wrong)
        out = target.generate(PROMPT, assistant_model=draft, max_new_tokens=20, **choice)
        assert torch.equal(out, plain)
        assert isinstance(made[-1], DSparkCandidateGenerator) and made[-1].failure is None
        # Of the 19 steps after the prefill the last has no room for a draft.
        assert script.round + 1 == 18 if is_wrong(1) else script.round < 8


def test_candidates_follow_the_protocol(llama):
    draft = tiny_draft(llama, draft_token_ids=torch.tensor([1, 5, 9, 30]))
    config = GenerationConfig(do_sample=True, max_length=40)
    generator = DSparkCandidateGenerator(draft, config)
    assert generator.requires_model_outputs
    assert generator.get_candidates(PROMPT, model_kwargs={}, model_outputs=None, is_first_iteration=True)[1] is None
    outputs = llama(PROMPT, **generator.model_kwargs_overrides)
    assert [h is not None for h in outputs.hidden_states] == [False, True, False, True, False]
    ids = torch.cat([PROMPT, torch.tensor([[7]])], dim=1)
    kwargs = {"position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
    with torch.no_grad():
        candidates, log_q = generator.get_candidates(
            ids, model_kwargs=kwargs, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
        )
    assert candidates.shape == (1, ids.shape[1] + 5) and log_q.shape == (1, 5, 61)
    assert set(candidates[0, ids.shape[1] :].tolist()) <= {1, 5, 9, 30}
    assert ((log_q > -torch.inf).sum(-1) == 4).all()
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(1, 5))
    assert generator.context_tokens == PROMPT.shape[1]


def test_drafting_obeys_the_calls_warpers(llama):
    """Temperature and penalties shape q, on copies; processors that may have a state are never called."""
    draft = tiny_draft(llama)
    seen = []
    original = DSparkCandidateGenerator._choose

    def spy(self, logits, prefix):
        token, q = original(self, logits.clone(), prefix)
        seen.append((logits.clone(), prefix, q, type(self.processors).__name__))
        return token, q

    DSparkCandidateGenerator._choose = spy
    try:
        torch.manual_seed(0)
        llama.generate(
            PROMPT,
            assistant_model=draft,
            do_sample=True,
            temperature=0.5,
            top_k=7,
            repetition_penalty=2.0,
            max_new_tokens=9,
        )
    finally:
        DSparkCandidateGenerator._choose = original
    assert len(seen) > 5
    for logits, prefix, q, _ in seen:
        assert int((q > 0).sum()) <= 8 and q.shape == (1, 61)
        expected = logits.float()
        penalised = torch.where(expected < 0, expected * 2, expected / 2)
        ids = prefix[0].unique()
        expected[:, ids] = penalised[:, ids]
        top = (expected / 0.5).topk(7)
        torch.testing.assert_close(q[0, top.indices[0]], top.values[0].softmax(-1), atol=1e-5, rtol=1e-4)
    # the second draft of a block saw the first
    assert seen[1][1].shape[1] == seen[0][1].shape[1] + 1


def test_draft_in_another_dtype(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    for dtype in (torch.bfloat16, torch.float64):
        draft = tiny_draft(llama).to(dtype)
        assert torch.equal(llama.generate(PROMPT, assistant_model=draft, **GREEDY), plain)
        assert draft.last_stats.failure is None and sum(draft.last_stats.proposed) > 0


def test_one_target_forward_per_round(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    draft = scripted_draft(llama, "corrupted50", plain[0, PROMPT.shape[1] :].tolist())
    rows = []
    handle = llama.register_forward_hook(lambda m, a, k, o: rows.append(o.logits.shape[1]), with_kwargs=True)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    handle.remove()
    assert rows == [1, *(n + 1 for n in draft.last_stats.proposed)]
