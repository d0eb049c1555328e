"""Before each round: draft or take a plain step, and how are the lengths decided? (DESIGN §7)

`Pacer` holds the rules of one `generate` call, `RoundTimes` what a draft's rounds were seen to cost, which outlives it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from ..candidate_generator import RoundPlan
from ..modeling_dspark import DSparkDraftModel
from ..scheduling.prefix_scheduler import FLAT_FULL, PrefixScheduler, Schedule
from ..scheduling.throughput import CurveLearner, ThroughputCurve, ThroughputProfile
from .profiling import load_cached_profile

# The pause rule keeps an account in plain steps: every drafted round books the time it saved or lost. It is a CUSUM
# test: whatever came before, a loss of _CREDIT in a row of rounds ends the drafting. The numbers weigh what a useless
# draft costs against what pauses by bad luck cost a useful one (docs/LOG.md).
_CREDIT = 3.0  # the most the account holds
_START = 2.0  # what a call starts with: less, because nothing is known of the draft and the text yet
_PROBE_CREDIT = 0.45  # after a pause: two rounds in vain with a draft that costs a quarter of a step
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 64  # rounds; doubled from pause to pause, the shortest again once it pays
_REFRESH = 64  # drafted rounds after which the plain step is timed again
_TIMED = 3  # plain steps that make a median
_SHORT, _SHORT_MANY = 7, 8  # 2^7 tokens and fewer are one context length; of many requests, 2^8
_NEWEST = 24  # times that are kept of each kind
_PACE = 5  # newest rounds that tell how fast the machine is now
_PAST = 32  # earlier rounds whose confidences the lagged policy sees
_LEARNT_LENGTH = 2  # drafts of each of many requests while their curve is not known: full blocks of all could be dear
_GAINS, _LEAST_GAINS = 256, 8  # newest rounds of a pool size that tell whether drafting pays there; from how many on
_SURE = 2.0  # standard errors from which it does, or does not
_PAYS, _LOSES = 2 * _CREDIT, 2 * _PROBE_CREDIT  # the most that the account holds then
_LENGTHS = 64  # newest lengths of many requests; no more is drafted than one past what one in _RARE of them exceeds
_RARE = 8
_OUTLIER = 2.0  # a round books at most so many times its usual seconds: the machine was busy, not the draft slow

LEARNING = "the curve is being learnt"
NO_CONFIDENCE = "full block (no confidence head)"
PAUSED = "paused"
SINGLE, PACKED, PAGED = "single row", "packed rows", "continuous batching"  # how the target's forwards are made
TIMING = "plain step (timed)"


class RoundTimes:
    """What rounds cost, by wall time at the point where a round waits for the device anyway.

    Kept apart by context length and by number of requests, both in powers of two: a plain step timed at the end of a
    long text, or of a full pool, says little about the beginning of the next one. With several requests, token counts
    are rounded to steps of a tenth, or none would come up twice.

    Machines are fast and slow in turn (clocks, neighbours), and a plain step is timed rarely: one from a fast minute
    would make every drafted round of a slow one look like a loss. So all times are kept at the pace of the first ones,
    and `pace` says how many times slower the newest rounds of any kind were than rounds of their kind usually are.

    Attributes:
        base: the profile measured on this machine beforehand, if there is one (`hf-dspark profile`).
    """

    def __init__(self, base: ThroughputProfile | None = None):
        self._verify: dict[tuple[int, int], CurveLearner] = {}
        self._plain: Counter[tuple[int, int]] = Counter()
        self._draft: dict[int, deque[float]] = {}
        self._paces: deque[float] = deque(maxlen=_PACE)
        self._gains: dict[int, deque[float]] = {}
        self.base = base

    def verify(self, context_tokens: int, requests: int = 1) -> CurveLearner:
        """The target's forwards, with the decisions, by their number of tokens, at about this context length."""
        # The token counts of several requests are many, and each comes up rarely: every time counts at once.
        least = _TIMED if requests == 1 else 1
        return self._verify.setdefault(_bucket(context_tokens, requests), CurveLearner(window=_NEWEST, least=least))

    def add(
        self,
        context_tokens: int,
        tokens: int,
        draft_seconds: float,
        verify_seconds: float,
        drafted: bool,
        requests: int = 1,
    ) -> None:
        """Notes one round."""
        verify = self.verify(context_tokens, requests)
        draft = self._draft.setdefault(requests.bit_length(), deque(maxlen=_NEWEST))
        kind = tokens if requests == 1 else _rounded(tokens)
        # Only where rounds of this very kind were timed: what a profile or a neighbour says may be wrong, not the pace.
        if verify.count(kind) >= _TIMED and (not drafted or len(draft) >= _TIMED):
            usual = verify.medians()[kind] + (statistics.median(draft) if drafted else 0.0)
            self._paces.append((draft_seconds + verify_seconds) / usual)
        verify.add(kind, verify_seconds / self.pace)
        if tokens == requests:
            self._plain[_bucket(context_tokens, requests)] += 1
        if drafted and draft_seconds > 0:
            draft.append(draft_seconds / self.pace)

    @property
    def pace(self) -> float:
        """How many times slower than usual the machine is now."""
        return statistics.median(self._paces) if self._paces else 1.0

    def add_gain(self, gain: float, requests: int) -> None:
        """Notes what a drafted round gained, in plain steps."""
        self._gains.setdefault(requests.bit_length(), deque(maxlen=_GAINS)).append(gain)

    def outlook(self, requests: int) -> float:
        """The mean gain of the newest rounds with about so many requests, in its standard errors; 0: not known yet."""
        gains = self._gains.get(requests.bit_length(), ())
        if len(gains) < _LEAST_GAINS:
            return 0.0
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        return statistics.fmean(gains) / max(error, 1e-9)

    def knows_plain_step(self, context_tokens: int, requests: int = 1) -> bool:
        """Whether forwards on one token per request were timed. A profile does not stand for that: what it was measured
        with may be gone, and then nothing would show that drafting loses."""
        return self._plain[_bucket(context_tokens, requests)] >= _TIMED

    def curve(self, context_tokens: int, requests: int = 1) -> ThroughputCurve | None:
        """The target's curve: the measured one, refined by rounds; without one, what rounds alone tell."""
        base = None if self.base is None else self.base.curve(context_tokens)
        return self.verify(context_tokens, requests).curve(base)

    def draft_seconds(self, requests: int = 1) -> float | None:
        """Median seconds of drafting; before the first rounds those of the profile."""
        times = self._draft.get(requests.bit_length(), ())
        if len(times) >= _TIMED:
            return statistics.median(times)
        known = None if self.base is None else self.base.draft_seconds
        return None if known is None else known[-1]


