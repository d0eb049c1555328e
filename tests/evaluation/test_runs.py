import json

import pytest
import torch

from hf_dspark.evaluation.runs import (
    Run,
    TokenClock,
    decode_speedup,
    end_to_end_speedup,
    generation_kwargs,
    timed_generate,
)
from hf_dspark.generation.stats import GenerationStats

INPUTS = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}


def run_with(accepted, count):
    stats = GenerationStats(new_tokens=count, proposed=[4] * len(accepted), accepted=accepted)
    return Run("draft", list(range(count)), 0.1, 1.1, stats)


def test_which_tokens_came_from_the_draft():
    # first token, then a round of 2 drafts and the target's own, then a round without an accepted draft
    assert run_with([2, 0], 5).from_draft() == [False, True, True, False, False]
    # the text ends on a draft token: the last round has no token of the target's own
    assert run_with([0, 2], 4).from_draft() == [False, False, True, True]
    assert Run("plain", [7, 8], 0.1, 0.2).from_draft() == [False, False]


def test_speeds_exclude_the_first_token():
    plain = Run("plain", [0] * 11, first_token_seconds=1.0, total_seconds=6.0)  # 10 tokens in 5 s
    draft = Run("draft", [0] * 21, first_token_seconds=1.0, total_seconds=5.0)  # 20 tokens in 4 s
    assert plain.tokens_per_second == 2.0
    assert decode_speedup(plain, draft) == pytest.approx(2.5)
    assert end_to_end_speedup(plain, draft) == pytest.approx((6 / 11) / (5 / 21))
    single = Run("plain", [0], 1.0, 1.0)
    assert single.tokens_per_second is None and decode_speedup(single, draft) is None


def test_runs_survive_json():
    for run in (run_with([1, 0], 4), Run("plain", [1], 0.1, 0.2)):
        assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_the_clock_ignores_the_prompt():
    seen = []
    clock = TokenClock(seen.extend)
    clock.put(torch.tensor([[1, 2, 3]]))
    assert clock.first_token_at is None
    clock.put(torch.tensor([4]))
    first = clock.first_token_at
    clock.put(torch.tensor([5, 6]))
    assert seen == [4, 5, 6] and clock.first_token_at == first is not None


def test_plain_and_draft_runs_give_the_text_of_generate(target, draft):
    expected = target.generate(**INPUTS, max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    kwargs = generation_kwargs(12)
    plain = timed_generate(target, INPUTS, **kwargs)
    drafted = timed_generate(target, INPUTS, draft, "draft", **kwargs)
    assert plain.tokens == drafted.tokens == expected
    assert plain.stats is None and sum(drafted.stats.proposed) > 0
    for run in (plain, drafted):
        assert 0 < run.first_token_seconds < run.total_seconds


def test_a_seed_repeats_a_sampled_run(target):
    kwargs = generation_kwargs(12, temperature=1.5)
    first, again, other = (timed_generate(target, INPUTS, seed=seed, **kwargs).tokens for seed in (3, 3, 4))
    assert first == again != other
