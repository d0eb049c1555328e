"""Sampling in continuous batching with a draft keeps the distribution: the chi-square of `test_sampling.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_sampling import ALPHA, EOS, NEW_TOKENS, PROMPT, always_accept, chance, exact, flattened, small
from tiny_models import tiny_draft, tiny_llama
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_dspark.generation.continuous as continuous
from hf_dspark import ThroughputCurve

SLOPE = ThroughputCurve.from_points({b: 1 / (30 + b) for b in range(1, 500, 5)})


@pytest.mark.parametrize("kind", ["full blocks", "scheduled", "biased"])
def test_distribution(monkeypatch, kind):
    """Under a warper, with other requests around; and a sampler that keeps every draft is rejected."""
    target = flattened(small(tiny_llama))
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    if kind == "scheduled":
        draft.scheduler, draft.throughput = "auto", SLOPE
        with torch.no_grad():
            draft.confidence_head.proj.weight.mul_(2)  # confidences all over [0, 1]
    if kind == "biased":
        monkeypatch.setattr(continuous, "verify_sampled", always_accept)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, eos_token_id=EOS, pad_token_id=EOS, temperature=0.8, top_k=0
    )
    texts = [PROMPT[0].tolist()] * 500 + [[2, 1]] * 100
    counts = Counter()
    for seed in range(2):
        engine = ContinuousBatchingConfig(
            page_size=4, num_blocks=2000, max_batch_tokens=400, max_requests_per_batch=64, seed=seed
        )
        with target.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=engine, assistant_model=draft
        ) as manager:
            own = set(manager.add_requests(texts)[:500])
            done = 0
            while done < len(texts):
                result = manager.get_result(timeout=10)
                done += 1
                assert result.error is None
                if result.request_id in own:
                    counts[tuple(result.generated_tokens)] += 1
            assert 0 < manager.draft_stats.accepted < manager.draft_stats.proposed
    p = chance(counts, exact(target, {"temperature": 0.8, "top_k": 0}))
    assert p < ALPHA if kind == "biased" else p > ALPHA
