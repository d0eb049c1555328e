"""`PrefixScheduler` against oracles in plain Python, over thousands of seeded cases.

Three random families meet in each: shapes (no request, no position, one of each, more), confidences (smooth, saturated,
tied, zero, NaN) and curves (smooth, staircase, flat, noisy).
"""

import math
import time

import numpy as np
import pytest
import torch

from hf_dspark.errors import DSparkConfigError
from hf_dspark.scheduling import PrefixScheduler, ThroughputCurve
from hf_dspark.scheduling.prefix_scheduler import POLICIES, is_unimodal

CURVES = ("smooth", "staircase", "flat", "noisy")


# --------------------------------------------------------------------------------------------------------------------
# Random cases
# --------------------------------------------------------------------------------------------------------------------
def make_curve(rng, kind, rows):
    """Seconds 1 at one token, points up to `rows` tokens: all of them, or few."""
    tokens = np.arange(1, rows + 1)
    if rng.random() < 0.5:
        tokens = np.unique(np.concatenate([[1], rng.choice(tokens, size=min(6, rows))]))
    x = (tokens - 1) / rows
    smooth = 1 + rng.uniform(0, 6) * x ** rng.uniform(1, 4)
    if kind == "staircase":
        seconds = 1 + rng.uniform(0.05, 1) * ((tokens - 1) // rng.integers(1, 6))
    elif kind == "flat":
        seconds = np.ones(len(tokens))
    elif kind == "noisy":
        seconds = smooth * np.exp(rng.normal(0, 0.2, len(tokens)))
    else:
        seconds = smooth
    return ThroughputCurve.from_points({int(b): float(1 / s) for b, s in zip(tokens, seconds)})


def make_confidences(rng, requests, block):
    shape = (requests, block)
    kind = rng.integers(5)
    if kind == 0:
        values = rng.random(shape)
    elif kind == 1:
        values = rng.beta(4, 1, shape)
    elif kind == 2:  # ties within and across requests
        values = rng.choice([0.25, 0.5, 1.0], shape)
    elif kind == 3:
        values = np.ones(shape)
    else:
        values = rng.choice([0.0, 1e-200, 0.5, 0.9, 1.0, math.nan], shape)
    values[rng.random(shape) < 0.03] = math.nan
    return values


def make_case(seed):
    rng = np.random.default_rng(seed)
    requests, block, other_rows = int(rng.integers(0, 6)), int(rng.integers(0, 8)), int(rng.integers(0, 3))
    curve = make_curve(rng, CURVES[seed % 4], 2 + int(rng.integers(0, 45)))
    return rng, make_confidences(rng, requests, block), curve, other_rows


# --------------------------------------------------------------------------------------------------------------------
# Oracles
# --------------------------------------------------------------------------------------------------------------------
def survivals(confidences):
    """a_k of each request, as lists."""
    rows = []
    for row in confidences.tolist():
        rows.append([])
        survival = 1.0
        for c in row:
            survival *= 0.0 if math.isnan(c) else c
            rows[-1].append(survival)
    return rows


def ranked_pairs(confidences):
    """(−a, k, r), a > 0, in the order of admission; positions from 1."""
    rows = survivals(confidences)
    return sorted((-a, k, r) for r, row in enumerate(rows) for k, a in enumerate(row, 1) if a > 0)


def prefix_lengths(pairs, requests):
    """The lengths that these pairs make; fails on a hole."""
    lengths = [0] * requests
    for _, k, r in pairs:
        assert k == lengths[r] + 1
        lengths[r] = k
    return lengths


def algorithm_1(confidences, curve, other_rows=0):
    """The paper's loop."""
    requests = len(confidences)
    tau, rows = float(requests), requests + other_rows
    best = tau * curve.steps_per_second(rows) if rows else 0.0
    admitted = []
    for pair in ranked_pairs(confidences):
        tau -= pair[0]
        rows += 1
        theta = tau * curve.steps_per_second(rows)
        if theta <= best:
            break
        best = theta
        admitted.append(pair)
    return prefix_lengths(admitted, requests)


def best_totals(past, curve, requests, block, other_rows):
    """Θ of every K, for rounds of the same number of requests."""
    sums = [
        [sum(-p[0] for p in ranked_pairs(c[:, :block])[:count]) for c in past] for count in range(requests * block + 1)
    ]
    return [
        (requests + sum(row) / len(past)) * curve.steps_per_second(requests + other_rows + count)
        for count, row in enumerate(sums)
    ]


def retrospective(confidences, curve, other_rows=0):
    """What must not be done: the best total over this round's own scores."""
    pairs = ranked_pairs(confidences)
    thetas = best_totals([confidences], curve, len(confidences), confidences.shape[1], other_rows)
    return prefix_lengths(pairs[: int(np.argmax(thetas))], len(confidences))


# --------------------------------------------------------------------------------------------------------------------
# Causal
# --------------------------------------------------------------------------------------------------------------------
def test_causal_is_the_paper_loop():
    scheduler = PrefixScheduler("causal")
    reasons = set()
    for seed in range(3000):
        _, confidences, curve, other_rows = make_case(seed)
        lengths, reason = scheduler.schedule(confidences, curve, other_rows=other_rows)
        assert lengths.tolist() == algorithm_1(confidences, curve, other_rows), seed
        assert lengths.dtype == torch.int64 and lengths.shape == (len(confidences),)
        assert not len(lengths) or 0 <= int(lengths.min()) <= int(lengths.max()) <= confidences.shape[1]
        reasons.add(reason)
    assert reasons == {
        "no requests",
        "no drafts",
        "causal: throughput stops rising",
        "causal: the full block pays",
        "causal: no confidence left",
        "flat curve: the full block is verified",
    }


def test_causal_by_hand():
    curve = ThroughputCurve.from_points({2: 1.0, 3: 0.8, 4: 0.7, 5: 0.5})
    # Θ: 2 → (2 + 0.9)·0.8 = 2.32 → (2.9 + 0.81)·0.7 = 2.597 → (3.71 + 0.6)·0.5 = 2.155, so two rows, both request 0's.
    lengths, reason = PrefixScheduler("causal").schedule([[0.9, 0.9], [0.6, 0.5]], curve)
    assert (lengths.tolist(), reason) == ([2, 0], "causal: throughput stops rising")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (8, [3, 3, 2])],
)
def test_ties_go_by_position_then_request(limit, expected):
    points = {b: 1.0 for b in range(3, 3 + limit + 1)}
    curve = ThroughputCurve.from_points({**points, 3 + limit + 1: 1e-3})
    assert PrefixScheduler("causal").schedule(torch.ones(3, 3), curve)[0].tolist() == expected


