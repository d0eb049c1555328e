"""A draft that fails costs speed, never the text: exceptions and NaN at any round and place in the block."""

from __future__ import annotations

import pytest
import torch
from scripted_drafts import Script
from tiny_models import random_prompt, tiny_draft

PROMPT = random_prompt(9)
NEW_TOKENS = 24
MODES = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.2},
    "sampling": {"do_sample": True, "top_k": 1},
    "sampling token by token": {"do_sample": True, "top_k": 1, "no_repeat_ngram_size": 2},
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request):
    return request.param


def plain_and_draft(target, mode):
    plain = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, **mode)
    return plain, tiny_draft(target), plain[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("round_, k", [(0, 0), (0, 3), (1, 0), (2, 4)])
def test_exception_in_a_step(llama, mode, round_, k):
    plain, draft, text = plain_and_draft(llama, mode)

    def disturb(this_round, this_k, logits):
        if (this_round, this_k) == (round_, k):
            raise RuntimeError("out of paper")
        return logits

    Script(draft, text, disturb=disturb)
    out = llama.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    stats = draft.last_stats
    assert torch.equal(out, plain)
    assert stats.failure == "RuntimeError: out of paper" and stats.failure in str(stats)
    # What was drafted before the exception is verified, and nothing after it.
    assert stats.proposed[:round_] == [5] * round_
    assert stats.proposed[round_] == stats.accepted[round_] == k
    assert not any(stats.proposed[round_ + 1 :])
    assert set(stats.reasons[round_:]) == {"exception"}


@pytest.mark.parametrize("method", ["extend_context", "start_block", "base_logits"])
def test_exception_anywhere_in_the_draft(targets, mode, method, caplog):
    target = targets("gemma3")
    plain, draft, _ = plain_and_draft(target, mode)
    calls = []
    original = getattr(draft, method)

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("full")
        return original(*arguments)

    setattr(draft, method, failing)
    out = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert torch.equal(out, plain)
    assert len(calls) == 3  # drafting is off for the rest of the call
    assert draft.last_stats.failure == "MemoryError: full"
    assert sum(draft.last_stats.proposed) == 10
    assert sum("MemoryError: full" in record.message for record in caplog.records) <= 1
    again = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert torch.equal(again, plain) and draft.last_stats.failure is None


@pytest.mark.parametrize("k", [0, 2, 4])
def test_nan_logits(llama, mode, k):
    """The position and those after it count as not proposed; the next round is a full one again."""
    plain, draft, text = plain_and_draft(llama, mode)

    def disturb(this_round, this_k, logits):
        return logits * torch.nan if this_round == 1 and this_k == k else logits

    Script(draft, text, disturb=disturb)
    out = llama.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    stats = draft.last_stats
    assert torch.equal(out, plain)
    assert stats.failure is None
    assert stats.proposed[:2] == stats.accepted[:2] == [5, k]
    assert stats.reasons[:3] == ["full block", "NaN logits", "full block"]
    assert stats.proposed[2] == stats.accepted[2] == 5


def test_all_nan_draft(target, mode):
    plain, draft, _ = plain_and_draft(target, mode)
    with torch.no_grad():
        draft.fc.weight.fill_(torch.nan)
    out = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert torch.equal(out, plain)
    assert not any(draft.last_stats.proposed)
    assert draft.last_stats.rounds == NEW_TOKENS - 1


def test_nan_target_raises_as_plain_sampling_does(llama):
    broken = type(llama)(llama.config)
    broken.load_state_dict(llama.state_dict())
    draft = tiny_draft(broken)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    for assistant in (None, draft):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            broken.generate(PROMPT, max_new_tokens=8, do_sample=True, assistant_model=assistant)
    assert draft.last_stats is None  # assigned on success only


def test_exception_in_the_target_is_the_callers(llama):
    draft = tiny_draft(llama)
    calls = []

    def raising(module, args, output):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("target")

    handle = llama.register_forward_hook(raising)
    with pytest.raises(KeyError, match="target"):
        llama.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=draft)
    handle.remove()
    assert draft.last_stats is None
