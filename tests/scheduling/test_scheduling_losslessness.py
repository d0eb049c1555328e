"""Scheduling leaves the target's distribution alone: by exact enumeration, in fractions, nothing is sampled.

Every draft block, every acceptance and every replacement is followed with its probability, round after round, until
enough tokens are committed. Positions that are not verified fall back to the target, as in `generate`. A confidence is
any function of the tokens before its position: nothing here needs it to be calibrated.
"""

import itertools
from collections import Counter
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from hf_dspark.scheduling import PrefixScheduler, ThroughputCurve
from hf_dspark.scheduling.prefix_scheduler import is_unimodal

ONE = Fraction(1)


# --------------------------------------------------------------------------------------------------------------------
# Exact speculative decoding
# --------------------------------------------------------------------------------------------------------------------
def draft_blocks(draft, prefix, block):
    """Every block of tokens with its probability: `draft(prefix)` gives {token: Fraction}."""
    blocks = {(): ONE}
    for _ in range(block):
        blocks = {
            (*tokens, x): weight * q
            for tokens, weight in blocks.items()
            for x, q in draft((*prefix, *tokens)).items()
            if q > 0
        }
    return blocks


def committed(target, draft, prefix, tokens, length):
    """Distribution of what one round commits when the first `length` of the draft `tokens` are verified."""
    result = Counter()
    weight = ONE
    for k in range(length + 1):
        p = target((*prefix, *tokens[:k]))
        if k == length:  # all accepted: one token more, from the target
            replacement = p
        else:
            q = draft((*prefix, *tokens[:k]))
            accept = min(ONE, p[tokens[k]] / q[tokens[k]])
            residual = {x: max(p[x] - q[x], Fraction(0)) for x in p}
            total = sum(residual.values())
            replacement = {x: (1 - accept) * r / total for x, r in residual.items()} if accept < 1 else {}
        for x, share in replacement.items():
            if share:
                result[(*tokens[:k], x)] += weight * share
        if k < length:
            weight *= accept
    return result


def generated(target, draft, confidence, block, decide, count):
    """Distribution of the first `count` tokens, over as many rounds as they take.

    `decide(confidences [1, γ], past)` gives ℓ; `past` holds the confidences of the round before, if there was one.
    Also gives the set of lengths that were decided.
    """
    lengths = set()

    @cache
    def from_here(prefix, past):
        if len(prefix) >= count:
            return {prefix[:count]: ONE}
        result = Counter()
        for tokens, weight in draft_blocks(draft, prefix, block).items():
            scores = tuple(confidence((*prefix, *tokens[:k]), k) for k in range(block))
            length = decide(np.array([scores]), [] if past is None else [np.array([past])])
            lengths.add(length)
            for new, share in committed(target, draft, prefix, tokens, length).items():
                for text, rest in from_here((*prefix, *new), scores).items():
                    result[text] += weight * share * rest
        return result

    return from_here((), None), lengths


def plain(target, count):
    """Distribution of the first `count` tokens of plain decoding."""
    return draft_blocks(target, (), count)


def without_zeros(distribution):
    return {text: weight for text, weight in distribution.items() if weight}


def is_lossless(distribution, target, count):
    return without_zeros(distribution) == without_zeros(plain(target, count))


def retrospective_lengths(confidences, curve, other_rows=0):
    """What must not be done: the best Θ over this round's own scores, without an early stop. → lengths [R]."""
    survival = np.cumprod(confidences, axis=1)
    requests = len(survival)
    pairs = sorted((-a, k, r) for r, row in enumerate(survival) for k, a in enumerate(row) if a > 0)
    tau = np.cumsum([requests, *(-a for a, _, _ in pairs)])
    theta = tau * curve.steps_per_second(requests + other_rows + np.arange(len(tau)))
    lengths = [0] * requests
    for _, _, r in pairs[: int(theta.argmax())]:
        lengths[r] += 1
    return lengths


def deciding(policy, curve, block):
    """`decide` for `generated`: our scheduler, or the retrospective one."""
    if policy == "retrospective":
        return lambda confidences, past: retrospective_lengths(confidences, curve)[0]
    if policy == "walk":  # the sequential form: looks at one confidence after the other

        def walked(confidences, past):
            walk = PrefixScheduler("causal").walk(curve, block)
            return sum(walk.admit(c) for c in itertools.takewhile(lambda _: not walk.finished, confidences[0]))

        return walked
    scheduler = PrefixScheduler(policy)
    return lambda confidences, past: int(scheduler.schedule(confidences, curve, past).lengths[0])


