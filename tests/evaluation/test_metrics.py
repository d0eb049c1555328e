import json

import pytest

from hf_dspark.errors import DSparkDataError
from hf_dspark.evaluation.metrics import SpeculationMetric, average_over_sets
from hf_dspark.evaluation.runs import Run
from hf_dspark.generation.stats import GenerationStats


def draft_run(proposed, accepted, first, total, draft_seconds, verify_seconds):
    count = 1 + sum(accepted) + len(accepted)
    stats = GenerationStats(count, proposed, accepted, draft_seconds=draft_seconds, verify_seconds=verify_seconds)
    return Run("draft", [0] * count, first, total, stats)


def test_summary_by_hand():
    metric = SpeculationMetric(num_draft_tokens=3)
    # Prompt 1: 3 rounds, 2 + 0 + 1 drafts accepted: 7 tokens, 6 after the first.
    metric.update(
        Run("plain", [0] * 7, first_token_seconds=1.0, total_seconds=4.0),  # 0.5 s a token
        draft_run([3, 3, 1], [2, 0, 1], first=1.0, total=2.5, draft_seconds=0.2, verify_seconds=1.0),  # 0.25 s a token
    )
    # Prompt 2: 1 round, nothing accepted: 2 tokens, 1 after the first.
    metric.update(
        Run("plain", [0] * 3, first_token_seconds=0.5, total_seconds=1.5),  # 0.5 s a token
        draft_run([3], [0], first=0.5, total=1.5, draft_seconds=0.1, verify_seconds=0.5),  # 1 s a token
    )
    summary = metric.compute()
    assert (summary.prompts, summary.new_tokens, summary.rounds) == (2, 9, 4)
    assert summary.accepted_length == pytest.approx(7 / 4)
    assert summary.acceptance_by_position == pytest.approx([2 / 4, 1 / 3, 0 / 3])
    assert summary.proposed_per_round == pytest.approx(10 / 4)
    assert summary.plain_tokens_per_second == pytest.approx(8 / 4.0)
    assert summary.draft_tokens_per_second == pytest.approx(7 / 2.5)
    assert summary.decode_speedup == pytest.approx((4.0 / 8) / (2.5 / 7))
    assert summary.median_decode_speedup == pytest.approx((2.0 + 0.5) / 2)
    assert summary.end_to_end_speedup == pytest.approx((5.5 / 10) / (4.0 / 9))
    assert summary.median_end_to_end_speedup == pytest.approx(((4 / 7) / (2.5 / 7) + (1.5 / 3) / (1.5 / 2)) / 2)
    assert summary.efficiency == pytest.approx(summary.decode_speedup / 1.75)
    assert summary.draft_share == pytest.approx(0.3 / 1.5)
    assert summary.draft_milliseconds == pytest.approx(75.0)
    assert summary.verify_milliseconds == pytest.approx(375.0)
    assert summary.round_milliseconds == pytest.approx(625.0)
    assert summary.plain_milliseconds == pytest.approx(500.0)
    json.dumps(summary.to_dict())


def test_no_rounds_gives_no_ratios():
    metric = SpeculationMetric(num_draft_tokens=2)
    metric.update(Run("plain", [0], 1.0, 1.0), Run("draft", [0], 1.0, 1.0, GenerationStats(1)))
    summary = metric.compute()
    assert summary.accepted_length is None and summary.decode_speedup is None
    assert summary.median_decode_speedup is None and summary.draft_share is None
    assert summary.acceptance_by_position == [None, None]
    assert summary.end_to_end_speedup == 1.0


def test_reset_starts_anew():
    metric = SpeculationMetric(num_draft_tokens=1)
    pair = Run("plain", [0] * 3, 1.0, 2.0), draft_run([1], [1], 1.0, 2.0, 0.1, 0.2)
    metric.update(*pair)
    metric.reset()
    metric.update(*pair)
    assert metric.compute().prompts == 1


def test_a_plain_run_in_the_place_of_a_draft_run_is_refused():
    with pytest.raises(DSparkDataError, match="no statistics"):
        SpeculationMetric(1).update(Run("plain", [0], 1.0, 1.0), Run("plain", [0], 1.0, 1.0))


def test_average_is_the_mean_over_sets():
    summaries = []
    for accepted in ([1, 1], [0, 0, 0]):
        metric = SpeculationMetric(num_draft_tokens=1)
        drafted = draft_run([1] * len(accepted), accepted, 1.0, 2.0, 0.1, 0.2)
        metric.update(Run("plain", [0] * 3, 1.0, 2.0), drafted)
        summaries.append(metric.compute())
    average = average_over_sets(summaries)
    assert average["accepted_length"] == pytest.approx((2.0 + 1.0) / 2)
    summaries[0].efficiency = None
    assert average_over_sets(summaries)["efficiency"] is None
