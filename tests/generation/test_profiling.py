import json

import pytest
import torch
from tiny_models import tiny_draft, tiny_llama

from hf_dspark.errors import DSparkConfigError, DSparkMeasurementError, DSparkTargetError
from hf_dspark.generation import profiling
from hf_dspark.generation.profiling import (
    cached_profile_path,
    load_cached_profile,
    measure_throughput,
    profile_facts,
    profile_key,
    row_counts,
)


@pytest.fixture(autouse=True)
def assets(tmp_path, monkeypatch):
    """The cache, empty."""
    folder = tmp_path / "assets"
    monkeypatch.setattr(profiling, "cached_assets_path", lambda *args, **kwargs: _made(folder))
    return folder


def _made(folder):
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def any_noise(monkeypatch):
    """Steps of microseconds on a busy machine: what the times are does not matter here."""
    monkeypatch.setattr(profiling, "_UNUSABLE", float("inf"))
    monkeypatch.setattr(profiling, "_STEADY", float("inf"))


def measured(target, draft=None, **changes):
    return measure_throughput(
        target, draft, **{"max_tokens": 4, "context_lengths": [4, 8], "repeats": 3, "warmup": 1, **changes}
    )


def test_a_profile_of_every_kind_of_target(target):
    draft = tiny_draft(target)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    told = []
    profile = measured(
        target, draft, context_lengths=[16, 4], progress=lambda done, planned: told.append((done, planned))
    )
    assert list(profile.curves) == [4, 16]  # the longer one is beyond the sliding window
    for context, curve in profile.curves.items():
        assert curve.tokens == (1, 2, 3, 4) and len(profile.spreads[context]) == 4
    assert len(profile.draft_seconds) == 5 and profile.longest == 3
    assert profile.facts["target_dtype"] == "float32" and profile.facts["threads"] == 1
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    json.dumps(profile.to_dict())


def test_what_is_timed_is_the_loops_own_forward(llama, monkeypatch):
    """The rows, the cache before them, the positions, the tapped layers, and nothing left behind."""
    draft, calls = tiny_draft(llama), []

    def note(module, args, kwargs):
        calls.append(
            (
                kwargs["input_ids"].shape[1],
                kwargs["cache"].get_seq_length(),
                kwargs["position_ids"][0].tolist(),
                kwargs["output_hidden_states"],
                kwargs["logits_to_keep"],
            )
        )

    handle = llama.register_forward_pre_hook(note, with_kwargs=True)
    try:
        measured(llama, draft, context_lengths=[8])
    finally:
        handle.remove()
    prefill, *steps = calls
    assert prefill == (8, 0, list(range(8)), [1, 3], 1)
    counts = [call[0] for call in steps]
    assert [counts.count(rows) for rows in range(1, 6)] == [4 * (1 + 5), 4, 4, 4, 0]  # one row before each draft
    several = [rows for rows in counts if rows > 1]
    assert len({tuple(several[i : i + 3]) for i in range(0, 12, 3)}) > 1  # the order varies
    for rows, before, positions, layers, kept in steps:
        assert before == 8 and positions == list(range(8, 8 + rows)) and layers == [1, 3] and kept == rows


def test_the_draft_is_measured_at_every_length(llama, monkeypatch):
    draft, steps = tiny_draft(llama), []
    original = draft.sequential_step
    monkeypatch.setattr(draft, "sequential_step", lambda *args: steps.append(1) or original(*args))
    profile = measured(llama, draft, context_lengths=[8], repeats=3, warmup=0)
    assert len(steps) == 3 * sum(1 + length for length in range(1, 6))  # one more each to fill the context
    assert len(profile.draft_seconds) == 5