def test_nan_is_certain_failure_and_ends_the_prefix():
    curve = ThroughputCurve.from_points({1: 1.0})
    confidences = [[0.9, math.nan, 0.9], [math.nan, 1.0, 1.0], [0.5, 0.0, 1.0]]
    schedule = PrefixScheduler("causal").schedule(confidences, curve)
    assert (schedule.lengths.tolist(), schedule.reason) == ([1, 0, 1], "causal: no confidence left")


def test_kinds_of_input_agree():
    curve = ThroughputCurve.from_points({1: 1.0, 20: 0.2})
    values = np.random.default_rng(0).random((4, 5)).astype(np.float32)
    expected = PrefixScheduler().schedule(values, curve).lengths.tolist()
    tensor = torch.from_numpy(values).requires_grad_()
    for confidences in (tensor, values.tolist(), values.astype(np.float64)):
        assert PrefixScheduler().schedule(confidences, curve).lengths.tolist() == expected
    assert PrefixScheduler().schedule(torch.full((2, 3), 0.5, dtype=torch.bfloat16), curve).lengths.shape == (2,)
    assert PrefixScheduler().schedule([], curve).lengths.shape == (0,)


def test_other_rows_count_in_every_total():
    curve = ThroughputCurve.from_points({1: 1.0, 10: 1.0, 11: 0.1})
    scheduler = PrefixScheduler("causal")
    confidences = np.ones((2, 8))
    assert int(scheduler.schedule(confidences, curve).lengths.sum()) == 8
    assert int(scheduler.schedule(confidences, curve, other_rows=5).lengths.sum()) == 3


