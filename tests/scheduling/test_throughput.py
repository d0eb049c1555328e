import itertools
import json
import math

import numpy as np
import pytest

from hf_dspark.errors import DSparkConfigError, DSparkDataError
from hf_dspark.scheduling.prefix_scheduler import is_unimodal
from hf_dspark.scheduling.throughput import CurveLearner, ThroughputCurve, ThroughputProfile


def curve_of(*seconds):
    return ThroughputCurve.from_seconds(dict(enumerate(seconds, start=1)))


# --------------------------------------------------------------------------------------------------------------------
# The curve
# --------------------------------------------------------------------------------------------------------------------
def test_points_are_given_back_and_lie_on_a_line_between():
    curve = ThroughputCurve.from_points({4: 2.0, 1: 10.0, 2: 5.0})  # 0.5 s, 0.1 s, 0.2 s
    assert curve.tokens == (1, 2, 4)
    assert curve.seconds_per_step(1) == pytest.approx(0.1) and curve.steps_per_second(2) == pytest.approx(5.0)
    assert curve.seconds_per_step(3) == pytest.approx(0.35)
    assert curve.seconds_per_step(10) == pytest.approx(0.5 + 6 * 0.15)  # the last slope goes on
    assert ThroughputCurve.from_seconds({4: 0.3, 8: 0.5}).seconds_per_step(1) == pytest.approx(0.3)
    assert ThroughputCurve.from_seconds({3: 0.3}).seconds_per_step(100) == pytest.approx(0.3)


def test_an_array_gives_what_each_number_gives():
    curve = curve_of(0.1, 0.12, 0.2)
    tokens = np.arange(1, 9).reshape(2, 4)
    seconds, rates = curve.seconds_per_step(tokens), curve.steps_per_second(tokens)
    assert seconds.dtype == np.float64 and seconds.shape == (2, 4)
    assert seconds.ravel().tolist() == pytest.approx([curve.seconds_per_step(b) for b in range(1, 9)])
    assert rates == pytest.approx(1 / seconds)
    assert isinstance(curve.seconds_per_step(2), float) and isinstance(curve.steps_per_second(2), float)


@pytest.mark.parametrize("seed", range(5))
def test_the_curve_is_the_nearest_one_that_never_falls(seed):
    rng = np.random.default_rng(seed)
    noisy = 1.0 + 0.05 * np.arange(6) + rng.normal(scale=0.2, size=6).clip(-0.8, 0.8)
    curve = curve_of(*noisy)
    fitted = curve.seconds_per_step(np.arange(1, 7))
    assert (np.diff(curve.seconds_per_step(np.arange(1, 30))) >= -1e-12).all()
    assert curve.seconds == pytest.approx(noisy)  # what was measured is kept
    # Every non-decreasing sequence is at least as far away: all ways to cut the points into pools, by brute force.
    nearest = math.inf
    for cuts in itertools.product([False, True], repeat=5):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 6]
        means = np.concatenate([np.full(b - a, noisy[a:b].mean()) for a, b in itertools.pairwise(edges)])
        if (np.diff(means) >= 0).all():
            nearest = min(nearest, ((means - noisy) ** 2).sum())
    assert ((fitted - noisy) ** 2).sum() == pytest.approx(nearest)


def test_a_draft_is_charged_at_every_point():
    curve = curve_of(0.1, 0.3, 0.2)
    charged = curve.charged(0.05)
    tokens = np.arange(1, 12)
    assert charged.seconds_per_step(tokens) == pytest.approx(curve.seconds_per_step(tokens) + 0.05)
    assert curve.seconds == (0.1, 0.3, 0.2)
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(DSparkConfigError, match="draft_seconds"):
            curve.charged(wrong)


def test_flat():
    curve = curve_of(0.100, 0.101, 0.102, 0.2)
    assert curve.is_flat(1, 3) and not curve.is_flat(1, 4)
    assert not curve.is_flat(1, 3, tolerance=0.01)


def test_a_curve_cannot_be_changed():
    curve = curve_of(0.1, 0.2)
    with pytest.raises(AttributeError):
        curve.seconds = (1.0, 1.0)
    assert curve == curve_of(0.1, 0.2) and curve != curve_of(0.1, 0.3) and hash(curve) == hash(curve_of(0.1, 0.2))


@pytest.mark.parametrize(
    "points", [{}, {1: 0.0}, {1: -3.0}, {1: math.nan}, {1: math.inf}, {0: 1.0}, {1.5: 1.0}, {True: 1.0}]
)
def test_bad_points_are_refused(points):
    with pytest.raises(DSparkConfigError):
        ThroughputCurve.from_points(points)
    with pytest.raises(DSparkConfigError):
        ThroughputCurve.from_seconds(points)