def test_a_measurement_is_found_again(llama, assets):
    draft = tiny_draft(llama)
    assert load_cached_profile(llama, draft) is None
    alone = measured(llama)
    assert load_cached_profile(llama) == alone
    assert load_cached_profile(llama, draft) == alone  # second best
    both = measured(llama, draft)
    assert load_cached_profile(llama, draft) == both and load_cached_profile(llama) == alone
    assert len(list(assets.iterdir())) == 2
    assert load_cached_profile(tiny_llama(), tiny_draft(llama)) == both  # other objects, same models


def test_nothing_is_kept_without_cache(llama, assets):
    measured(llama, cache=False)
    assert not assets.exists()


def test_a_cache_that_cannot_be_written_costs_a_warning_only(llama, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr(profiling, "cached_assets_path", refuse)
    warnings = []
    monkeypatch.setattr(profiling.logger, "warning", warnings.append)
    monkeypatch.setattr(profiling.logger, "warning_once", warnings.append)
    assert measured(llama).curves
    assert load_cached_profile(llama) is None
    assert len(warnings) == 2 and all("read-only" in warning for warning in warnings)


def test_a_broken_file_is_passed_over_with_one_warning(llama, monkeypatch):
    measured(llama)
    path = cached_profile_path(llama)
    path.write_text(path.read_text()[:50])
    warnings = []
    monkeypatch.setattr(profiling.logger, "warning_once", warnings.append)
    assert load_cached_profile(llama) is None
    assert len(warnings) == 1 and str(path) in warnings[0]


def test_the_key_follows_what_times_depend_on():
    target = tiny_llama()
    draft = tiny_draft(target)
    key, pair_key = profile_key(target), profile_key(target, draft)
    assert key != pair_key
    assert profile_key(target) == key == profile_key(tiny_llama())
    keys = [key, pair_key]
    keys.append(profile_key(tiny_llama(num_hidden_layers=3)))
    keys.append(profile_key(target, tiny_draft(target, markov_rank=4)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(profile_key(target))
    finally:
        torch.set_num_threads(threads)
    target.set_attn_implementation("eager")
    keys.append(profile_key(target))
    target.set_attn_implementation("sdpa")
    keys.append(profile_key(target.to(torch.bfloat16)))
    keys.append(profile_key(target.float(), draft.to(torch.bfloat16)))
    assert len(set(keys)) == len(keys)
    assert profile_key(target) == key


def test_the_key_does_not_follow_names_and_calibration():
    target = tiny_llama()
    draft = tiny_draft(target)
    key = profile_key(target, draft)
    other, other_draft = tiny_llama(), tiny_draft(target)
    other.config.name_or_path = "elsewhere"
    other_draft.config.confidence_temperatures = {"greedy": [1.0] * 5}
    assert profile_key(other, other_draft) == key
    assert profile_facts(other, draft)["target"] == "elsewhere"


def test_the_config_is_hashed_once(monkeypatch):
    target = tiny_llama()
    calls, original = [], type(target.config).to_dict
    monkeypatch.setattr(type(target.config), "to_dict", lambda config: calls.append(1) or original(config))
    for _ in range(3):
        profile_key(target)
    assert len(calls) == 1


# --------------------------------------------------------------------------------------------------------------------
# Failures
# --------------------------------------------------------------------------------------------------------------------
def test_a_failing_forward_keeps_nothing(assets):
    target, calls = tiny_llama(), []

    def fail(module, args, output):
        calls.append(1)
        if len(calls) > 10:
            raise RuntimeError("out of memory")

    target.model.register_forward_hook(fail)
    with pytest.raises(DSparkMeasurementError, match="RuntimeError: out of memory"):
        measured(target)
    assert not assets.exists()


def test_nan_logits_keep_nothing(assets):
    target = tiny_llama()
    with torch.no_grad():
        target.lm_head.weight[3] = float("nan")
    with pytest.raises(DSparkMeasurementError, match="NaN logits"):
        measured(target)
    assert not assets.exists()


def test_a_failing_draft_keeps_nothing(llama, assets, monkeypatch):
    draft = tiny_draft(llama)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.fill_(float("nan"))
    with pytest.raises(DSparkMeasurementError, match=r"0 of \d drafts"):
        measured(llama, draft)
    monkeypatch.setattr(draft, "start_block", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(DSparkMeasurementError, match="broken"):
        measured(llama, draft)
    assert not assets.exists()


def fake_times(monkeypatch, seconds):
    """`seconds()` in the place of each step's time."""
    monkeypatch.setattr(profiling._Steps, "verify", lambda self, rows: seconds(rows))


def test_times_that_vary_too_much_are_refused_after_more_rounds(llama, assets, monkeypatch):
    monkeypatch.setattr(profiling, "_UNUSABLE", 0.10)
    monkeypatch.setattr(profiling, "_STEADY", 0.02)
    calls = []

    def erratic(rows):
        calls.append(rows)
        return 2.0 ** (len(calls) * 7 % 11)

    fake_times(monkeypatch, erratic)
    with pytest.raises(DSparkMeasurementError, match="vary so much"):
        measured(llama)
    assert len(calls) == 8 * (1 + 4 * 3)
    assert not assets.exists()


def test_a_machine_that_is_slow_for_a_while_is_so_for_all(llama, monkeypatch):
    monkeypatch.setattr(profiling, "_STEADY", 0.02)
    calls = []

    def busy(rows):
        calls.append(rows)
        pace = 20 if len(calls) > 4 * 5 else 1  # from the sixth of eight rounds on, so medians alone would do …
        return 0.1 * rows * pace * (1 + 0.3 * (len(calls) > 4 * 3))

    fake_times(monkeypatch, busy)
    profile = measured(llama, context_lengths=[4], repeats=7)
    assert len(calls) == 4 * (1 + 7)  # … but not without more rounds
    assert [b / profile.curves[4].seconds[0] for b in profile.curves[4].seconds] == pytest.approx([1, 2, 3, 4])
    assert profile.spreads[4] == pytest.approx((0,) * 4, abs=1e-12)


def test_more_rounds_outweigh_noise(llama, monkeypatch):
    monkeypatch.setattr(profiling, "_UNUSABLE", 0.10)
    monkeypatch.setattr(profiling, "_STEADY", 0.02)
    calls = {rows: 0 for rows in range(1, 5)}

    def settling(rows):
        calls[rows] += 1
        return 0.1 * rows * (calls[rows] if rows == 3 and calls[rows] < 5 else 1)

    fake_times(monkeypatch, settling)
    profile = measured(llama, context_lengths=[4])
    assert 1 + 3 < calls[1] < 1 + 4 * 3
    assert profile.curves[4].seconds == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert load_cached_profile(llama) == profile


def test_a_limit_that_is_too_short_is_refused(llama, assets):
    with pytest.raises(DSparkMeasurementError, match="Raise the limit"):
        measured(llama, seconds_limit=1e-9)
    assert not assets.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1},
        {"repeats": 2},
        {"warmup": -1},
        {"seconds_limit": 0},
        {"context_lengths": []},
        {"context_lengths": [0]},
        {"context_lengths": [510]},  # of 512 positions
    ],
)
def test_bad_arguments(llama, changes):
    with pytest.raises(DSparkConfigError, match=next(iter(changes))):
        measured(llama, **changes)


def test_the_contexts_fit_the_targets_positions():
    assert list(measured(tiny_llama(max_position_embeddings=200), context_lengths=None).curves) == [128]
    assert list(measured(tiny_llama(max_position_embeddings=100), context_lengths=None).curves) == [47]


def test_a_draft_for_another_target_is_refused(llama):
    with pytest.raises(DSparkTargetError, match="does not fit"):
        measured(llama, tiny_draft(tiny_llama(vocab_size=50)))


def test_row_counts():
    assert row_counts(8) == list(range(1, 9))
    assert row_counts(21) == [*range(1, 17), 20, 21]
    assert row_counts(64)[16:] == [20, 24, 28, 32, 40, 48, 56, 64]
