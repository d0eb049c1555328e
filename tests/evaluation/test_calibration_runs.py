"""Collecting blocks, measuring calibration, sweeping thresholds, and their pictures."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error
from transformers import GenerationConfig

from hf_dspark.candidate_generator import resolve_knobs
from hf_dspark.errors import DSparkConfigError, DSparkDataError
from hf_dspark.evaluation import blocks, calibration, sweep
from hf_dspark.evaluation.blocks import (
    FIT,
    HELD_OUT,
    CollectionSettings,
    Prompt,
    PromptBlocks,
    all_prompts,
    collect,
    fixed_drafting,
    refuse_shared_prompts,
    split_prompts,
    stack,
)
from hf_dspark.evaluation.calibration import assess, auroc, bootstrap_ece, calibrate_blocks
from hf_dspark.evaluation.calibration_plots import write_reliability, write_sweep
from hf_dspark.evaluation.partial import PartialResults
from hf_dspark.evaluation.prompts import PromptSet
from hf_dspark.evaluation.sweep import SweepPoint, SweepRun, sum_up
from hf_dspark.scheduling.calibration import SequentialTemperatureScaling, expected_calibration_error, survivals


def prompt_set(name, count, start=0):
    return PromptSet(name, [[{"role": "user", "content": f"w{i + 3}"}] for i in range(start, start + count)])


def stats(proposed, accepted, own_token_at_end=True, failure=None):
    """As a recording call leaves them; the logit of draft k in round i is i + k / 10."""
    return SimpleNamespace(
        proposed=proposed,
        accepted=accepted,
        rounds=len(proposed),
        new_tokens=1 + sum(a + 1 for a in accepted) - (not own_token_at_end),
        confidence_logits=[[i + k / 10 for k in range(n)] for i, n in enumerate(proposed)],
        failure=failure,
    )


def synthetic(count, temperatures, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 2.0, (count, len(temperatures)))
    accepts = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / temperatures))
    return logits, np.cumprod(accepts, axis=1).sum(axis=1), np.full(count, len(temperatures))


# --------------------------------------------------------------------------------------------------------------------
# Prompts
# --------------------------------------------------------------------------------------------------------------------
def test_prompts_are_interleaved():
    prompts = all_prompts([prompt_set("a", 3), prompt_set("b", 1, 10)])
    assert [(p.prompt_set, p.index) for p in prompts] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_every_set_is_split_by_share_and_seed():
    sets = [prompt_set("a", 20), prompt_set("b", 10, 20)]
    fit, held_out = split_prompts(sets, 0.3)
    assert [sum(p.prompt_set == name for p in held_out) for name in "ab"] == [6, 3]
    assert len(fit) == 21 and not {p.digest for p in fit} & {p.digest for p in held_out}
    assert split_prompts(sets, 0.3) == (fit, held_out)
    assert split_prompts(sets, 0.3, seed=1) != (fit, held_out)
    # Which side a prompt is on does not hang on its place in the file.
    turned = [PromptSet(s.name, s.conversations[::-1]) for s in sets]
    assert {p.digest for p in split_prompts(turned, 0.3)[1]} == {p.digest for p in held_out}


def test_the_same_prompt_is_never_on_both_sides():
    sets = [prompt_set("a", 20), prompt_set("b", 20), PromptSet("c", prompt_set("", 1).conversations * 4)]
    fit, held_out = split_prompts(sets, 0.5)
    assert len(fit) + len(held_out) == 44
    assert not {p.digest for p in fit} & {p.digest for p in held_out}
    refuse_shared_prompts(fit, held_out)
    with pytest.raises(DSparkDataError, match="prompt 4 of 'b' is prompt 4 of 'a'"):
        refuse_shared_prompts(all_prompts(sets[:1]), [p for p in all_prompts(sets[1:2]) if p.index == 4])


def test_splits_that_cannot_be_are_refused():
    for share in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(DSparkConfigError, match="held_out_share"):
            split_prompts([prompt_set("a", 3)], share)
    with pytest.raises(DSparkDataError, match=r"1 prompts.*more prompts"):
        split_prompts([prompt_set("a", 1)], 0.5)


# --------------------------------------------------------------------------------------------------------------------
# Collection
# --------------------------------------------------------------------------------------------------------------------
def of(call):
    return PromptBlocks.from_stats(call, 0.0, Prompt("a", 0, []), FIT)


def test_blocks_of_a_call():
    result = of(stats([4, 4, 0, 2], [1, 4, 0, 2]))
    assert (result.proposed, result.accepted, result.full(4)) == ([4, 4, 0, 2], [1, 4, 0, 2], 2)
    logits, accepted, proposed = stack([result, of(stats([4], [0]))], 4)
    assert logits.shape == (5, 4) and accepted.tolist() == [1, 4, 0, 2, 0] and proposed.tolist() == [4, 4, 0, 2, 4]
    assert logits[1].tolist() == [1.0, 1.1, 1.2, 1.3] and np.isnan(logits[2]).all()
    assert np.isnan(logits[3]).tolist() == [False, False, True, True]


def test_a_text_that_ends_on_a_draft_says_nothing_about_the_drafts_after_it():
    assert of(stats([4, 4], [1, 2], own_token_at_end=False)).proposed == [4, 2]
    assert of(stats([4, 4], [1, 2])).proposed == [4, 4]  # the end came from the target, after a refusal
    assert of(stats([4, 4], [1, 4], own_token_at_end=False)).proposed == [4, 4]  # all fates are known
    assert of(stats([], [])).proposed == []


@pytest.fixture
def recorded(monkeypatch):
    """Replaces the calls by scripted ones, two full blocks each; gives the list of those made."""
    calls = []

    def generate_stats(
        target, tokenizer, draft, prompt, temperature, max_new_tokens, seed=0, threshold=0.0, record=False
    ):
        calls.append((temperature, prompt.prompt_set, prompt.index, threshold, record))
        return stats([3, 3, 1], [1, 3, 0])

    for module in (blocks, sweep):
        monkeypatch.setattr(module, "generate_stats", generate_stats)
    return calls


@pytest.fixture
def scripted():
    """What `collect` needs of a draft model."""
    return SimpleNamespace(
        confidence_head=object(), bind_target=lambda target: None, config=SimpleNamespace(num_draft_tokens=3)
    )


def test_each_side_stops_at_its_blocks(recorded, scripted):
    fit, held_out = split_prompts([prompt_set("a", 8), prompt_set("b", 8, 8)], 0.5)
    seen = []
    results = collect(
        None, None, scripted, {FIT: fit, HELD_OUT: held_out}, CollectionSettings(blocks=5), on_result=seen.append
    )
    assert seen == results and all(record for *_, record in recorded)
    counts = {(t, side): sum(r.full(3) for r in results if (r.temperature, r.side) == (t, side))
              for t in (0.0, 1.0) for side in (FIT, HELD_OUT)}  # fmt: skip
    assert set(counts.values()) == {6}
    assert {r.prompt_set for r in results[:3]} == {"a", "b"}


def test_kept_calls_are_not_made_again(recorded, scripted, tmp_path):
    sides = {FIT: all_prompts([prompt_set("a", 3)]), HELD_OUT: all_prompts([prompt_set("b", 2, 3)])}
    settings = CollectionSettings(temperatures=(0.0,))
    first = collect(None, None, scripted, sides, settings, PartialResults(tmp_path / "x", {}))
    assert len(recorded) == 5
    again = collect(None, None, scripted, sides, settings, PartialResults(tmp_path / "x", {}))
    assert again == first and len(recorded) == 5
    # Another split and other names, the same prompts; only the new one is generated for.
    more = {FIT: all_prompts([prompt_set("renamed", 4)])}
    moved = collect(None, None, scripted, more, settings, PartialResults(tmp_path / "x", {}))
    assert [(r.prompt_set, r.side) for r in moved] == [("renamed", FIT)] * 4
    assert len(recorded) == 6


def test_a_draft_without_a_confidence_head_is_refused(scripted):
    scripted.confidence_head = None
    with pytest.raises(DSparkConfigError, match="no confidence head"):
        collect(None, None, scripted, {}, CollectionSettings())
    with pytest.raises(DSparkConfigError, match="no confidence head"):
        sweep.sweep(None, None, scripted, [])


@pytest.mark.parametrize("temperatures", [(), (-1.0,), (0.7, 1.0)])
def test_one_sampling_temperature_at_most(temperatures):
    with pytest.raises(DSparkConfigError, match="one above 0"):
        CollectionSettings(temperatures=temperatures)


def test_only_the_given_threshold_decides_a_length(draft, target):
    own = GenerationConfig(num_assistant_tokens=2, assistant_confidence_threshold=0.9)
    draft.generation_config, draft.scheduler, draft.record_confidence = own, "auto", False
    for threshold in (0.0, 0.4, 0.9):
        with fixed_drafting(draft, threshold, record=True) as knobs:
            # As `generate` merges them: the call's over the target's own.
            call = GenerationConfig(**{"num_assistant_tokens": 1, "assistant_confidence_threshold": 0.7, **knobs})
            assert resolve_knobs(draft, call) == (4, threshold or None)
            assert draft.scheduler is None and draft.record_confidence
        assert (draft.generation_config, draft.scheduler, draft.record_confidence) == (own, "auto", False)
    with contextlib.suppress(RuntimeError), fixed_drafting(draft):
        raise RuntimeError
    assert draft.generation_config is own


# --------------------------------------------------------------------------------------------------------------------
# Measures
# --------------------------------------------------------------------------------------------------------------------
def test_ece_and_auroc_are_those_of_torchmetrics():
    rng = np.random.default_rng(0)
    probabilities = rng.beta(2, 3, 3000)
    events = rng.random(3000) < probabilities**1.5
    tensors = torch.from_numpy(probabilities), torch.from_numpy(events).long()
    ece = binary_calibration_error(*tensors, n_bins=10, norm="l1").item()
    assert expected_calibration_error(probabilities, events) == pytest.approx(ece, abs=1e-9)
    ranks = probabilities.argsort().argsort()[events] + 1  # Mann and Whitney
    n = events.sum()
    by_hand = (ranks.sum() - n * (n + 1) / 2) / (n * (3000 - n))
    assert auroc(probabilities, events) == pytest.approx(by_hand) == pytest.approx(binary_auroc(*tensors).item())
    assert auroc(probabilities, np.ones(3000, bool)) is None and auroc(probabilities, np.zeros(3000, bool)) is None


def test_the_bootstrap_is_that_of_resampled_blocks():
    logits, accepted, _ = synthetic(400, [1.5, 1.5])
    a = survivals(SequentialTemperatureScaling.apply(logits, np.ones(2)))
    events = accepted[:, None] > np.arange(2)
    fast = bootstrap_ece(a, events, samples=70, seed=3)
    rng = np.random.default_rng(3)
    rows = np.concatenate([rng.integers(400, size=(size, 400)) for size in (50, 20)])
    slow = [[expected_calibration_error(a[row, k], events[row, k]) for k in range(2)] for row in rows]
    here = [expected_calibration_error(a[:, k], events[:, k]) for k in range(2)]
    percentiles = np.quantile(slow, [0.025, 0.975], axis=0)
    assert np.allclose(fast, (percentiles - (np.mean(slow, axis=0) - here)).clip(min=0))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_intervals_cover_what_repeated_experiments_give(temperature):
    found, intervals = [], []
    for seed in range(60):
        logits, accepted, _ = synthetic(1000, [temperature], seed)
        probabilities, events = SequentialTemperatureScaling.apply(logits, [1.0]), accepted > 0
        found.append(expected_calibration_error(probabilities[:, 0], events))
        intervals.append(bootstrap_ece(probabilities, events[:, None], samples=150, seed=seed)[:, 0])
    covered = [low <= np.mean(found) <= high for low, high in intervals]
    assert np.mean(covered) >= 0.88
    assert np.mean(np.diff(intervals)) == pytest.approx(4 * np.std(found), rel=0.35)


def test_calibration_on_held_out_blocks():
    fit, held_out = (synthetic(n, [2.5, 2.0, 2.0], seed) for n, seed in ((6000, 0), (9000, 1)))
    held_out[2][:10] = 2  # cut
    held_out[1][:10] = np.minimum(held_out[1][:10], 2)
    result = calibrate_blocks("greedy", fit, held_out)
    assert (result.fit_blocks, result.fit_dropped, result.held_out_blocks, result.held_out_dropped) == (
        6000,
        0,
        8990,
        10,
    )
    assert not result.is_worse and len(result.temperatures) == 3
    truth = held_out[1][10:]
    for k, position in enumerate(result.positions):
        assert position.position == k + 1 and position.temperature == result.temperatures[k]
        assert position.reached == (truth >= k).sum() and position.survival == pytest.approx((truth > k).mean())
        assert position.before.ece > 0.04 and position.after.ece < 0.02
        low, high = position.before.ece_interval
        assert low < position.before.ece < high
        assert position.after.noise_floor < 0.012
        assert position.before.auroc == pytest.approx(position.after.auroc, abs=1e-9)
        assert 0.5 < position.after.auroc < 1 and 0.5 < position.after.survival_auroc < 1
        bins = position.after.bins
        assert sum(b["count"] for b in bins) == 8990 and len(bins) == 10
        assert all(i / 10 <= b["predicted"] <= (i + 1) / 10 for i, b in enumerate(bins) if b["count"])


def test_auroc_of_c_looks_at_blocks_that_got_there():
    # Draft 2 is accepted wherever its logit is positive; blocks that failed at draft 1 would blur that.
    logits = np.array([[0.0, 1.0], [0.0, -1.0], [0.0, 2.0], [0.0, 3.0]] * 5)
    accepted = np.array([2, 1, 2, 0] * 5)
    _, second = assess(logits, accepted, [1.0, 1.0], [0.0, 0.0])
    assert second.reached == 15 and second.before.auroc == 1.0
    assert second.before.survival_auroc < 1.0


def test_temperatures_that_do_harm_are_noticed():
    honest, boastful = synthetic(6000, [1.0, 1.0]), synthetic(6000, [4.0, 4.0], seed=1)
    assert calibrate_blocks("sample", boastful, honest).is_worse
    assert not calibrate_blocks("sample", honest, honest).is_worse


def test_too_few_blocks_name_the_mode():
    few, many = synthetic(100, [1.0]), synthetic(3000, [1.0])
    with pytest.raises(DSparkDataError, match="sample: 100 full blocks"):
        calibrate_blocks("sample", few, many)
    with pytest.raises(DSparkDataError, match="greedy: not one held-out block"):
        calibrate_blocks("greedy", many, (few[0], few[1] * 0, few[2] * 0))


# --------------------------------------------------------------------------------------------------------------------
# Sweep
# --------------------------------------------------------------------------------------------------------------------
def test_a_point_counts_the_targets_own_token_on_both_sides():
    runs = [SweepRun(0.0, "a", 0, 0.3, rounds=10, committed=16, drafts=12), SweepRun(0.0, "a", 1, 0.3, 2, 2, 0)]
    (point,) = sum_up(runs)
    assert (point.prompts, point.rounds, point.committed, point.drafts) == (2, 12, 18, 12)
    assert point.acceptance_rate == 18 / 24 and point.tokens_per_round == 1.5 and point.drafts_per_round == 1.0
    assert point.to_dict()["acceptance_rate"] == 0.75
    assert SweepPoint(0.0, "a", 0.9, 1, 0, 0, 0).acceptance_rate is None


def test_sweep_generates_for_every_threshold_and_goes_on(recorded, scripted, tmp_path):
    sets = [prompt_set("b", 2), prompt_set("a", 1, 5)]
    partial = PartialResults(tmp_path / "x", {})
    runs = sweep.sweep(None, None, scripted, sets, (0.0, 1.0), thresholds=(0.0, 0.4), partial=partial)
    assert len(recorded) == len(runs) == 12 and not any(record for *_, record in recorded)
    assert {(t, name, threshold) for t, name, _, threshold, _ in recorded} == {
        (t, name, threshold) for t in (0.0, 1.0) for name in "ab" for threshold in (0.0, 0.4)
    }
    assert (runs[0].rounds, runs[0].committed, runs[0].drafts) == (3, 7, 7)
    points = sum_up(runs)
    assert [(p.prompt_set, p.threshold, p.prompts) for p in points[:4]] == [
        *(("b", 0.0, 2), ("b", 0.4, 2), ("a", 0.0, 1), ("a", 0.4, 1))
    ]
    again = PartialResults(tmp_path / "x", {})
    assert sweep.sweep(None, None, scripted, sets, (0.0, 1.0), thresholds=(0.0, 0.4), partial=again) == runs
    assert len(recorded) == 12


# --------------------------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------------------------
def test_pictures(tmp_path):
    greedy = calibrate_blocks("greedy", synthetic(2500, [2.0] * 6), synthetic(2500, [2.0] * 6, 1))
    sample = dataclasses.replace(greedy, mode="sample", positions=greedy.positions[:1])
    empty = [SweepPoint(1.0, "a", t, 1, 0, 0, 0) for t in (0.0, 0.1)]
    points = [SweepPoint(0.0, name, t / 10, 1, 10, 15, 50 - 5 * t) for name in "ab" for t in range(10)]
    written = write_reliability([greedy, sample], tmp_path / "new" / "folder") + write_sweep(points + empty, tmp_path)
    assert [path.name for path in written] == [
        "reliability_greedy.png",
        "reliability_sample.png",
        "sweep_0.png",
        "sweep_1.png",
    ]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_default_number_of_resamples_is_enough_for_tails():
    assert calibration.BOOTSTRAP_SAMPLES * 0.025 >= 20
