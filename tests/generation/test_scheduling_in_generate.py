"""The scheduler inside `generate`: the lengths it verifies, what that saves, pauses, and a text that stays the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scripted_drafts import Script
from tiny_models import random_prompt, tiny_draft

import hf_dspark.generation.loop as loop
from hf_dspark import DSparkDraftModel, DSparkError, PrefixScheduler, ThroughputCurve
from hf_dspark.candidate_generator import DSparkCandidateGenerator
from hf_dspark.generation.pacing import PAUSED, SINGLE, TIMING
from hf_dspark.scheduling.throughput import ThroughputProfile

PROMPT = random_prompt(9)
GREEDY = {"do_sample": False, "max_new_tokens": 40}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 40}
SLOPE = ThroughputCurve.from_seconds({1: 1.0, 6: 2.0})
STAIRCASE = ThroughputCurve.from_seconds({1: 1.0, 2: 1.6, 6: 1.7})


def scheduled(target, scheduler="auto", curve=SLOPE, **changes) -> DSparkDraftModel:
    draft = tiny_draft(target, **changes)
    draft.scheduler, draft.throughput = scheduler, curve
    return draft


@pytest.fixture
def no_pause(monkeypatch):
    """An account that never runs empty: these drafts are wrong all the time, and lengths are what is looked at."""
    for name in ("_CREDIT", "_START"):
        monkeypatch.setattr(f"hf_dspark.generation.pacing.{name}", math.inf)


@pytest.mark.parametrize("arguments", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at_once", [True, False], ids=["on a CPU", "elsewhere"])
def test_lengths_are_the_schedulers_and_rows_are_one_more(llama, monkeypatch, no_pause, arguments, at_once):
    """ℓ is what `schedule` gives for the round's confidences, and the forward has ℓ+1 rows, no more."""
    draft, rows, steps = scheduled(llama), [], []
    forward, init, step = llama.forward, DSparkCandidateGenerator.__init__, draft.sequential_step

    def spy(*args, **kwargs):
        rows.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    def choose_device(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.reads_at_once = at_once

    monkeypatch.setattr(llama, "forward", spy)
    monkeypatch.setattr(DSparkCandidateGenerator, "__init__", choose_device)
    draft.sequential_step = lambda *args: (steps.append(1), step(*args))[1]
    torch.manual_seed(0)
    llama.generate(PROMPT, assistant_model=draft, **arguments)
    stats = draft.last_stats
    assert rows[1:] == [length + 1 for length in stats.proposed]  # the first one is the prefill
    assert stats.proposed == stats.scheduled and len(set(stats.scheduled)) > 2
    limits = [min(5, 40 - 1 - done - 1) for done in _tokens_before(stats)]
    for confidences, length, limit in zip(stats.confidences, stats.scheduled, limits):
        seen = confidences + [math.nan] * (limit - len(confidences))
        assert PrefixScheduler("causal").schedule([seen], SLOPE).lengths.tolist() == [length]
        assert not at_once or len(confidences) == min(length + 1, limit)
    # On a CPU a dropped draft costs the look at its confidence; elsewhere the whole block is drafted.
    assert len(steps) == sum(len(confidences) for confidences in stats.confidences)
    assert at_once or len(steps) == sum(limits)


def _tokens_before(stats):
    done = 0
    for accepted in stats.accepted:
        yield done
        done += accepted + 1


def test_both_devices_decide_alike(llama, monkeypatch, no_pause):
    texts = []
    init = DSparkCandidateGenerator.__init__
    for at_once in (True, False):

        def choose_device(self, *args, at_once=at_once, **kwargs):
            init(self, *args, **kwargs)
            self.reads_at_once = at_once

        monkeypatch.setattr(DSparkCandidateGenerator, "__init__", choose_device)
        draft = scheduled(llama)
        llama.generate(PROMPT, assistant_model=draft, **GREEDY)
        texts.append((draft.last_stats.scheduled, draft.last_stats.accepted, draft.last_stats.reasons))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("scheduler", ["auto", PrefixScheduler("causal"), PrefixScheduler("lagged", probe_every=4)])
@pytest.mark.parametrize("curve", [SLOPE, STAIRCASE, None], ids=["slope", "staircase", "measured"])
def test_same_text(target, scheduler, curve):
    plain = target.generate(PROMPT, **GREEDY)
    draft = scheduled(target, scheduler, curve)
    Script(draft, plain[0, PROMPT.shape[1] :].tolist(), lambda position: position % 4 == 0)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, **GREEDY), plain)
    stats = draft.last_stats
    assert 0 < sum(stats.accepted) < sum(stats.proposed)
    assert len({len(column) for column in (stats.proposed, stats.reasons, stats.confidences, stats.scheduled)}) == 1