def test_charged_draft_seconds_lengthen():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.5, 3: 0.3})
    scheduler = PrefixScheduler("causal")
    assert scheduler.schedule([[0.8, 0.8]], curve).lengths.tolist() == [0]
    assert scheduler.schedule([[0.8, 0.8]], curve.charged(3.0)).lengths.tolist() == [2]


# --------------------------------------------------------------------------------------------------------------------
# Lagged
# --------------------------------------------------------------------------------------------------------------------
def test_lagged_is_the_brute_force_optimum():
    scheduler = PrefixScheduler("lagged")
    totals = set()
    for seed in range(1500):
        rng, confidences, curve, other_rows = make_case(seed)
        requests, block = confidences.shape
        past = (
            [make_confidences(rng, requests, block + int(rng.integers(-1, 2))) for _ in range(rng.integers(1, 4))]
            if block
            else []
        )
        given = past[0] if len(past) == 1 and seed % 2 else past
        lengths, reason = scheduler.schedule(confidences, curve, given, round_index=1, other_rows=other_rows)
        if not requests or not block:
            assert int(lengths.sum()) == 0
            continue
        thetas = best_totals(past, curve, requests, block, other_rows)
        rows, said = scheduler.budget(given, curve, requests, block, round_index=1, other_rows=other_rows)
        assert thetas[rows] >= max(thetas) * (1 - 1e-12), seed
        assert all(theta < thetas[rows] * (1 + 1e-12) for theta in thetas[:rows]), seed
        assert reason == said == f"lagged budget {rows}"
        assert lengths.tolist() == prefix_lengths(ranked_pairs(confidences)[:rows], requests), seed
        totals.add((rows > 0) + (rows == requests * block))
    assert totals == {0, 1, 2}


def test_lagged_finds_what_an_early_stop_misses():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.5, 3: 0.48, 4: 0.46})
    good, bad = [[0.9, 0.9, 0.9]], [[0.1, 0.1, 0.1]]
    assert PrefixScheduler("causal").schedule(good, curve).lengths.tolist() == [0]
    lagged = PrefixScheduler("lagged")
    assert lagged.schedule(good, curve, good) == (torch.tensor([3]), "lagged budget 3")
    # The current scores do not move the total, in either direction.
    assert lagged.schedule(bad, curve, good).lengths.tolist() == [3]
    assert lagged.schedule(good, curve, bad).lengths.tolist() == [0]


def test_lagged_averages_over_rounds():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.5, 3: 0.48})
    scheduler = PrefixScheduler("lagged")
    good, bad = [[1.0, 1.0]], [[0.0, 0.0]]
    # Θ(0) = 1; Θ(2) = (1 + 2·share of good rounds)·0.48: over 1 from a share of 0.542 on.
    assert scheduler.budget([good, bad], curve, 1, 2).rows == 0
    assert scheduler.budget([good, good, bad], curve, 1, 2).rows == 2
    assert scheduler.budget(np.array([good, good, bad]), curve, 1, 2).rows == 2


def test_lagged_scales_rounds_with_other_numbers_of_requests():
    rng = np.random.default_rng(5)
    scheduler = PrefixScheduler("lagged")
    seen = set()
    for seed in range(300):
        once = make_confidences(rng, 3, 4)
        curve = make_curve(rng, CURVES[seed % 4], 40)
        for repeats in (2, 3):
            # Every request twice is the same evidence about a pool of three.
            expected = scheduler.budget(once, curve, 3, 4).rows
            assert scheduler.budget(np.repeat(once, repeats, axis=0), curve, 3, 4).rows == expected
            seen.add(expected)
    assert len(seen) > 5
    # One request of the past stands for all four: each of them gets its two good positions.
    curve = ThroughputCurve.from_points({4: 1.0, 12: 0.9, 13: 0.1})
    assert scheduler.budget([[1.0, 1.0, 0.0]], curve, 4, 3).rows == 8
    assert scheduler.budget([np.empty((0, 3)), [[1.0, 1.0, 0.0]]], curve, 4, 3).rows == 8  # an empty round says nothing


