"""The rules of `Pacer`, played through with made-up times: no model, no clock."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from hf_dspark import PrefixScheduler, ThroughputCurve
from hf_dspark.generation.pacing import LEARNING, NO_CONFIDENCE, PACKED, PAUSED, SINGLE, TIMING, Pacer, RoundTimes
from hf_dspark.scheduling.throughput import ThroughputProfile

BLOCK = 5
PLAIN = 0.024  # seconds of a plain step, and of a round below: what SmolLM2-135M takes on two cores
ROW, DRAFT = 0.0004, 0.0036


def a_draft(scheduler="auto", throughput=None, confidence_head=None, round_times=None):
    return SimpleNamespace(
        scheduler=scheduler,
        throughput=throughput,
        confidence_head=confidence_head,
        config=SimpleNamespace(num_draft_tokens=BLOCK),
        round_times={way: RoundTimes() if round_times is None else round_times for way in (SINGLE, PACKED)},
    )


def play(pacer, tokens, acceptance, noise=0.0, seed=0, draft_seconds=DRAFT, row=ROW, plain=PLAIN, slowness=None):
    """Plays rounds until `tokens` tokens are there. `acceptance(token, random)` gives the accepted drafts of a round.

    `slowness(seconds)` is how many times slower the machine is after so many seconds.

    Returns the seconds used, the number of tokens, and the reasons of all rounds.
    """
    chance = random.Random(seed)
    done, seconds, reasons = 0, 0.0, []
    while done < tokens:
        plan = pacer.plan(BLOCK)
        accepted = min(acceptance(done, chance), BLOCK) if plan.drafting else 0
        rows = 1 + (BLOCK if plan.drafting else 0)

        def busy(value):
            return value * (1 + noise * chance.random() + (5 * noise if chance.random() < 0.05 else 0))

        spent = busy(draft_seconds) if plan.drafting else 1e-6, busy(plain + row * (rows - 1))
        if slowness is not None:
            spent = tuple(value * slowness(seconds) for value in spent)
        pacer.record(plan, BLOCK, rows, accepted + 1, *spent, [])
        done, seconds = done + accepted + 1, seconds + sum(spent)
        reasons.append(plan.reason or "full block")
    return seconds, done, reasons


def geometric(p):
    """Every draft is accepted with probability p, given that those before it were."""

    def acceptance(done, chance):
        accepted = 0
        while accepted < BLOCK and chance.random() < p:
            accepted += 1
        return accepted

    return acceptance


def never(done, chance):
    return 0


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_useless_draft_costs_three_percent_at_most(noise):
    ratios = []
    for seed in range(20):
        pacer = Pacer(a_draft(), None, 0)
        seconds, done, reasons = play(pacer, 256, never, noise, seed)
        usual = PLAIN * (1 + noise / 2 + 0.05 * 5 * noise)
        ratios.append(seconds / (done * usual))
        assert reasons.count(PAUSED) > 180
    assert sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("phase", [1.0, 4.0, 15.0])
def test_a_machine_whose_speed_swings(phase, noise):
    def slowness(seconds):
        return 1.25 if seconds // phase % 2 else 1.0

    steady = swinging = useless = 0
    for seed in range(10):
        times, lone = RoundTimes(), RoundTimes()
        for text in range(8):  # what rounds cost outlives a text
            seeds = 100 * seed + text
            steady += play(Pacer(a_draft(round_times=lone), None, 0), 250, geometric(0.36), noise, seeds)[2].count(
                PAUSED
            )
            pacer = Pacer(a_draft(round_times=times), None, 0)
            swinging += play(pacer, 250, geometric(0.36), noise, seeds, slowness=slowness)[2].count(PAUSED)
        _, _, reasons = play(Pacer(a_draft(round_times=times), None, 0), 250, never, noise, seed, slowness=slowness)
        useless += reasons.count(PAUSED)
    assert swinging < steady + 0.05 * 10 * 8 * 250
    assert useless > 10 * 180


@pytest.mark.parametrize("p", [0.36, 0.5, 0.7])
def test_a_useful_draft_is_left_alone(p):
    """Over many texts, pauses by bad luck and timed plain steps cost at most 3 % of the speed."""
    paced = full = 0.0
    for seed in range(60):
        seconds, done, _ = play(Pacer(a_draft(), None, 0), 512, geometric(p), 0.05, seed)
        paced += seconds / done
        seconds, done, _ = play(Pacer(a_draft(scheduler=None), None, 0), 512, geometric(p), 0.05, seed)
        full += seconds / done
    assert paced < full / 0.97


def test_text_that_changes():
    """100 tokens that cannot be drafted, 200 that can, 100 that cannot."""

    def acceptance(done, chance):
        return 3 if 100 <= done < 300 else 0

    outside, inside = [], []
    for seed in range(10):
        pacer = Pacer(a_draft(), None, 0)
        parts, before = [], 0
        for end in (100, 200, 100):
            seconds, done, _ = play(pacer, end, lambda d, c, before=before: acceptance(d + before, c), 0.05, seed)
            parts.append((seconds, done))
            before += done
        usual = PLAIN * 1.0375
        outside.append((parts[0][0] + parts[2][0]) / ((parts[0][1] + parts[2][1]) * usual))
        inside.append(parts[1][1] * usual / parts[1][0])
    assert sum(outside) / len(outside) < 1.05
    assert sum(inside) / len(inside) > 1.5


def test_pauses_grow_and_end():
    pacer = Pacer(a_draft(), None, 0)
    _, _, reasons = play(pacer, 400, never)
    runs, length = [], 0
    for reason in [*reasons, "end"]:
        if reason == PAUSED:
            length += 1
        elif length:
            runs, length = [*runs, length], 0
    assert runs[:4] == [8, 16, 32, 64] and max(runs) == 64
    # It goes on at the first probe that pays.
    _, _, reasons = play(pacer, 64 + 200, geometric(0.8))
    assert reasons[70:].count(PAUSED) < 10


def test_the_plain_step_is_timed_while_it_is_unknown_and_again_later():
    pacer = Pacer(a_draft(), None, 0)
    _, _, reasons = play(pacer, 600, geometric(0.7))
    assert [i for i, reason in enumerate(reasons) if reason == TIMING][:3] == [1, 3, 5]
    later = [i for i, reason in enumerate(reasons) if reason == TIMING][3:]  # and three at 129 and at 257 tokens
    assert later and all(b - a <= 66 for a, b in zip([5, *later], later))
    assert reasons[0] == LEARNING


def test_times_outlive_the_call():
    times = RoundTimes()
    play(Pacer(a_draft(round_times=times), None, 0), 50, geometric(0.7))
    _, _, reasons = play(Pacer(a_draft(round_times=times), None, 0), 50, geometric(0.7))
    assert TIMING not in reasons and LEARNING not in reasons


def test_times_of_a_long_context_do_not_mislead_a_short_one():
    """A plain step is dearer in a long text; by that measure even a useless draft would look good in a short one."""
    times = RoundTimes()
    play(Pacer(a_draft(round_times=times), None, 600), 200, never, plain=1.3 * PLAIN)
    seconds, done, _ = play(Pacer(a_draft(round_times=times), None, 0), 256, never)
    assert seconds / (done * PLAIN) < 1.03


def test_a_profile_that_no_longer_holds_does_not_switch_the_pause_rule_off():
    """It says that rows are free; they cost half a step each, and half of the drafts are accepted: a loss."""
    free = ThroughputCurve.from_seconds({1: PLAIN, 6: 1.02 * PLAIN})
    times = RoundTimes(ThroughputProfile({512: free}, {512: (0.0, 0.0)}, draft_seconds=(DRAFT,) * BLOCK))
    _, _, reasons = play(Pacer(a_draft(round_times=times), None, 0), 300, geometric(0.5), row=PLAIN / 2)
    assert reasons.count(PAUSED) > 150


def test_a_slow_draft_is_paused_though_it_is_accepted():
    _, _, reasons = play(Pacer(a_draft(), None, 0), 300, geometric(0.3), draft_seconds=PLAIN)
    assert reasons.count(PAUSED) > 150


def test_lengths_need_confidence_and_a_curve_that_is_not_flat():
    curve = ThroughputCurve.from_seconds({1: 1.0, 6: 2.0})
    assert Pacer(a_draft(throughput=curve), None, 0).plan(BLOCK).reason == NO_CONFIDENCE
    flat = ThroughputCurve.from_seconds({1: 1.0, 6: 1.01})
    assert Pacer(a_draft(throughput=flat, confidence_head=object()), None, 0).plan(BLOCK).reason.startswith("flat")
    plan = Pacer(a_draft(throughput=curve, confidence_head=object()), None, 0).plan(BLOCK)
    assert plan.walk.admit(0.9) and not plan.walk.admit(0.01)


def test_the_draft_is_charged_at_every_length():
    """A draft that costs a second makes one more row cheap beside it: charged, length 5 pays; uncharged, none does."""
    curve = ThroughputCurve.from_seconds({1: 0.1, 6: 0.35})
    profile = ThroughputProfile({128: curve}, {128: (0.0, 0.0)}, draft_seconds=(1.0,) * BLOCK)
    lengths = []
    for throughput in (curve, profile):
        walk = Pacer(a_draft(throughput=throughput, confidence_head=object()), None, 0).plan(BLOCK).walk
        while not walk.finished and walk.admit(0.4):
            pass
        lengths.append(walk.length)
    assert lengths[0] == 0 and lengths[1] >= 2


def test_frozen_times_never_look_at_the_clock():
    curve = ThroughputCurve.from_seconds({1: PLAIN, 6: PLAIN + 5 * ROW})
    runs = []
    for noise in (0.0, 2.0):
        _, _, reasons = play(Pacer(a_draft(throughput=curve), None, 0), 300, lambda d, c: int(d % 9 == 0), noise)
        runs.append(reasons)
    assert runs[0] == runs[1] and TIMING not in runs[0]


def test_lagged_lengths_come_from_earlier_rounds():
    stairs = ThroughputCurve.from_seconds({1: 1.0, 2: 1.8, 3: 1.8, 4: 1.8, 5: 1.8, 6: 1.8})
    pacer = Pacer(a_draft(PrefixScheduler("lagged", probe_every=4), stairs, object()), None, 0)
    assert pacer.plan(BLOCK).keep == BLOCK  # nothing is known yet
    pacer.record(pacer.plan(BLOCK), BLOCK, 6, 6, 0, 0, [[0.9] * BLOCK])
    assert pacer.plan(BLOCK).keep == BLOCK
    for _ in range(40):
        pacer.record(pacer.plan(BLOCK), BLOCK, 6, 6, 0, 0, [[0.1] * BLOCK])
    plans = []
    for _ in range(4):
        plans.append(pacer.plan(BLOCK))
        pacer.record(plans[-1], BLOCK, 1, 1, 0, 0, [])
    assert [plan.drafting for plan in plans].count(True) == 1  # one probe in four, the others are not even drafted


def test_many_requests_need_less_evidence():
    """A useless draft for 16 requests is paused after a round or two; what all texts do is no bad luck."""
    pacer = Pacer(a_draft(), None, 0, way=PACKED)
    reasons = []
    for _ in range(40):
        plan = pacer.plan(BLOCK, 16)
        seconds = (2 * DRAFT, PLAIN + 32 * ROW) if plan.drafting else (1e-6, PLAIN)
        pacer.record(plan, BLOCK, 48 if plan.drafting else 16, 16, *seconds, [], requests=16)
        reasons.append(plan.reason)
    drafted = [reason for reason in reasons if reason not in (PAUSED, TIMING)]
    assert len(drafted) <= 6  # three of them while plain steps were timed
    assert reasons.count(PAUSED) > 30


def test_many_requests_learn_with_short_blocks():
    with_head = Pacer(a_draft(confidence_head=object()), None, 0, way=PACKED)
    plan = with_head.plan(BLOCK, 3)
    assert plan.reason == LEARNING and plan.keep == 2
    lengths, reason = with_head.decider(plan)(torch.rand(3, BLOCK))
    assert lengths.tolist() == [2, 2, 2] and reason == LEARNING
    assert with_head.decider(plan)(torch.rand(3, 1)).lengths.tolist() == [1, 1, 1]
    without = Pacer(a_draft(), None, 0, way=PACKED)
    assert without.plan(BLOCK, 3).keep is None and without.decider(without.plan(BLOCK, 3)) is None


def play_many(pacer, rounds, committed, requests=4):
    """Rounds of `requests` requests in which a drafted one takes 1.4 plain steps; returns the plans."""
    plans = []
    for _ in range(rounds):
        plan = pacer.plan(BLOCK, requests)
        tokens = requests * (3 if plan.drafting else 1)
        seconds = (DRAFT, 1.4 * PLAIN - DRAFT) if plan.drafting else (1e-6, PLAIN)
        count = committed if plan.drafting else requests
        pacer.record(plan, BLOCK, tokens, count, *seconds, [], requests)
        plans.append(plan)
    return plans


def test_what_earlier_calls_gained_is_expected_of_the_next():
    """At first a call knows nothing; later one where drafting never paid tries three rounds, and rests for long."""
    times = RoundTimes()
    for _ in range(3):
        play_many(Pacer(a_draft(round_times=times), None, 0, way=PACKED), 60, committed=5)
    assert times.outlook(4) < -2 and times.outlook(16) == 0
    plans = play_many(Pacer(a_draft(round_times=times), None, 0, way=PACKED), 35, committed=5)
    assert sum(plan.drafting for plan in plans) <= 3

    times = RoundTimes()
    play_many(Pacer(a_draft(round_times=times), None, 0, way=PACKED), 200, committed=7)
    assert times.outlook(4) > 2
    unlucky = Pacer(a_draft(round_times=times), None, 0, way=PACKED)
    assert all(plan.drafting or plan.reason == TIMING for plan in play_many(unlucky, 6, committed=4))
    new = Pacer(a_draft(), None, 0, way=PACKED)
    assert any(plan.reason == PAUSED for plan in play_many(new, 12, committed=4))


def test_frozen_times_ask_no_earlier_calls():
    curve = ThroughputCurve.from_seconds({4: PLAIN, 24: 1.5 * PLAIN})
    times = RoundTimes()
    play_many(Pacer(a_draft(round_times=times), None, 0, way=PACKED), 200, committed=4)
    runs = [
        [plan.drafting for plan in play_many(Pacer(a_draft(None, curve), None, 0, way=PACKED), 20, 5)],
        [
            plan.drafting
            for plan in play_many(Pacer(a_draft("auto", curve, round_times=times), None, 0, way=PACKED), 20, 5)
        ],
        [plan.drafting for plan in play_many(Pacer(a_draft("auto", curve), None, 0, way=PACKED), 20, 5)],
    ]
    assert runs[1] == runs[2] and all(runs[0])


def test_many_requests_are_drafted_one_past_what_they_use():
    """All are drafted before one schedule decides; positions that it never keeps cost time for nothing."""
    curve = ThroughputCurve.from_seconds({4: PLAIN, 24: 3 * PLAIN})
    pacer = Pacer(a_draft(throughput=curve, confidence_head=object()), None, 0, way=PACKED)

    def a_round(confidence):
        plan = pacer.plan(BLOCK, 4)
        shown = torch.full((4, plan.depth or BLOCK), confidence, dtype=torch.float64)
        lengths = pacer.decider(plan)(shown).lengths
        pacer.record(plan, BLOCK, 4 + int(lengths.sum()), 4 + int(lengths.sum()), 0, 0, shown.tolist(), 4)
        return plan.depth, int(lengths.max())

    seen = [a_round(0.7) for _ in range(20)]
    used = seen[-1][1]
    assert seen[0][0] is None and 0 < used < BLOCK - 1
    assert seen[-1][0] == used + 1
    assert all(len(row) == BLOCK for rows in pacer.past for row in rows)
    # Text that is easy all at once: a position more a round, and soon whole blocks again.
    grown = [a_round(1.0)[1] for _ in range(24)]
    assert grown[0] == used + 1 and grown[-1] == BLOCK
    assert pacer.plan(BLOCK, 4).depth is None