def test_length_0_is_a_plain_step(llama, no_pause):
    """Rows so dear that no confidence pays: nothing is verified, and the text comes out."""
    dear = ThroughputCurve.from_seconds({1: 1.0, 6: 100.0})
    draft = scheduled(llama, curve=dear)
    out = llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert torch.equal(out, llama.generate(PROMPT, **GREEDY))
    stats = draft.last_stats
    assert stats.proposed == [0] * 39 and all(len(row) == 1 for row in stats.confidences[:-1])


def test_a_threshold_and_the_scheduler_give_the_smaller_length(llama, no_pause):
    lengths = {}
    for scheduler, threshold in ((None, 0.6), ("auto", None), ("auto", 0.6)):
        draft = scheduled(llama, scheduler)
        draft.generation_config.assistant_confidence_threshold = threshold
        llama.generate(PROMPT, assistant_model=draft, **{**GREEDY, "max_new_tokens": 8})
        lengths[scheduler, threshold] = draft.last_stats.scheduled[0]
    assert lengths["auto", 0.6] == min(lengths[None, 0.6], lengths["auto", None])


def test_pauses_and_resumes_with_its_features(llama):
    """Twelve rounds in vain, a pause, and a draft that is right from then on: it accepts, so its context was kept."""
    plain = llama.generate(PROMPT, do_sample=False, max_new_tokens=120)
    ids = plain[0, PROMPT.shape[1] :].tolist()
    curve = ThroughputCurve.from_seconds({1: 1.0, 6: 1.02})
    profile = ThroughputProfile({512: curve}, {512: (0.0, 0.0)}, draft_seconds=(0.2,) * 5)
    draft = scheduled(llama, "auto", profile)
    Script(draft, ids, lambda position: position < 20)
    observed = []
    original = DSparkDraftModel.extend_context

    def watch(self, cache, features, positions):
        observed.append(positions[0].tolist())
        return original(self, cache, features, positions)

    draft.extend_context = lambda *args: watch(draft, *args)
    out = llama.generate(PROMPT, assistant_model=draft, do_sample=False, max_new_tokens=120)
    stats = draft.last_stats
    assert torch.equal(out, plain)
    assert stats.paused_rounds == stats.reasons.count(PAUSED) >= 8
    assert sum(stats.accepted[-10:]) > 20  # it resumed
    flat = [position for part in observed for position in part]
    assert flat == list(range(len(flat)))  # every verified token once, in order, those of the pause too
    assert "paused" in str(stats)


def test_the_plain_step_is_timed_when_no_curve_is_known(llama, monkeypatch):
    monkeypatch.setattr("hf_dspark.generation.pacing.load_cached_profile", lambda target, draft: None)
    draft = scheduled(llama, curve=None)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert [i for i, reason in enumerate(draft.last_stats.reasons) if reason == TIMING] == [1, 3, 5]
    assert draft.last_stats.proposed[1] == 0 and draft.last_stats.scheduled[1] == 0
    times = draft.round_times[SINGLE]
    assert times.knows_plain_step(9) and times.draft_seconds() > 0
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert TIMING not in draft.last_stats.reasons  # known by now
    draft.scheduler = None
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert set(draft.last_stats.reasons) <= {"full block", "length budget"}