def test_lagged_without_earlier_rounds_verifies_everything():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.1})
    scheduler = PrefixScheduler("lagged")
    for past in (None, [], [np.empty((0, 3))]):
        schedule = scheduler.schedule(np.full((2, 3), 0.01), curve, past)
        assert schedule.lengths.tolist() == [3, 3]
        assert schedule.reason == "lagged: no earlier rounds, the full block is verified"


def test_lagged_probes_when_it_would_never_draft_again():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.1})
    scheduler = PrefixScheduler("lagged", probe_every=4)
    bad = np.full((2, 3), 0.01)
    current = [[0.5, 0.4, 0.3], [0.1, 0.1, 0.1]]
    by_index = [scheduler.schedule(current, curve, bad, round_index=i) for i in range(1, 9)]
    assert [int(s.lengths.sum()) for s in by_index] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert [s.reason for s in by_index[2:4]] == ["lagged budget 0", "lagged probe"]
    by_count = [scheduler.budget([bad] * i, curve, 2, 3).rows for i in range(1, 9)]
    assert by_count == [0, 0, 0, 2, 0, 0, 0, 2]
    # Where drafts pay there is nothing to probe. The smallest of equally good totals: no rows for a = 0.
    flat = ThroughputCurve.from_points({1: 1.0})
    assert scheduler.budget([[0.9, 0.9, 0.0], [0.9, 0.0, 0.0]], flat, 2, 3, round_index=4) == (3, "lagged budget 3")


# --------------------------------------------------------------------------------------------------------------------
# Auto
# --------------------------------------------------------------------------------------------------------------------
def test_unimodal_agrees_with_the_envelope_by_definition():
    answers = []
    for seed in range(600):
        rng = np.random.default_rng(seed)
        curve = make_curve(rng, CURVES[seed % 4], 30)
        low, high = sorted(int(b) for b in rng.integers(1, 34, 2))
        t = [curve.seconds_per_step(b) for b in range(low, high + 1)]
        n = len(t)
        envelope = [
            min(t[a] + (t[b] - t[a]) * (i - a) / max(b - a, 1) for a in range(i + 1) for b in range(i, n))
            for i in range(n)
        ]
        excess = max(x / e - 1 for x, e in zip(t, envelope))
        for tolerance in (0.0, 0.05, 0.2):
            if abs(excess - tolerance) > 1e-9:
                answers.append(is_unimodal(curve, low, high, tolerance))
                assert answers[-1] == (excess < tolerance), seed
        assert is_unimodal(curve, low, low)
    assert 200 < sum(answers) < len(answers) - 200


def test_unimodal_curves_have_one_peak():
    """Where the curve is convex, the early stop costs nothing."""
    for seed in range(400):
        rng = np.random.default_rng(seed)
        requests, block = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        steps = np.sort(rng.random(requests * block) * rng.choice([0.01, 0.3]))
        seconds = 1 + np.concatenate([[0.0], np.cumsum(steps)])
        curve = ThroughputCurve.from_points({requests + i: 1 / s for i, s in enumerate(seconds.tolist())})
        assert is_unimodal(curve, requests, requests * (block + 1))
        confidences = make_confidences(rng, requests, block)
        thetas = best_totals([confidences], curve, requests, block, 0)
        count = sum(PrefixScheduler("causal").schedule(confidences, curve).lengths.tolist())
        assert thetas[count] >= max(thetas) * (1 - 1e-9)


