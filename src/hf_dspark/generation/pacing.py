"""Before each round of one request: draft, take a plain step, and how is the length decided? (DESIGN §7)

`Pacer` holds the rules of one `generate` call, `RoundTimes` what a draft's rounds were seen to cost, which outlives it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from transformers import PreTrainedModel

from ..candidate_generator import RoundPlan
from ..modeling_dspark import DSparkDraftModel
from ..scheduling.prefix_scheduler import FLAT_FULL, PrefixScheduler
from ..scheduling.throughput import CurveLearner, ThroughputCurve, ThroughputProfile
from .profiling import load_cached_profile

# The pause rule keeps an account in plain steps: every drafted round books the time it saved or lost. It is a CUSUM
# test: whatever came before, a loss of _CREDIT in a row of rounds ends the drafting. The numbers weigh what a useless
# draft costs against what pauses by bad luck cost a useful one (docs/LOG.md).
_CREDIT = 4.0  # the most the account holds
_START = 2.5  # what a call starts with: less, because nothing is known of the draft and the text yet
_PROBE_CREDIT = 0.45  # after a pause: two rounds in vain with a draft that costs a quarter of a step
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 64  # rounds; doubled from pause to pause, the shortest again once it pays
_REFRESH = 64  # drafted rounds after which the plain step is timed again
_TIMED = 3  # plain steps that make a median
_SHORT = 7  # 2^7 tokens and fewer are one context length
_NEWEST = 24  # times that are kept of each kind
_PAST = 32  # earlier rounds whose confidences the lagged policy sees
_OUTLIER = 2.0  # a round books at most so many times its usual seconds: the machine was busy, not the draft slow

LEARNING = "full block (the curve is being learnt)"
NO_CONFIDENCE = "full block (no confidence head)"
PAUSED = "paused"
TIMING = "plain step (timed)"


class RoundTimes:
    """What rounds cost, by wall time at the point where a round waits for the device anyway.

    Kept apart by context length, in powers of two: a plain step timed at the end of a long text says little about the
    beginning of the next one. The newest times count, because machines drift.

    Attributes:
        draft: seconds of the newest rounds' drafting.
        base: the profile measured on this machine beforehand, if there is one (`hf-dspark profile`).
    """

    def __init__(self, base: ThroughputProfile | None = None):
        self._verify: dict[int, CurveLearner] = {}
        self.draft: deque[float] = deque(maxlen=_NEWEST)
        self.base = base

    def verify(self, context_tokens: int) -> CurveLearner:
        """The target's forwards, with the decisions, by their number of tokens, at about this context length."""
        bucket = max((context_tokens - 1).bit_length(), _SHORT)
        return self._verify.setdefault(bucket, CurveLearner(window=_NEWEST, least=_TIMED))

    def add(self, context_tokens: int, tokens: int, draft_seconds: float, verify_seconds: float, drafted: bool) -> None:
        """Notes one round."""
        self.verify(context_tokens).add(tokens, verify_seconds)
        if drafted and draft_seconds > 0:
            self.draft.append(draft_seconds)

    def knows_plain_step(self, context_tokens: int) -> bool:
        """Whether forwards on one token were timed. A profile does not stand for that: what it was measured with may be
        gone, and then nothing would show that drafting loses."""
        return self.verify(context_tokens).count(1) >= _TIMED

    def curve(self, context_tokens: int) -> ThroughputCurve | None:
        """The target's curve: the measured one, refined by rounds; without one, what rounds alone tell."""
        base = None if self.base is None else self.base.curve(context_tokens)
        return self.verify(context_tokens).curve(base)

    def draft_seconds(self) -> float | None:
        """Median seconds of drafting; before the first rounds those of the profile."""
        if len(self.draft) >= _TIMED:
            return statistics.median(self.draft)
        known = None if self.base is None else self.base.draft_seconds
        return None if known is None else known[-1]


