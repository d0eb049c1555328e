"""`generate` for several rows with a draft: what a forward holds, lengths over all rows, stats, knobs, refusals."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_draft, tiny_gemma3, tiny_llama
from transformers import LogitsProcessor, MambaConfig, MambaForCausalLM, pipeline

import hf_dspark.generation.batching as batching
import hf_dspark.generation.pacing as pacing
import hf_dspark.generation.seam as seam
from hf_dspark import DSparkDraftModel, PrefixScheduler, ThroughputCurve
from hf_dspark.errors import DSparkGenerationError, DSparkTargetError
from hf_dspark.generation.pacing import LEARNING, PACKED, PAUSED, SINGLE, TIMING

SLOPE = ThroughputCurve.from_points({b: 1 / (8 + b) for b in range(1, 60)})


@pytest.fixture
def target():
    return tiny_llama()


@pytest.fixture
def unpaused(monkeypatch):
    """An untrained draft never pays; without this it would soon rest."""
    monkeypatch.setattr(pacing, "_START", 1e9)
    monkeypatch.setattr(pacing, "_CREDIT", 1e9)


def prompts(rows=3, length=7, seed=0):
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(target, draft, ids=None, new_tokens=14, **arguments):
    ids = prompts() if ids is None else ids
    return target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, assistant_model=draft, **arguments
    )


def scheduled(target, curve=SLOPE, scheduler="auto"):
    draft = tiny_draft(target)
    draft.scheduler, draft.throughput = scheduler, curve
    return draft


def test_forwards_hold_one_anchor_and_the_drafts_of_each_active_row(target, unpaused):
    draft, seen, drafted = scheduled(target), [], []
    target.model.layers[0].mlp.gate_proj.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    draft.layers[0].mlp.gate_proj.register_forward_hook(lambda m, args, out: drafted.append(args[0].shape[:-1].numel()))
    run(target, draft)
    stats = draft.last_stats
    assert seen[-stats.rounds :] == stats.tokens
    rounds = list(zip(*(row.proposed for row in stats.rows)))
    assert [3 + sum(lengths) for lengths in rounds[:6]] == stats.tokens[:6] and len(set(stats.tokens[:6])) > 1
    assert drafted[:6] == [15] * 6 and max(drafted) == 15  # γ slots of each row


def test_lengths_are_the_schedule_of_all_rows(target, unpaused):
    """What `PrefixScheduler.schedule` says of the confidences of all rows."""
    draft = scheduled(target)
    run(target, draft, new_tokens=30)
    first = draft.last_stats.rows
    shared = min(row.rounds for row in first) - 6  # rounds in which no row is near its end
    assert shared > 3
    assert len({tuple(row.scheduled[i] for row in first) for i in range(shared)}) > 1
    for i in range(shared):
        confidences = [row.confidences[i] for row in first]
        lengths, reason = PrefixScheduler().schedule(confidences, SLOPE)
        assert [row.scheduled[i] for row in first] == lengths.tolist()
        assert {row.reasons[i] for row in first} == {reason}


def test_rows_scheduled_to_zero_are_drafted_all_the_same(target, unpaused):
    draft = scheduled(target)
    run(target, draft, new_tokens=30)
    rows = draft.last_stats.rows
    zeros = [i for row in rows for i in range(row.rounds - 6) if row.scheduled[i] == 0]
    assert zeros
    assert all(len(row.confidences[i]) == 5 for row in rows for i in range(row.rounds - 6))


def test_no_position_is_drafted_that_is_never_verified(target, unpaused):
    """Where tokens are dear, blocks end one past what the newest schedules used; the texts stay the plain ones."""
    draft = scheduled(target, ThroughputCurve.from_points({b: 1 / b**0.8 for b in range(1, 60)}))
    plain = target.generate(prompts(), max_new_tokens=40)
    assert torch.equal(run(target, draft, new_tokens=40), plain)
    rows = draft.last_stats.rows
    drafted = [len(row.confidences[i]) for row in rows for i in range(row.rounds - 6)]
    used = [row.proposed[i] for row in rows for i in range(row.rounds - 6)]
    assert max(used) > 0 and drafted[0] == 5 and min(drafted) < 5
    assert all(length <= depth for length, depth in zip(used, drafted))


def test_the_lagged_policy(target):
    draft = scheduled(target, scheduler=PrefixScheduler("lagged", probe_every=3))
    plain = target.generate(prompts(), max_new_tokens=20)
    assert torch.equal(run(target, draft, new_tokens=20), plain)
    assert any(reason.startswith("lagged") for reason in draft.last_stats.reasons)


def test_a_confidence_threshold(target):
    draft = tiny_draft(target)
    plain = target.generate(prompts(), max_new_tokens=20)
    assert torch.equal(run(target, draft, new_tokens=20, assistant_confidence_threshold=0.5), plain)
    rows = draft.last_stats.rows
    assert any("threshold" in row.reasons for row in rows)
    for row in rows:
        for length, confidences, reason in zip(row.scheduled, row.confidences, row.reasons):
            above = [c >= 0.5 for c in confidences]
            leading = above.index(False) if False in above else len(above)
            assert length == leading if reason == "threshold" else length <= leading


def test_the_number_of_assistant_tokens(target):
    draft = tiny_draft(target)
    run(target, draft, num_assistant_tokens=2)
    rows = draft.last_stats.rows
    assert all(max(row.proposed) == 2 and row.reasons[0] == "num_assistant_tokens" for row in rows)


def test_stats(target):
    draft = tiny_draft(target)
    out = run(target, draft)
    stats = draft.last_stats
    assert stats.new_tokens == out[:, 7:].numel() and len(stats.rows) == 3
    assert sum(row.rounds for row in stats.rows) == sum(stats.active)
    assert stats.accepted_length == (stats.new_tokens - 3) / sum(stats.active)
    assert [row.context_tokens for row in stats.rows] == [7, 7, 7]
    for row in stats.rows:
        assert row.new_tokens == 14 == 1 + row.rounds + sum(row.accepted)
    assert (
        stats.draft_seconds == pytest.approx(sum(row.draft_seconds for row in stats.rows)) and stats.draft_seconds > 0
    )
    assert stats.to_dict()["rows"][1] == stats.rows[1].to_dict()
    assert "new tokens for 3 rows" in str(stats)


def test_a_seed_gives_the_same_texts_with_a_frozen_curve(target):
    texts = []
    for _ in range(2):
        torch.manual_seed(4)
        texts.append(run(target, scheduled(target), do_sample=True))
    assert torch.equal(*texts)


def test_several_sequences_per_prompt(target):
    draft = tiny_draft(target)
    torch.manual_seed(0)
    out = run(target, draft, prompts(2), do_sample=True, num_return_sequences=3)
    assert out.shape[0] == 6 and len({tuple(row) for row in out[:3].tolist()}) == 3
    assert torch.equal(out[:, :7], prompts(2).repeat_interleave(3, dim=0))
    # One prompt alone, too; and the caller's settings are as they were.
    assert run(target, draft, prompts(1), do_sample=True, num_return_sequences=2).shape[0] == 2
    with pytest.raises(ValueError, match="num_return_sequences"):
        run(target, draft, num_return_sequences=2)  # greedy: in the host's words


def test_neither_config_changes(target):
    draft = scheduled(target)
    before = target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict()
    run(target, draft)
    assert before == (target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict())


def test_times_are_learnt_and_a_useless_draft_pauses(target, monkeypatch):
    """With the clock of the machine replaced by one on which drafting costs as much as a forward."""
    draft, ticks = tiny_draft(target), iter(range(10**6))
    draft.scheduler, draft.round_times = "auto", {}
    monkeypatch.setattr(batching, "perf_counter", lambda: next(ticks))
    plain = target.generate(prompts(), max_new_tokens=60)
    assert torch.equal(run(target, draft, new_tokens=60), plain)
    stats = draft.last_stats
    assert stats.reasons[0] == LEARNING and TIMING in stats.reasons
    assert stats.paused_rounds > 20 and stats.reasons.count(PAUSED) == stats.paused_rounds
    times = draft.round_times[PACKED]
    assert times.knows_plain_step(10, requests=3) and not times.knows_plain_step(10)
    assert SINGLE not in draft.round_times  # a forward of single rows takes another time
    for row in stats.rows:
        assert all(n == 0 for n, reason in zip(row.proposed, row.reasons) if reason == PAUSED)


def test_pipelines_take_batches(target):
    from tiny_pair import tiny_draft as pair_draft
    from tiny_pair import tiny_target, tiny_tokenizer

    model, tokenizer = tiny_target(), tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = " w3", "left"
    draft = pair_draft(model)
    arguments = {"batch_size": 2, "max_new_tokens": 8, "do_sample": False}
    texts = [" w5 w6", " w7", " w8 w9 w4"]
    plain = pipeline("text-generation", model, tokenizer=tokenizer)(texts, **arguments)
    assert pipeline("text-generation", model, tokenizer=tokenizer, assistant_model=draft)(texts, **arguments) == plain


class Uncopyable(LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("holds a socket")

    def __call__(self, input_ids, scores):
        return scores


def test_refused_by_name(target):
    with pytest.raises(DSparkGenerationError, match=r"Uncopyable cannot be copied for each row \(TypeError: holds a s"):
        run(target, tiny_draft(target), logits_processor=[Uncopyable()])
    with pytest.raises(DSparkGenerationError, match="synced_gpus"):
        run(target, tiny_draft(target), synced_gpus=True)


def test_other_kinds_of_layers_are_refused(monkeypatch):
    monkeypatch.setattr(seam, "LAYER_TYPES", ("full_attention",))
    gemma = tiny_gemma3()
    with pytest.raises(DSparkTargetError, match="layers of the kind sliding_attention"):
        run(gemma, tiny_draft(gemma))


def test_an_attention_of_its_own_is_refused(target, monkeypatch):
    monkeypatch.setattr(type(target), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(DSparkTargetError, match="attention interface"):
        run(target, tiny_draft(target))
    assert run(target, tiny_draft(target), prompts(1)).shape == (1, 21)  # a single row goes on as ever


def test_recurrent_targets_are_refused(target):
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=4))
    draft: DSparkDraftModel = tiny_draft(target)
    with pytest.raises(DSparkTargetError, match="recurrent"):
        mamba.generate(prompts(), assistant_model=draft, max_new_tokens=3)