def test_unimodal_forgives_noise_and_looks_only_at_its_range():
    rng = np.random.default_rng(1)
    for _ in range(50):
        seconds = (1 + 0.05 * np.arange(32)) * (1 + rng.uniform(-0.02, 0.02, 32))
        assert is_unimodal(ThroughputCurve.from_points({i + 1: 1 / s for i, s in enumerate(seconds.tolist())}), 1, 32)
    stairs = ThroughputCurve.from_points({1: 1.0, 8: 1.0, 9: 0.5, 16: 0.5})
    assert is_unimodal(stairs, 1, 8) and is_unimodal(stairs, 9, 16) and not is_unimodal(stairs, 1, 16)


def test_auto_chooses_by_the_curve():
    chosen = set()
    for seed in range(800):
        rng, confidences, curve, other_rows = make_case(seed)
        requests, block = confidences.shape
        past = make_confidences(rng, 3, block)
        lagged = not is_unimodal(curve, requests + other_rows, requests + other_rows + requests * block)
        expected, actual = (
            PrefixScheduler(policy).schedule(confidences, curve, past, round_index=1, other_rows=other_rows)
            for policy in ("lagged" if lagged else "causal", "auto")
        )
        assert actual.lengths.tolist() == expected.lengths.tolist() and actual.reason == expected.reason
        chosen.add(lagged)
    assert chosen == {True, False}


# --------------------------------------------------------------------------------------------------------------------
# Non-anticipation
# --------------------------------------------------------------------------------------------------------------------
def anticipations(decide, cases):
    """In how many cases a decision about position k of a request changed with its own tokens at positions ≥ k.

    These tokens reach the scheduler through c_{k+1} … c_γ of the request and through nothing else. Position j ≤ k is
    verified iff j ≤ ℓ, so all of them are decided alike iff min(ℓ, k) is the same.
    """
    count = 0
    for seed in range(cases):
        rng, confidences, curve, other_rows = make_case(seed)
        requests, block = confidences.shape
        if requests == 0 or block == 0:
            continue
        past = make_confidences(rng, requests, block)
        r, k = int(rng.integers(requests)), int(rng.integers(1, block + 1))
        changed = confidences.copy()
        changed[r, k:] = make_confidences(rng, 1, block)[0, k:]
        if seed % 2:  # a stair that pays only for many drafts, and the strongest evidence for and against them
            first, stair = requests + other_rows, rng.uniform(2, 2 + block / 2)
            curve = ThroughputCurve.from_points({first: 1.0, first + 1: 1 / stair, first + 50: 1 / (stair + 0.1)})
            confidences = rng.beta(6, 1, (requests, block))
            changed = confidences.copy()
            confidences[r, k:], changed[r, k:] = 0.01, 1.0
        before = decide(confidences, curve, past, other_rows)[r]
        after = decide(changed, curve, past, other_rows)[r]
        count += min(int(before), k) != min(int(after), k)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_never_anticipates(policy):
    scheduler = PrefixScheduler(policy)

    def decide(confidences, curve, past, other_rows):
        return scheduler.schedule(confidences, curve, past, other_rows=other_rows).lengths

    assert anticipations(decide, 2400) == 0


def test_the_check_finds_a_retrospective_scheduler():
    def decide(confidences, curve, past, other_rows):
        return retrospective(confidences, curve, other_rows)

    assert anticipations(decide, 2400) > 100


# --------------------------------------------------------------------------------------------------------------------
# One request, a draft at a time
# --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
def test_walk_is_schedule_for_one_request(policy):
    scheduler = PrefixScheduler(policy, probe_every=3)
    lengths = set()
    for seed in range(1500):
        rng, confidences, curve, other_rows = make_case(seed)
        confidences = make_confidences(rng, 1, confidences.shape[1])
        past = [make_confidences(rng, 1, confidences.shape[1]) for _ in range(rng.integers(0, 4))]
        expected = scheduler.schedule(confidences, curve, past, other_rows=other_rows)
        walk = scheduler.walk(curve, confidences.shape[1], past, other_rows=other_rows)
        count = 0
        for confidence in confidences[0].tolist():
            finished = walk.finished
            admitted = walk.admit(confidence)
            assert not (finished and admitted)
            count += admitted
            if not admitted:
                assert walk.finished
                assert not walk.admit(1.0)
                break
        assert [count] == [walk.length] == expected.lengths.tolist(), seed
        assert walk.reason == expected.reason, seed
        lengths.add(count)
    assert lengths == set(range(8))


