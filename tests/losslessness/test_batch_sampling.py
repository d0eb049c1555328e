"""Sampling several rows at once keeps each row's distribution, whatever its neighbours are.

The chi-square suite of `test_sampling.py` on the rows of batches. Lengths are decided by one schedule over all rows, so
a row's lengths depend on its neighbours' tokens; its text must not.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_sampling import (
    ALPHA,
    EOS,
    NEW_TOKENS,
    PROMPT,
    SLOW_PATH,
    WARPERS,
    always_accept,
    chance,
    exact,
    flattened,
    residual_not_subtracted,
    small,
)
from tiny_models import tiny_draft, tiny_llama

import hf_dspark.generation.committing as committing
from hf_dspark import ThroughputCurve
from hf_dspark.generation.batch_drafting import BatchCandidateGenerator

ROWS, CALLS = 100, 10  # tested rows of a call, calls
SLOPE = ThroughputCurve.from_points({b: 1 / (30 + b) for b in range(1, 1200, 5)})
NEIGHBOURS = {"short": [2], "long and other": [4, 4, 1, 3, 0, 2, 2, 1, 3]}


@pytest.fixture(scope="module")
def target():
    return flattened(small(tiny_llama))


def scheduled(target):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(2)  # confidences all over [0, 1]
    draft.scheduler, draft.throughput = "auto", SLOPE
    return draft


def rows_with(neighbour):
    """Every third row is a neighbour."""
    rows = []
    for i in range(ROWS):
        rows.append(PROMPT[0].tolist())
        if i % 2:
            rows.append(neighbour)
    length = max(map(len, rows))
    ids = torch.tensor([[1] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    tested = [i for i, row in enumerate(rows) if row == PROMPT[0].tolist()]
    return {"input_ids": ids, "attention_mask": mask}, tested


def p_value(target, draft, arguments, neighbour, calls=CALLS):
    inputs, tested = rows_with(neighbour)
    torch.manual_seed(0)
    counts, lengths = Counter(), Counter()
    for _ in range(calls):
        out = target.generate(
            **inputs,
            assistant_model=draft,
            do_sample=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
            max_new_tokens=NEW_TOKENS,
            **arguments,
        )[:, inputs["input_ids"].shape[1] :].tolist()
        stats = draft.last_stats
        assert stats.failure is None
        for row in tested:
            counts[tuple(out[row][: stats.rows[row].new_tokens])] += 1
            lengths.update(stats.rows[row].scheduled)
        proposed = sum(sum(stats.rows[row].proposed) for row in tested)
        assert 0 < sum(sum(stats.rows[row].accepted) for row in tested) < proposed
    if draft.scheduler == "auto":
        assert min(lengths[n] for n in range(NEW_TOKENS - 1)) > 0, lengths  # 0 too: such rows are drafted all the same
    return chance(counts, exact(target, arguments))


@pytest.mark.parametrize("neighbour", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_distribution_of_rows(target, neighbour):
    assert p_value(target, scheduled(target), WARPERS["no warper"], neighbour) > ALPHA


SETTINGS = {**WARPERS, **SLOW_PATH}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_of_rows_in_full(target, name):
    """Neighbours take turns."""
    neighbour = list(NEIGHBOURS.values())[list(SETTINGS).index(name) % 2]
    assert p_value(target, scheduled(target), SETTINGS[name], neighbour, 2 * CALLS) > ALPHA


@pytest.mark.slow
def test_distribution_of_full_blocks(target):
    draft = scheduled(target)
    draft.scheduler = None
    assert p_value(target, draft, WARPERS["all three"], NEIGHBOURS["short"]) > ALPHA


def test_distribution_of_several_sequences_per_prompt(target):
    draft = scheduled(target)
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(5):
        out = target.generate(
            PROMPT,
            num_return_sequences=200,
            assistant_model=draft,
            do_sample=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
            max_new_tokens=NEW_TOKENS,
            top_k=0,
        )[:, PROMPT.shape[1] :].tolist()
        counts.update(tuple(t[: row.new_tokens]) for t, row in zip(out, draft.last_stats.rows))
        assert 0 < draft.last_stats.acceptance_rate < 1
    assert chance(counts, exact(target, WARPERS["no warper"])) > ALPHA


@pytest.mark.parametrize("verifier", [always_accept, residual_not_subtracted], ids=lambda f: f.__name__)
def test_biased_verification_is_rejected(target, monkeypatch, verifier):
    monkeypatch.setattr(committing, "verify_sampled", verifier)
    draft = scheduled(target)
    draft.scheduler = None
    assert p_value(target, draft, WARPERS["no warper"], NEIGHBOURS["short"], 2 * CALLS) < ALPHA


def test_a_schedule_that_looks_at_the_drafts_is_rejected(target, monkeypatch):
    """A row keeps its drafts only if they are likely ones: known after they were drawn, so it biases the text."""
    propose = BatchCandidateGenerator.propose_rows

    def anticipating(self, requests, reason, decide, depth):
        blocks = []
        for block in propose(self, requests, reason, decide, depth):
            if block.length:
                chances = block.probabilities.gather(1, block.token_ids[0][:, None])[:, 0]
                likely = chances > block.probabilities.amax(-1) * 0.7
                length = int(likely.long().cumprod(0).sum())
                block = block._replace(
                    token_ids=block.token_ids[:, :length],
                    probabilities=block.probabilities[:length] if length else None,
                    usable=block.usable[:length],
                )
            blocks.append(block)
        return blocks

    monkeypatch.setattr(BatchCandidateGenerator, "propose_rows", anticipating)
    draft = scheduled(target)
    draft.scheduler = None
    assert p_value(target, draft, WARPERS["no warper"], NEIGHBOURS["short"]) < ALPHA