class Pacer:
    """The rules of one call. With `draft.scheduler = None` every round is a full block.

    * **Length** (paper §3.2): a known curve, charged with the draft's seconds, and the confidences decide.
    * **Never slower**: a round's gain is the plain steps it replaces less the time it took, both measured. When the
      account is empty, drafting pauses, and tries again for two or three rounds after 8, 16, 32, then every 64 steps.
    * **Timing**: three early rounds are plain steps, to know what they cost, and one in 64 later.

    All of it uses earlier rounds only, so it never depends on which token is drafted. With `draft.throughput` set, all
    seconds come from there instead of the clock, and the same seed gives the same text.

    Args:
        draft, target: the pair; `draft.round_times` is made here when it is missing.
        context_tokens: of the prompt.
    """

    def __init__(self, draft: DSparkDraftModel, target: PreTrainedModel, context_tokens: int):
        self.scheduler: PrefixScheduler | None = PrefixScheduler() if draft.scheduler == "auto" else draft.scheduler
        self.has_confidence = draft.confidence_head is not None
        self.context_tokens = context_tokens  # grows with the text
        self.frozen: ThroughputCurve | None = None
        self.frozen_draft_seconds = 0.0
        if draft.throughput is not None:
            profile = draft.throughput
            self.frozen = profile.curve(context_tokens) if isinstance(profile, ThroughputProfile) else profile
            if isinstance(profile, ThroughputProfile) and profile.draft_seconds is not None:
                self.frozen_draft_seconds = profile.draft_seconds[-1]
            self.frozen_charged = self.frozen.charged(self.frozen_draft_seconds)  # once: it is asked for every round
        elif self.scheduler is not None and draft.round_times is None:
            draft.round_times = RoundTimes(load_cached_profile(target, draft))
        self.times: RoundTimes = draft.round_times or RoundTimes()
        self.past: deque[list[list[float]]] = deque(maxlen=_PAST)
        self.rounds = 0
        self.credit = _START
        self.pause = _SHORTEST_PAUSE
        self.resting = 0  # paused rounds still to come
        self.since_plain = 0  # drafted rounds since a plain step was timed
        self._unbooked: list[tuple[int, int, float]] = []  # rounds from before the plain step's cost was known

    # ------------------------------------------------------------------------------------------------------------
    # Before a round
    # ------------------------------------------------------------------------------------------------------------
    def plan(self, limit: int) -> RoundPlan:
        """The plan of the next round, of at most `limit` drafts."""
        if self.scheduler is None or limit < 1:
            return RoundPlan()
        if self.resting > 0:
            return RoundPlan(drafting=False, reason=PAUSED)
        if self._times_a_plain_step():
            return RoundPlan(drafting=False, reason=TIMING)
        curve = self._charged_curve()
        if curve is None:
            return RoundPlan(reason=LEARNING)
        if curve.is_flat(1, 1 + limit):
            return RoundPlan(reason=FLAT_FULL)
        if not self.has_confidence:
            return RoundPlan(reason=NO_CONFIDENCE)
        if self.scheduler.is_lagged(curve, 1, limit):
            budget = self.scheduler.budget(list(self.past), curve, 1, limit, round_index=self.rounds)
            return RoundPlan(drafting=budget.rows > 0, reason=budget.reason, keep=budget.rows)
        return RoundPlan(walk=self.scheduler.walk(curve, limit))

    def _times_a_plain_step(self) -> bool:
        if self.frozen is not None:
            return False
        if self.times.knows_plain_step(self.context_tokens):
            return self.since_plain >= _REFRESH
        return self.rounds % 2 == 1

    def _charged_curve(self) -> ThroughputCurve | None:
        """Seconds of whole rounds by tokens, once both ends are known."""
        if self.frozen is not None:
            return self.frozen_charged
        draft_seconds = self.times.draft_seconds()
        known = self.times.base is not None or self.times.knows_plain_step(self.context_tokens)
        if draft_seconds is None or not known:
            return None
        curve = self.times.curve(self.context_tokens)
        if curve is None or curve.tokens[-1] == 1:
            return None
        return curve.charged(draft_seconds)

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
        confidences: list[float],
    ) -> None:
        """Notes a round of at most `limit` drafts: `tokens` in the target's forward, `committed` to the text, and the
        confidences seen."""
        if self.scheduler is None or limit < 1:
            return
        self.rounds += 1
        before, self.context_tokens = self.context_tokens, self.context_tokens + committed
        if len(confidences) == limit:  # of a block that was drafted as far as it could be
            self.past.append([confidences])
        if self.frozen is None:
            self.times.add(before, tokens, draft_seconds, verify_seconds, plan.drafting)
            seconds = draft_seconds + verify_seconds
        else:
            seconds = self.frozen.seconds_per_step(tokens) + (self.frozen_draft_seconds if plan.drafting else 0.0)
        if not plan.drafting:
            self.since_plain = 0
            self._rest()
            return
        self.since_plain += 1
        self._unbooked.append((tokens, committed, seconds))
        if self.frozen is None and not self.times.knows_plain_step(self.context_tokens):
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

    def _book(self, tokens: int, committed: int, seconds: float) -> None:
        if self.frozen is not None:
            curve, draft_seconds = self.frozen, self.frozen_draft_seconds
        else:
            measured = self.times.curve(self.context_tokens)
            assert measured is not None  # plain steps were timed
            curve, draft_seconds = measured, self.times.draft_seconds() or 0.0
        plain = curve.seconds_per_step(1)
        usual = curve.seconds_per_step(tokens) + draft_seconds
        gain = committed - min(seconds, _OUTLIER * usual) / plain
        if math.isfinite(gain):
            self.credit = min(self.credit + gain, _CREDIT)
        if self.credit >= _START:
            self.pause = _SHORTEST_PAUSE