def test_walk_says_when_nothing_need_be_drafted():
    curve = ThroughputCurve.from_points({1: 1.0, 2: 0.1})
    lagged = PrefixScheduler("lagged")
    walk = lagged.walk(curve, 4, [[0.5, 0.5, 0.5, 0.5]])
    assert walk.finished and walk.reason == "lagged budget 0"
    walk = lagged.walk(curve, 4, [[0.5, 0.5, 0.5, 0.5]], round_index=16)
    assert not walk.finished and walk.admit(torch.tensor(0.5)) and walk.finished and walk.reason == "lagged probe"
    assert PrefixScheduler("causal").walk(curve, 0).finished


def test_walk_that_its_caller_ends():
    walk = PrefixScheduler("causal").walk(ThroughputCurve.from_points({1: 1.0}), 4)
    assert walk.admit(0.9)
    assert (walk.length, walk.finished, walk.reason) == (1, False, "causal: cut while throughput rises")


# --------------------------------------------------------------------------------------------------------------------
# What is refused, and speed
# --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, c: s.schedule([[0.5, 1.5]], c), r"confidences\[0\]\[1\] is 1.5"),
        (lambda s, c: s.schedule([[0.5], [-0.25]], c), r"confidences\[1\]\[0\] is -0.25"),
        (lambda s, c: s.schedule([[math.inf]], c), r"is inf"),
        (lambda s, c: s.schedule([0.5, 0.5], c), r"shape \[2\]"),
        (lambda s, c: s.schedule([[0.5], [0.5, 0.5]], c), "must be numbers of shape"),
        (lambda s, c: s.schedule([[0.5]], c, other_rows=-1), "other_rows is -1"),
        (lambda s, c: s.budget([[[0.5]], [[2.0]]], c, 1, 1), r"past\[1\]\[0\]\[0\] is 2.0"),
        (lambda s, c: s.budget(None, c, -1, 1), "requests is -1"),
        (lambda s, c: s.walk(c, -1), "block is -1"),
        (lambda s, c: s.walk(c, 2).admit(1.25), "confidence is 1.25"),
        (lambda s, c: PrefixScheduler("eager"), "policy is 'eager'.*'auto', 'causal', 'lagged'"),
        (lambda s, c: PrefixScheduler(probe_every=0), "probe_every is 0"),
    ],
)
def test_refused(call, message):
    with pytest.raises(DSparkConfigError, match=message):
        call(PrefixScheduler("causal"), ThroughputCurve.from_points({1: 1.0}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["smooth", "staircase", "flat"])
def test_256_requests_in_under_a_millisecond(policy, kind):
    rng = np.random.default_rng(0)
    confidences = torch.from_numpy(rng.beta(4, 1, (256, 16)).astype(np.float32))
    past = torch.from_numpy(rng.beta(4, 1, (256, 16)).astype(np.float32))
    tokens = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4352]
    seconds = {"smooth": lambda b: 1 + b / 2000, "staircase": lambda b: 1 + b // 512, "flat": lambda b: 1}[kind]
    curve = ThroughputCurve.from_points({b: 1 / seconds(b) for b in tokens})
    scheduler = PrefixScheduler(policy)
    best = math.inf
    for _ in range(300):
        started = time.perf_counter()
        scheduler.schedule(confidences, curve, past, round_index=1)
        best = min(best, time.perf_counter() - started)
        if best < 1e-3:
            break
    assert best < 1e-3