def _bucket(context_tokens: int, requests: int) -> tuple[int, int]:
    # Many requests have many token counts, so more rounds must share a curve.
    return max((context_tokens - 1).bit_length(), _SHORT if requests == 1 else _SHORT_MANY), requests.bit_length()


def _rounded(tokens: int) -> int:
    """The nearest of 1, 2, …, 10, 11, 12, 13, 15, 16, …: steps of a tenth."""
    return round(1.1 ** round(math.log(tokens, 1.1))) if tokens > 10 else tokens


class Pacer:
    """The rules of one call. With `draft.scheduler = None` every round is a full block.

    * **Length** (paper §3.2): a known curve, charged with the draft's seconds, and the confidences decide.
    * **Never slower**: a round's gain is the plain steps it replaces less the time it took, both measured. When the
      account is empty, drafting pauses, and tries again for two or three rounds after 8, 16, 32, then every 64 steps.
      With many requests, what the newest rounds of as many gained, of earlier calls too, sets where the account begins.
    * **Depth**: many requests are drafted one position past what their newest schedules used.
    * **Timing**: three early rounds are plain steps, to know what they cost, and one in 64 later.

    All of it uses earlier rounds only, so it never depends on which token is drafted. With `draft.throughput` set, all
    seconds come from there instead of the clock, and the same seed gives the same text.

    Args:
        draft, target: the pair; what rounds cost is kept in `draft.round_times`.
        context_tokens: of the prompt; of several, their mean.
        way: how forwards are made, `SINGLE`, `PACKED` or `PAGED`; the same tokens cost different times in each. But for
            `SINGLE`, a round holds many requests, and one schedule decides for all of them after they are drafted.
    """

    def __init__(self, draft: DSparkDraftModel, target: PreTrainedModel, context_tokens: float, way: str = SINGLE):
        self.scheduler: PrefixScheduler | None = PrefixScheduler() if draft.scheduler == "auto" else draft.scheduler
        self.has_confidence = draft.confidence_head is not None
        self.packed = way != SINGLE
        self._context = float(context_tokens)  # grows with the text
        self.frozen: ThroughputCurve | None = None
        self.frozen_draft_seconds = 0.0
        if draft.throughput is not None:
            profile = draft.throughput
            self.frozen = profile.curve(self.context_tokens) if isinstance(profile, ThroughputProfile) else profile
            if isinstance(profile, ThroughputProfile) and profile.draft_seconds is not None:
                self.frozen_draft_seconds = profile.draft_seconds[-1]
            self.frozen_charged = self.frozen.charged(self.frozen_draft_seconds)  # once: it is asked for every round
        elif self.scheduler is not None and way not in draft.round_times:
            # A measured profile is of single rows.
            draft.round_times[way] = RoundTimes(load_cached_profile(target, draft) if way == SINGLE else None)
        self.times: RoundTimes = draft.round_times.get(way) or RoundTimes()
        self.past: deque[list[list[float]]] = deque(maxlen=_PAST)
        self.rounds = 0
        self.credit = _START
        self.most_credit = _CREDIT
        self.pause = _SHORTEST_PAUSE
        self._lengths: deque[int] = deque(maxlen=_LENGTHS)  # scheduled for many requests
        self.resting = 0  # paused rounds still to come
        self.since_plain = 0  # drafted rounds since a plain step was timed
        # Rounds from before the plain step's cost was known: tokens, requests, committed, seconds.
        self._unbooked: list[tuple[int, int, int, float]] = []

    @property
    def context_tokens(self) -> int:
        """Tokens before the coming round, of one request."""
        return round(self._context)

    def set_context(self, tokens: float) -> None:
        """Tokens before the coming round, where requests come and go."""
        self._context = tokens

    # ------------------------------------------------------------------------------------------------------------
    # Before a round
    # ------------------------------------------------------------------------------------------------------------
    def plan(self, limit: int, requests: int = 1) -> RoundPlan:
        """The plan of the next round, of at most `limit` drafts per request."""
        if self.scheduler is None or limit < 1:
            return RoundPlan()
        if self.packed and self.frozen is None and self.rounds % _LEAST_GAINS == 0:
            self._look_out(requests)
        if self.resting > 0:
            return RoundPlan(drafting=False, reason=PAUSED)
        if self._times_a_plain_step(requests):
            return RoundPlan(drafting=False, reason=TIMING)
        curve = self._charged_curve(requests)
        if curve is None:
            return RoundPlan(reason=LEARNING, keep=_LEARNT_LENGTH if self.packed and self.has_confidence else None)
        if curve.is_flat(requests, requests * (1 + limit)):
            return RoundPlan(reason=FLAT_FULL)
        if not self.has_confidence:
            return RoundPlan(reason=NO_CONFIDENCE)
        if self.packed:
            return RoundPlan(curve=curve, depth=self._depth(limit))
        if self.scheduler.is_lagged(curve, 1, limit):
            budget = self.scheduler.budget(list(self.past), curve, 1, limit, round_index=self.rounds)
            return RoundPlan(drafting=budget.rows > 0, reason=budget.reason, keep=budget.rows)
        return RoundPlan(walk=self.scheduler.walk(curve, limit))

    def decider(self, plan: RoundPlan, other_rows: int = 0) -> Callable[[torch.Tensor], Schedule] | None:
        """What decides the lengths of many requests, from their confidences [R, γ]; `None`: all blocks are full.

        Args:
            plan: of the round.
            other_rows: tokens that its forward holds besides.
        """
        if plan.curve is not None:
            return partial(self._schedule, curve=plan.curve, other_rows=other_rows)
        if plan.keep is None:
            return None
        length, reason = plan.keep, plan.reason or ""

        def same_for_all(confidences: torch.Tensor) -> Schedule:
            requests, most = confidences.shape
            return Schedule(torch.full((requests,), min(length, most), dtype=torch.long), reason)

        return same_for_all

    def _schedule(self, confidences: torch.Tensor, curve: ThroughputCurve, other_rows: int) -> Schedule:
        assert self.scheduler is not None  # else no plan has a curve
        schedule = self.scheduler.schedule(
            confidences, curve, list(self.past), round_index=self.rounds, other_rows=other_rows
        )
        self._lengths.extend(schedule.lengths.tolist())
        return schedule

    def _times_a_plain_step(self, requests: int) -> bool:
        if self.frozen is not None:
            return False
        if self.times.knows_plain_step(self.context_tokens, requests):
            return self.since_plain >= _REFRESH
        return self.rounds % 2 == 1

    def _charged_curve(self, requests: int) -> ThroughputCurve | None:
        """Seconds of whole rounds by tokens, once both ends are known."""
        if self.frozen is not None:
            return self.frozen_charged
        draft_seconds = self.times.draft_seconds(requests)
        profiled = self.times.base is not None
        if draft_seconds is None or not (profiled or self.times.knows_plain_step(self.context_tokens, requests)):
            return None
        curve = self.times.curve(self.context_tokens, requests)
        if curve is None or curve.tokens[-1] == requests:
            return None
        return curve.charged(draft_seconds)

    def _depth(self, limit: int) -> int | None:
        """Many requests are drafted before their schedule is known: not as far as lately none of them went."""
        if len(self._lengths) < _RARE:
            return None
        depth = 1 + sorted(self._lengths)[-(len(self._lengths) // _RARE)]
        return depth if depth < limit else None

    def _look_out(self, requests: int) -> None:
        """Many requests are a mixture, like those before them: what drafting gained then is to be expected now."""
        outlook = self.times.outlook(requests)
        self.most_credit = _PAYS if outlook > _SURE else _LOSES if outlook < -_SURE else _CREDIT
        if self.rounds == 0 and outlook > _SURE:
            self.credit = self.most_credit
        elif self.rounds == 0 and outlook < -_SURE:
            self.credit, self.pause = _PROBE_CREDIT, _LONGEST_PAUSE // 2

    # ------------------------------------------------------------------------------------------------------------
    # After a round
    # ------------------------------------------------------------------------------------------------------------
    def record(
        self,
        plan: RoundPlan,
        limit: int,
        tokens: int,
        committed: int,
        draft_seconds: float,
        verify_seconds: float,
        confidences: list[list[float]],
        requests: int = 1,
    ) -> None:
        """Notes a round of at most `limit` drafts per request: `tokens` in the target's forward, `committed` to the
        texts, and the confidences seen of each request."""
        if self.scheduler is None or limit < 1:
            return
        self.rounds += 1
        before = self.context_tokens
        self._context += committed / requests
        depth = limit if plan.depth is None else plan.depth
        # Blocks that were drafted as far as they could be; what was not drafted had no hope.
        drafted = [[*row, *[0.0] * (limit - depth)] for row in confidences if len(row) == depth]
        if drafted:
            self.past.append(drafted)
        if self.frozen is None:
            self.times.add(before, tokens, draft_seconds, verify_seconds, plan.drafting, requests)
            seconds = (draft_seconds + verify_seconds) / self.times.pace
        else:
            seconds = self.frozen.seconds_per_step(tokens) + (self.frozen_draft_seconds if plan.drafting else 0.0)
        if not plan.drafting:
            self.since_plain = 0
            self._rest()
            return
        self.since_plain += 1
        self._unbooked.append((tokens, requests, committed, seconds))
        if self.frozen is None and not self.times.knows_plain_step(self.context_tokens, requests):
            return
        for waiting in self._unbooked:
            self._book(*waiting)
        self._unbooked.clear()
        if self.credit < 0:
            self.resting = self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def _rest(self) -> None:
        if self.resting > 0:
            self.resting -= 1
            if self.resting == 0:
                self.credit = _PROBE_CREDIT

    def _book(self, tokens: int, requests: int, committed: int, seconds: float) -> None:
        if self.frozen is not None:
            curve, draft_seconds = self.frozen, self.frozen_draft_seconds
        else:
            measured = self.times.curve(self.context_tokens, requests)
            if measured is None:  # requests came or went since: nothing to compare with
                return
            curve, draft_seconds = measured, self.times.draft_seconds(requests) or 0.0
        plain = curve.seconds_per_step(requests)
        usual = curve.seconds_per_step(tokens) + draft_seconds
        # Chance evens out over many requests: what is left of it falls with the root, and so does the evidence needed.
        gain = committed / requests - min(seconds, _OUTLIER * usual) / plain
        if math.isfinite(gain):
            if self.packed and self.frozen is None:  # `_look_out` reads them
                self.times.add_gain(gain, requests)
            self.credit = min(self.credit + math.sqrt(requests) * gain, self.most_credit)
        if self.credit >= _START:
            self.pause = _SHORTEST_PAUSE