# --------------------------------------------------------------------------------------------------------------------
# The paper's appendix A
# --------------------------------------------------------------------------------------------------------------------
# Two tokens, two drafts. The target says A with 0.7, the draft tosses a coin. Verifying one draft does not pay on this
# machine; verifying two does if the second is likely to survive, and that depends on which token the first one is.
# A search over the whole block so verifies after A, where x₁ = A is always accepted, and not after B, where the target
# draws the token: Pr(A) = 0.5·1 + 0.5·0.7 = 0.85.
APPENDIX_CURVE = ThroughputCurve.from_points({1: 1.0, 2: 0.5, 3: 0.45})


def appendix_target(prefix):
    return {"A": Fraction(7, 10), "B": Fraction(3, 10)}


def appendix_draft(prefix):
    return {"A": Fraction(1, 2), "B": Fraction(1, 2)}


def appendix_confidence(prefix, k):
    """c₁ = 1 − TV(p, q) = 0.8; c₂ by x₁."""
    return 0.8 if k == 0 else {"A": 0.9, "B": 0.1}[prefix[-1]]


def first_token_is_a(policy):
    decide = deciding(policy, APPENDIX_CURVE, 2)
    distribution, lengths = generated(appendix_target, appendix_draft, appendix_confidence, 2, decide, count=1)
    return distribution[("A",)], lengths


def test_appendix_a_retrospective_is_biased_and_rejected():
    probability, lengths = first_token_is_a("retrospective")
    assert probability == Fraction(85, 100)
    assert lengths == {0, 2}
    for count in (1, 2, 3):
        decide = deciding("retrospective", APPENDIX_CURVE, 2)
        distribution, _ = generated(appendix_target, appendix_draft, appendix_confidence, 2, decide, count)
        assert sum(distribution.values()) == 1
        assert not is_lossless(distribution, appendix_target, count)


@pytest.mark.parametrize("policy", ["causal", "walk", "lagged", "auto"])
def test_appendix_a_ours_is_exact(policy):
    assert first_token_is_a(policy)[0] == Fraction(70, 100)
    for count in (1, 2, 3):
        decide = deciding(policy, APPENDIX_CURVE, 2)
        distribution, _ = generated(appendix_target, appendix_draft, appendix_confidence, 2, decide, count)
        assert is_lossless(distribution, appendix_target, count)


def test_appendix_a_lagged_keeps_the_drafts():
    """Exactness is not bought by never drafting: after a good round the whole block is verified, A or B."""
    scheduler = PrefixScheduler("auto")
    assert not is_unimodal(APPENDIX_CURVE, 1, 3)
    for second in (0.9, 0.1):
        assert scheduler.schedule([[0.8, second]], APPENDIX_CURVE, [[0.8, 0.9]]).lengths.tolist() == [2]
        assert scheduler.schedule([[0.8, second]], APPENDIX_CURVE, [[0.8, 0.1]], round_index=1).lengths.tolist() == [0]
    # Given this round's own scores as if they were an earlier round's, lagged is the retrospective scheduler.
    peeking = lambda confidences, past: int(scheduler.schedule(confidences, APPENDIX_CURVE, confidences).lengths[0])  # noqa: E731
    distribution, _ = generated(appendix_target, appendix_draft, appendix_confidence, 2, peeking, count=1)
    assert distribution[("A",)] == Fraction(85, 100)


# --------------------------------------------------------------------------------------------------------------------
# A staircase, blocks of four, distributions that depend on the text
# --------------------------------------------------------------------------------------------------------------------
# Up to three rows cost about the same, and so do four to six: a tile of a kernel. Causal goes to the end of the first
# stair at most; a search over the block jumps to the second stair when the fourth draft looks good, which is a matter
# of x₃: the third token is biased.
STAIRCASE = ThroughputCurve.from_points({1: 1.0, 2: 1 / 1.02, 3: 1 / 1.04, 4: 1 / 1.5, 5: 1 / 1.52, 6: 1 / 1.54})


def context(prefix):
    """What the toy models see of a text: a number from 0 to 4."""
    return sum((i + 1) * (token == "B") for i, token in enumerate(prefix[-3:])) % 5


def staircase_target(prefix):
    p = Fraction((7, 2, 5, 9, 4)[context(prefix)], 10)
    return {"A": p, "B": 1 - p}


def staircase_draft(prefix):
    q = Fraction((4, 3, 8, 5, 5)[context(prefix)], 10)
    return {"A": q, "B": 1 - q}