def test_a_kept_profile_is_used(llama, monkeypatch):
    profile = ThroughputProfile({512: SLOPE}, {512: (0.0, 0.0)}, draft_seconds=(1e-9,) * 5)
    monkeypatch.setattr("hf_dspark.generation.pacing.load_cached_profile", lambda target, draft: profile)
    draft = scheduled(llama, curve=None)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert draft.last_stats.reasons[0].startswith("causal")


def test_no_synchronisation_is_added(llama, monkeypatch):
    """What is learnt comes from wall times at a point where the round waits anyway."""
    calls = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: calls.append(args))
    llama.generate(PROMPT, assistant_model=scheduled(llama, curve=None), **GREEDY)
    assert not calls and "synchronize" not in Path(loop.__file__).read_text(encoding="utf-8")


def test_temperatures_go_by_the_mode(llama, no_pause):
    draft = scheduled(llama)
    draft.record_confidence = True
    draft.config.confidence_temperatures = {"sample": [2.0, 1.0, 0.5, 1.0, 4.0]}
    torch.manual_seed(0)
    llama.generate(PROMPT, assistant_model=draft, **SAMPLED)
    stats = draft.last_stats
    assert stats.calibrated is True and "calibrate" not in str(stats)
    for logits, confidences in zip(stats.confidence_logits, stats.confidences):
        expected = torch.tensor(logits) / torch.tensor([2.0, 1.0, 0.5, 1.0, 4.0])[: len(logits)]
        torch.testing.assert_close(torch.tensor(confidences), expected.sigmoid(), atol=1e-5, rtol=1e-5)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert draft.last_stats.calibrated is False and "hf-dspark calibrate" in str(draft.last_stats)


@pytest.mark.parametrize("rows", [1, 2])
def test_shifts_go_by_the_mode(llama, no_pause, rows):
    """After the temperature; for one row and for several."""
    draft = scheduled(llama)
    draft.record_confidence = True
    temperatures, shifts = [2.0, 1.0, 0.5, 1.0, 4.0], [-0.5, 0.2, 0.0, -1.0, 0.3]
    draft.config.confidence_temperatures = {"greedy": temperatures}
    draft.config.confidence_shifts = {"greedy": shifts, "sample": [9.0] * 5}
    llama.generate(PROMPT.repeat(rows, 1), assistant_model=draft, **GREEDY)
    stats = draft.last_stats if rows == 1 else draft.last_stats.rows[1]
    assert any(stats.confidence_logits)
    for logits, confidences in zip(stats.confidence_logits, stats.confidences):
        count = len(logits)
        expected = torch.tensor(logits) / torch.tensor(temperatures[:count]) + torch.tensor(shifts[:count])
        torch.testing.assert_close(torch.tensor(confidences), expected.sigmoid(), atol=1e-5, rtol=1e-5)


def test_confidences_are_recorded_on_request_only(llama):
    draft = tiny_draft(llama)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert not any(draft.last_stats.confidences) and not any(draft.last_stats.confidence_logits)
    draft.record_confidence = True
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    assert [len(row) for row in stats.confidence_logits] == stats.proposed


def test_a_draft_without_confidence_still_pauses(llama):
    curve = ThroughputCurve.from_seconds({1: 1.0, 6: 1.4})
    draft = scheduled(llama, curve=curve, enable_confidence_head=False)
    llama.generate(PROMPT, assistant_model=draft, **GREEDY)
    assert draft.last_stats.paused_rounds > 0 and draft.last_stats.calibrated is None


@pytest.mark.parametrize("value", ["causal", 3, False, PrefixScheduler])
def test_wrong_schedulers_are_refused(llama, value):
    draft = tiny_draft(llama)
    with pytest.raises(DSparkError, match=r"draft\.scheduler is"):
        draft.scheduler = value
