"""Lengths decided by confidence keep the distribution: the chi-square suite with the scheduler switched on.

The curve is frozen, so that runs are deterministic; it is made such that lengths from 0 to the full block all occur.
"""

from __future__ import annotations

import pytest
import torch
from test_sampling import ALPHA, HEADS, SAMPLES, SLOW_PATH, WARPERS, flattened, p_value, small
from tiny_models import tiny_draft, tiny_gemma3, tiny_llama

import hf_dspark.candidate_generator as candidate_generator
from hf_dspark import PrefixScheduler, ThroughputCurve
from hf_dspark.generation.pacing import SINGLE
from hf_dspark.scheduling.prefix_scheduler import is_unimodal

# A row costs a quarter of the first one; and a staircase, on which an early stop would end before the wide step.
SLOPE = ThroughputCurve.from_points({b: 1 / (1 + 0.25 * (b - 1)) for b in range(1, 7)})
STAIRCASE = ThroughputCurve.from_points({1: 1.0, 2: 0.6, 3: 0.6, 4: 0.6, 5: 0.59, 6: 0.59})


@pytest.fixture(scope="module")
def target():
    return flattened(small(tiny_llama))


def scheduled_draft(target, scheduler="auto", curve=SLOPE, **changes):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1], **changes)
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(2)  # confidences all over [0, 1]
    draft.scheduler, draft.throughput = scheduler, curve
    return draft


def reasons_of(draft, start):
    return sum(count for reason, count in draft.reasons.items() if reason.startswith(start))


@pytest.mark.parametrize(
    "head, warper",
    [
        ("vanilla", "no warper"),
        pytest.param("none", "temperature", marks=pytest.mark.slow),
        pytest.param("gated", "no warper", marks=pytest.mark.slow),
        pytest.param("rnn", "all three", marks=pytest.mark.slow),
    ],
)
def test_causal_lengths(target, head, warper):
    draft = scheduled_draft(target, **HEADS[head])
    assert p_value(target, draft, WARPERS[warper], SAMPLES) > ALPHA
    assert reasons_of(draft, "causal: throughput stops") > SAMPLES / 4
    assert draft.reasons.total() > reasons_of(draft, "causal: throughput stops")


@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.slow), "lagged"])
def test_lagged_lengths(target, policy):
    """The budget comes from earlier rounds of the same text, whose tokens are fixed by then."""
    assert not is_unimodal(STAIRCASE, 1, 6)
    draft = scheduled_draft(target, PrefixScheduler(policy, probe_every=2), STAIRCASE)
    assert p_value(target, draft, WARPERS["no warper"], SAMPLES) > ALPHA
    assert draft.scheduler.is_lagged(STAIRCASE, 1, 2)  # of the first round; later ones have room for one draft only
    assert policy == "auto" or reasons_of(draft, "lagged budget") > 0


def test_scheduler_and_threshold_together(target):
    draft = scheduled_draft(target, curve=ThroughputCurve.from_seconds({1: 1.0, 6: 3.5}))
    draft.generation_config.assistant_confidence_threshold = 0.2
    assert p_value(target, draft, WARPERS["no warper"], SAMPLES) > ALPHA
    assert draft.reasons["threshold"] > 0 and reasons_of(draft, "causal") > 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SLOW_PATH.values(), ids=SLOW_PATH)
def test_token_by_token(target, arguments):
    assert p_value(target, scheduled_draft(target), arguments, SAMPLES) > ALPHA


@pytest.mark.slow
def test_lengths_from_measured_times(target):
    """The default: nothing is frozen, and the clock of a busy machine decides."""
    draft = scheduled_draft(target, curve=None)
    assert p_value(target, draft, WARPERS["no warper"], 3 * SAMPLES) > ALPHA
    assert draft.round_times[SINGLE].knows_plain_step(5)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_past_a_sliding_window(head):
    target = flattened(small(tiny_gemma3))
    assert p_value(target, scheduled_draft(target, **HEADS[head]), WARPERS["all three"], 3 * SAMPLES) > ALPHA


def test_cutting_with_what_came_after_is_rejected(target, monkeypatch):
    """A retrospective scheduler: it drafts the block, and keeps the length that looks best with all confidences known.

    c_2 depends on x_1, so whether x_1 is verified depends on x_1 (paper, appendix A).
    """
    curve = ThroughputCurve.from_seconds({1: 1.0, 2: 2.2, 3: 2.45})  # two drafts pay where one does not
    sequential = candidate_generator.DSparkCandidateGenerator._sequential

    def retrospective(self, *arguments):
        block = sequential(self, *arguments)
        confidences = torch.tensor(block.confidences)
        expected = torch.cat([torch.ones(1), confidences.cumprod(0)]).cumsum(0)
        theta = [float(e) * curve.steps_per_second(1 + n) for n, e in enumerate(expected)]
        best = max(range(len(theta)), key=theta.__getitem__)
        if best == 0:
            return self.empty_block(arguments[3], "retrospective")
        return block._replace(
            token_ids=block.token_ids[:, :best],
            probabilities=block.probabilities[:best],
            usable=block.usable[:best],
            scheduled=best,
            reason="retrospective",
        )

    draft = scheduled_draft(target, scheduler=None, curve=None)
    draft.record_confidence = True
    with torch.no_grad():  # confidence in whatever follows the ids 2, 3, 4, and none in what follows 0 and 1
        wanted = torch.tensor([-3.0, -3.0, 3.0, 3.0, 3.0])
        reading = torch.linalg.lstsq(draft.markov_head.markov_w1.weight, wanted[:, None]).solution  # [r, 1]
        draft.confidence_head.proj.weight.copy_(torch.cat([torch.zeros(1, 16), reading.T], dim=1))
    monkeypatch.setattr(candidate_generator.DSparkCandidateGenerator, "_sequential", retrospective)
    assert p_value(target, draft, WARPERS["no warper"], 3 * SAMPLES) < ALPHA


def test_a_seed_gives_the_same_text_with_a_frozen_curve(target):
    """And with full blocks. With measured times it may not: what is verified depends on the clock."""
    prompt = torch.tensor([[3, 1, 4, 1, 2]])

    def text(draft):
        torch.manual_seed(7)
        return target.generate(prompt, assistant_model=draft, do_sample=True, top_k=0, max_new_tokens=60)

    for settings in ({"scheduler": None, "curve": None}, {}, {"scheduler": PrefixScheduler("causal")}):
        first, second = text(scheduled_draft(target, **settings)), text(scheduled_draft(target, **settings))
        assert torch.equal(first, second)