def staircase_confidence(prefix, k):
    """Lower after B; low enough at position 2 that causal lengths vary too."""
    after_b = bool(prefix) and prefix[-1] == "B"
    return ((0.8, 0.02), (0.9, 0.02), (0.95, 0.3), (0.95, 0.05))[k][after_b]


@pytest.mark.parametrize(
    ("policy", "expected_lengths"),
    [("causal", {0, 1, 2}), ("walk", {0, 1, 2}), ("lagged", {0, 1, 2, 4}), ("auto", {0, 1, 2, 4})],
)
def test_staircase_ours_is_exact(policy, expected_lengths):
    for count in (1, 3, 4):
        decide = deciding(policy, STAIRCASE, 4)
        distribution, lengths = generated(staircase_target, staircase_draft, staircase_confidence, 4, decide, count)
        assert is_lossless(distribution, staircase_target, count)
    assert lengths == expected_lengths


def test_staircase_retrospective_is_biased():
    decide = deciding("retrospective", STAIRCASE, 4)
    distribution, lengths = generated(staircase_target, staircase_draft, staircase_confidence, 4, decide, 4)
    assert sum(distribution.values()) == 1
    assert {2, 4} <= lengths
    assert not is_lossless(distribution, staircase_target, 4)


# --------------------------------------------------------------------------------------------------------------------
# Two requests in one round
# --------------------------------------------------------------------------------------------------------------------
def first_tokens_of_two(decide, block, count):
    """Joint distribution of the first `count` tokens of two requests: a scheduled round, then plain decoding.

    The first request has the text ("A",) behind it, the second one ("B", "A").
    """
    prefixes = (("A",), ("B", "A"))
    result = Counter()
    lengths_seen = set()
    blocks = [draft_blocks(staircase_draft, prefix, block) for prefix in prefixes]
    for choice in itertools.product(*(b.items() for b in blocks)):
        scores = [
            [staircase_confidence((*prefix, *tokens[:k]), k) for k in range(block)]
            for prefix, (tokens, _) in zip(prefixes, choice)
        ]
        lengths = tuple(int(length) for length in decide(np.array(scores)))
        lengths_seen.add(lengths)
        ends = []
        for prefix, (tokens, weight), length in zip(prefixes, choice, lengths):
            ends.append(Counter())
            for new, share in committed(staircase_target, staircase_draft, prefix, tokens, length).items():
                rest = draft_blocks(staircase_target, (*prefix, *new), max(count - len(new), 0))
                for more, chance in rest.items():
                    ends[-1][(*new, *more)[:count]] += weight * share * chance
        for (one, p), (two, q) in itertools.product(ends[0].items(), ends[1].items()):
            result[one, two] += p * q
    expected = {
        (one, two): p * q
        for one, p in draft_blocks(staircase_target, prefixes[0], count).items()
        for two, q in draft_blocks(staircase_target, prefixes[1], count).items()
    }
    return without_zeros(result), without_zeros(expected), lengths_seen


# One draft is nearly free, two to four cost the same; they pay if both requests' second drafts look good.
TWO_REQUESTS_CURVE = ThroughputCurve.from_points({2: 1.0, 3: 1 / 1.02, 4: 1 / 1.82, 6: 1 / 1.83, 7: 1 / 4})


@pytest.mark.parametrize(
    ("policy", "past", "curve", "total"),
    [
        ("causal", None, TWO_REQUESTS_CURVE, 1),
        ("causal", None, ThroughputCurve.from_points({2: 1.0, 8: 1 / 1.6}), None),  # depends on the drafts
        ("lagged", None, TWO_REQUESTS_CURVE, 6),
        ("lagged", np.full((2, 3), 0.95), TWO_REQUESTS_CURVE, 4),
        ("auto", np.full((3, 3), 0.95), TWO_REQUESTS_CURVE, 4),
    ],
)
def test_two_requests_are_exact_and_independent(policy, past, curve, total):
    scheduler = PrefixScheduler(policy)
    result, expected, lengths = first_tokens_of_two(lambda c: scheduler.schedule(c, curve, past).lengths, 3, 3)
    assert result == expected
    totals = {sum(pair) for pair in lengths}
    assert totals == {total} if total is not None else len(totals) > 1
    assert total != 4 or len(lengths) > 1  # the total is fixed, whose drafts they are is not


def test_two_requests_retrospective_is_biased():
    result, expected, lengths = first_tokens_of_two(lambda c: retrospective_lengths(c, TWO_REQUESTS_CURVE), 3, 3)
    assert len(lengths) > 1
    assert sum(result.values()) == 1 and result != expected