def test_the_constructor_wants_ascending_counts_and_a_time_for_each():
    for tokens, seconds in (((2, 1), (0.1, 0.1)), ((1, 1), (0.1, 0.1)), ((1, 2), (0.1,)), ((1,), ("0.1",))):
        with pytest.raises(DSparkConfigError):
            ThroughputCurve(tokens, seconds)


def test_a_saved_curve_is_the_same_curve(tmp_path):
    curve = curve_of(0.1, 0.3, 0.2)
    curve.save(tmp_path / "curve.json")
    assert ThroughputCurve.load(tmp_path / "curve.json") == curve
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    curve_of(0.1).save(path)
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        curve_of(0.2).save(path)
    assert ThroughputCurve.load(path) == curve_of(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


CURVE = {"format": "hf-dspark throughput curve 1", "tokens": [1, 2], "seconds": [0.1, 0.2]}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "\udcff",
        json.dumps({**CURVE, "format": "something else"}),
        json.dumps({**CURVE, "tokens": [2, 1]}),
        json.dumps({**CURVE, "seconds": [0.1, None]}),
        json.dumps({**CURVE, "seconds": 3}),
        json.dumps({key: CURVE[key] for key in ("format", "tokens")}),
        json.dumps(CURVE).replace("0.2", "NaN"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DSparkDataError, match=r"wrong\.json is not a throughput curve.*[Ww]rite a new one"):
        ThroughputCurve.load(path)


# --------------------------------------------------------------------------------------------------------------------
# Refinement
# --------------------------------------------------------------------------------------------------------------------
def test_refining_replaces_what_was_measured_and_scales_the_rest():
    curve = curve_of(0.1, 0.2, 0.3)
    refined = curve.refined({1: 0.2, 2: 0.4})
    assert refined.seconds == pytest.approx((0.2, 0.4, 0.6))
    assert curve.refined({}) is curve
    assert curve.refined({5: 1.0}).tokens == (1, 2, 3, 5)


def test_the_learner_takes_medians_of_the_newest_times():
    learner = CurveLearner(window=8, least=3)
    assert learner.curve() is None
    for seconds in (0.2, 0.2):
        learner.add(1, seconds)
    assert learner.curve() is None and learner.count(1) == 2  # too few to be believed
    learner.add(1, 9.0)  # one that waited for something else
    assert learner.curve().seconds == pytest.approx((0.2,))
    for _ in range(8):
        learner.add(1, 0.4)
    assert learner.count(1) == 8
    assert learner.curve().seconds == pytest.approx((0.4,))  # the old ones are gone
    for wrong in (math.nan, 0.0, -1.0, math.inf):
        learner.add(2, wrong)
    assert learner.count(2) == 0 and learner.medians() == pytest.approx({1: 0.4})


def test_the_learner_rescales_its_base():
    base = curve_of(0.1, 0.1, 0.4)
    learner = CurveLearner()
    assert learner.curve(base) is base
    for _ in range(3):
        learner.add(1, 0.3)
    learner.add(3, 0.1)  # alone, so not believed
    assert learner.curve(base).seconds == pytest.approx((0.3, 0.3, 1.2))
    assert learner.curve(base) is learner.curve(base)  # nothing is new
    other = curve_of(0.1, 0.2)
    assert learner.curve(other).seconds == pytest.approx((0.3, 0.6))
    learner.add(2, 0.5), learner.add(2, 0.5), learner.add(2, 0.5)
    assert learner.curve(other).seconds == pytest.approx((0.3, 0.5))


def test_a_learner_finds_a_noisy_curve():
    rng = np.random.default_rng(0)
    truth = {1: 0.02, 4: 0.025, 6: 0.04}
    learner = CurveLearner()
    for _ in range(64):
        for tokens, seconds in truth.items():
            learner.add(tokens, seconds * (1 + rng.exponential(0.02) + (rng.random() < 0.2) * 5))
    assert learner.curve().seconds == pytest.approx(tuple(truth.values()), rel=0.05)


# --------------------------------------------------------------------------------------------------------------------
# The profile
# --------------------------------------------------------------------------------------------------------------------
def profile_of(curves, draft_seconds=None):
    spreads = {context: (0.01,) * len(curve.tokens) for context, curve in curves.items()}
    return ThroughputProfile(curves, spreads, draft_seconds, {"target": "t"})


def test_a_profile_gives_the_bucket_that_holds_the_context():
    short, long = curve_of(0.1, 0.2), curve_of(0.3, 0.4)
    profile = profile_of({512: long, 128: short})
    for context, curve in ((1, short), (128, short), (129, long), (512, long), (9999, long)):
        assert profile.curve(context) is curve


def test_the_draft_costs_a_fixed_part_and_a_part_per_token():
    profile = profile_of({8: curve_of(1.0, 1.0)}, (0.030, 0.034, 0.038))
    assert profile.draft_line == pytest.approx((0.026, 0.004))
    assert profile.draft_cost(0) == 0 and profile.draft_cost(5) == pytest.approx(0.046)
    assert profile_of({8: curve_of(1.0)}).draft_cost(3) == 0
    assert profile_of({8: curve_of(1.0)}, (0.5,)).draft_line == pytest.approx((0.5, 0.0))
    for odd in ((0.03, 0.02, 0.01), (0.01, 0.1, 0.2)):  # neither part may come out negative
        assert min(profile_of({8: curve_of(1.0)}, odd).draft_line) >= 0


def test_expected_speed_up():
    profile = profile_of({8: curve_of(1.0, 1.0, 2.0)}, (0.5, 0.5))
    assert profile.expected_speedup(0.5, 8, 1) == pytest.approx(1.5 / 1.5)
    assert profile.expected_speedup(0.5, 8, 2) == pytest.approx(1.75 / 2.5)
    assert profile.expected_speedup(1.0, 8, 2) == pytest.approx(3 / 2.5)
    assert profile.best_length(0.5, 8) == 1 and profile.longest == 2
    flat = profile_of({8: curve_of(1.0, 1.0, 1.0)}, (0.1, 0.9))
    assert flat.best_length(0.0, 8) == 2  # length cannot matter: the full block
    assert profile_of({8: curve_of(1.0, 1.1, 1.2, 1.3)}).longest == 3


def test_a_saved_profile_is_the_same_profile(tmp_path):
    profile = profile_of({128: curve_of(0.1, 0.2), 512: curve_of(0.3, 0.25)}, (0.01, 0.02))
    profile.save(tmp_path / "profile.json")
    assert ThroughputProfile.load(tmp_path / "profile.json") == profile
    with pytest.raises(DSparkDataError, match="format"):
        ThroughputCurve.load(tmp_path / "profile.json")
    values = json.loads((tmp_path / "profile.json").read_text())
    values["contexts"]["128"]["spread"] = [0.1]
    (tmp_path / "profile.json").write_text(json.dumps(values))
    with pytest.raises(DSparkDataError, match=r"profile\.json is not a throughput profile"):
        ThroughputProfile.load(tmp_path / "profile.json")


def test_a_profile_must_be_whole():
    with pytest.raises(DSparkConfigError):
        ThroughputProfile({}, {})
    with pytest.raises(DSparkConfigError):
        ThroughputProfile({8: curve_of(0.1)}, {})
    for times in ((), (0.1, math.nan), (0.0,)):
        with pytest.raises(DSparkConfigError, match="draft_seconds"):
            profile_of({8: curve_of(0.1)}, times)


def test_noise_makes_no_steps_and_steps_stay():
    """Medians that scatter by a percent or two are a line; a step of a tenth that was seen often is kept."""
    learner = CurveLearner(least=1)
    wiggle = [0.0, 0.02, -0.02, 0.02, -0.01, 0.02, 0.0]
    for tokens, part in zip(range(2, 9), wiggle):
        learner.add(tokens, (0.020 + 0.0002 * tokens) * (1 + part))
    curve = learner.curve()
    assert is_unimodal(curve, 2, 8) and curve.tokens == (2, 8)
    for tokens in [*range(2, 13)] * 12:
        learner.add(tokens, 0.020 + 0.0002 * tokens + 0.0024 * (tokens > 8))
    curve = learner.curve()
    assert curve.seconds_per_step(9) - curve.seconds_per_step(8) == pytest.approx(0.0026, rel=0.05)


def test_a_count_that_is_rarely_seen_gives_way_to_its_neighbours():
    """One slow round at 8 tokens must not look like a step at which more drafts stop to pay."""
    learner = CurveLearner(least=1)
    for tokens in (4, 7, 9, 10, 12):
        for _ in range(12):
            learner.add(tokens, 0.045 + 0.0007 * tokens)
    learner.add(8, 0.057)
    learner.add(11, 0.057)
    curve = learner.curve()
    assert is_unimodal(curve, 4, 12)
    assert curve.seconds_per_step(8) == pytest.approx(0.0506, rel=0.02)
