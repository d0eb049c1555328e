"""`PrefixScheduler`: how many drafts of each request are verified in a round (paper §3.2, Algorithm 1, and §5.2).

Pure and stateless: confidences and a throughput curve go in, lengths come out. Whether position k of a request is
verified never depends on that request's own tokens at positions ≥ k of this round; that is what keeps the sampled
distribution the target's (paper, appendix A), and it holds for every policy here:

* c_k depends on the tokens before position k alone, and so does the survival a_k = c₁·…·c_k;
* a request's later positions never sort before its earlier ones (a falls along a request; ties: lower position first),
  so what is decided about position k has seen, of its own request, c₁ … c_k only;
* the policy and the lagged budget are fixed before the round: by the curve, the shapes and earlier rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from ..errors import DSparkConfigError

if TYPE_CHECKING:
    from .throughput import ThroughputCurve

POLICIES = ("auto", "causal", "lagged")

# Every reason but "lagged budget K".
NO_REQUESTS = "no requests"
NO_DRAFTS = "no drafts"
CAUSAL_STOP = "causal: throughput stops rising"
CAUSAL_FULL = "causal: the full block pays"
CAUSAL_ZERO = "causal: no confidence left"
CAUSAL_CUT = "causal: cut while throughput rises"
FLAT_FULL = "flat curve: the full block is verified"
LAGGED_START = "lagged: no earlier rounds, the full block is verified"
LAGGED_PROBE = "lagged probe"


class Schedule(NamedTuple):
    """What one round verifies.

    Attributes:
        lengths: int64 [R] on the CPU, ℓ of each request, 0 ≤ ℓ ≤ γ; 0 is a plain step.
        reason: what decided it, one of

            * "no requests", "no drafts": R = 0, γ = 0;
            * "causal: throughput stops rising": the next draft would not have raised Θ;
            * "causal: the full block pays", "flat curve: the full block is verified": every draft was admitted;
            * "causal: no confidence left": every draft with a > 0 was admitted, the others have a = 0;
            * "causal: cut while throughput rises": a walk that its caller ended before the end of the block;
            * "lagged budget K": the K drafts of the highest survival (fewer where a = 0);
            * "lagged probe": as above, K would be 0, and it is an n-th round;
            * "lagged: no earlier rounds, the full block is verified".
    """

    lengths: torch.Tensor
    reason: str


class Budget(NamedTuple):
    """What the lagged policy may verify in a round, known before anything of that round is drafted.

    Attributes:
        rows: K, drafts of all requests together, 0 ≤ K ≤ R·γ. With 0 nothing need be drafted.
        reason: a lagged reason of `Schedule`, or "no requests", "no drafts".
    """

    rows: int
    reason: str


def is_unimodal(curve: ThroughputCurve, low: int, high: int, tolerance: float = 0.05) -> bool:
    """Whether Θ = τ*·SPS(B) cannot rise again after it has fallen, for B from `low` to `high` tokens.

    τ* is concave along the sorted order, so τ*/t has one peak wherever the seconds t(B) are convex; this compares t
    with its convex lower envelope and answers `True` where t is nowhere more than `tolerance` above it, relative to it.
    Without a tolerance the noise of any measured curve would be a staircase.
    """
    if high - low < 2:
        return True
    seconds = np.asarray(curve.seconds_per_step(np.arange(low, high + 1)), dtype=np.float64)
    envelope = _convex_envelope(seconds)
    return bool((seconds <= (1 + tolerance) * envelope).all())


class PrefixScheduler:
    """Chooses the scheduled lengths of a round; holds settings, no state.

    Args:
        policy: "causal" is Algorithm 1 with its early stop. "lagged" takes the total number of drafts from earlier
            rounds and ranks with the current scores (paper §5.2). "auto" is lagged where the curve is not unimodal
            (`is_unimodal`) over the rows that the round could have, else causal.
        probe_every: with a lagged budget of 0, every n-th round is drafted all the same, or nothing would ever be
            learnt again.

    Throughout, `curve` is charged with the draft's seconds by the caller (`curve.charged(draft_seconds)`): they are
    paid whatever the length. `other_rows` are tokens that the same forward holds besides (prefill of other requests);
    they count in every B.

    Raises:
        DSparkConfigError: a setting is not allowed.
    """

    def __init__(self, policy: Literal["auto", "causal", "lagged"] = "auto", probe_every: int = 16):
        if policy not in POLICIES:
            raise DSparkConfigError(f"policy is {policy!r}, but must be one of {', '.join(map(repr, POLICIES))}.")
        if isinstance(probe_every, bool) or not isinstance(probe_every, int) or probe_every < 1:
            raise DSparkConfigError(f"probe_every is {probe_every!r}, but must be a number of rounds, 1 or more.")
        self.policy = policy
        self.probe_every = probe_every

    def __repr__(self) -> str:
        return f"PrefixScheduler(policy={self.policy!r}, probe_every={self.probe_every})"

    def schedule(
        self,
        confidences: Any,
        curve: ThroughputCurve,
        past: Any = None,
        *,
        round_index: int | None = None,
        other_rows: int = 0,
    ) -> Schedule:
        """The lengths of one round over all its requests.

        Algorithm 1: all (request, position) pairs with a > 0, by survival, highest first (ties: lower position, then
        lower request), are admitted while Θ = τ*·SPS(B) rises, with B = R + `other_rows` + admitted pairs and
        τ* = R + the sum of admitted survivals (the bonus token of every request counts). It stops at the first pair
        for which Θ ≤ Θ_best. What is admitted of a request is always a prefix.

        Args:
            confidences: [R, γ], c_k in [0, 1] of this round, as a tensor, an array or nested lists. NaN counts as 0.
            curve: the throughput curve, charged with the draft's seconds.
            past: confidences of earlier rounds, for `budget`; the causal policy does not look at it.
            round_index: how many rounds there were before this one; the number of rounds in `past` when not given.
            other_rows: tokens of the same forward that belong to none of these requests.

        Raises:
            DSparkConfigError: a confidence is outside [0, 1], a shape is not [R, γ], or a count is negative.
        """
        survival = _survival(confidences, "confidences")
        requests, block = survival.shape
        if requests == 0 or block == 0:
            return Schedule(torch.zeros(requests, dtype=torch.long), NO_DRAFTS if requests else NO_REQUESTS)
        order, scores = _ranked(survival)
        if self.is_lagged(curve, requests, block, other_rows):
            count, reason = self.budget(past, curve, requests, block, round_index=round_index, other_rows=other_rows)
            count = min(count, len(order))
        else:
            first = requests + other_rows
            tokens = np.arange(first, first + len(order) + 1)
            # From R on, one after the other: the order of additions of the sequential form, so that both stop alike.
            expected = np.cumsum(np.concatenate([[requests], scores]))  # τ*, [pairs + 1]
            theta = expected * curve.steps_per_second(tokens)
            falls = theta[1:] <= theta[:-1]
            count = int(falls.argmax()) if falls.any() else len(order)
            if count < len(order):
                reason = CAUSAL_STOP
            else:
                reason = _full_reason(curve, first, requests * block) if count == requests * block else CAUSAL_ZERO
        lengths = np.bincount(order[:count] % requests, minlength=requests)
        return Schedule(torch.from_numpy(lengths.astype(np.int64, copy=False)), reason)

    def budget(
        self,
        past: Any,
        curve: ThroughputCurve,
        requests: int,
        block: int,
        *,
        round_index: int | None = None,
        other_rows: int = 0,
    ) -> Budget:
        """The lagged policy's K: the number of drafts that would have been best, without an early stop, in `past`.

        K maximises Θ(K) = τ*(K)·SPS(R + `other_rows` + K), the smallest such K. τ*(K) is the mean over the earlier
        rounds of R plus their K highest survivals. A round with R' ≠ R requests counts as a sample of the pool: its
        K·R'/R highest survivals (linear between whole numbers), times R/R': every request twice is twice the τ* at
        twice the K. Without earlier rounds K = R·γ, which is known as early. With K = 0 every `probe_every`-th round
        has K = R.

        The rounds in `past` should be ones that were drafted in full, even if they were not verified in full:
        a position that was never drafted is NaN, counts as hopeless, and can only make the budget smaller. Hence
        draft a probe in full, too.

        Args:
            past: `None`, one [R', γ] array of confidences, or a sequence of such arrays, one a round. NaN counts as 0.
            curve: the throughput curve, charged with the draft's seconds.
            requests: R of the coming round.
            block: γ of the coming round; later positions of `past` are ignored.
            round_index: how many rounds there were before this one; the number of rounds in `past` when not given.
                Give it when `past` is a window, or rounds without drafts are not in it.
            other_rows: as in `schedule`.

        Raises:
            DSparkConfigError: as in `schedule`.
        """
        _check_count("requests", requests)
        _check_count("block", block)
        _check_count("other_rows", other_rows)
        rounds = _rounds(past)
        if round_index is None:
            round_index = len(rounds)
        rounds = [survival for survival in rounds if len(survival)]
        highest = requests * block
        if highest == 0:
            return Budget(0, NO_DRAFTS if requests else NO_REQUESTS)
        if not rounds:
            return Budget(highest, LAGGED_START)
        counts = np.arange(highest + 1)
        gains = np.zeros(highest + 1)
        for survival in rounds:
            sums = np.concatenate([[0.0], np.cumsum(np.sort(survival[:, :block], axis=None)[::-1])])
            share = len(survival) / requests
            gains += np.interp(counts * share, np.arange(len(sums)), sums) / share
        expected = requests + gains / len(rounds)  # τ*, [R·γ + 1]
        best = int(np.argmax(expected * curve.steps_per_second(requests + other_rows + counts)))
        if best == 0 and round_index % self.probe_every == 0:
            return Budget(requests, LAGGED_PROBE)
        return Budget(best, f"lagged budget {best}")

    def walk(
        self,
        curve: ThroughputCurve,
        block: int,
        past: Any = None,
        *,
        round_index: int | None = None,
        other_rows: int = 0,
    ) -> PrefixWalk:
        """`schedule` for one request, a draft at a time: what it would drop need not be drafted.

        The confidence of a position is known before its token is drawn, so a loop that draws x_k only after
        `admit(c_k)` drafts exactly the scheduled length. The arguments are those of `schedule`; `block` is γ.
        """
        _check_count("block", block)
        if block and self.is_lagged(curve, 1, block, other_rows):
            rows, reason = self.budget(past, curve, 1, block, round_index=round_index, other_rows=other_rows)
            return PrefixWalk(curve, block, other_rows, limit=rows, reason=reason)
        return PrefixWalk(curve, block, other_rows)

    def is_lagged(self, curve: ThroughputCurve, requests: int, block: int, other_rows: int = 0) -> bool:
        """Whether a round of `requests` blocks of `block` drafts goes by the lagged policy."""
        _check_count("other_rows", other_rows)
        if self.policy != "auto":
            return self.policy == "lagged"
        first = requests + other_rows
        return not is_unimodal(curve, first, first + requests * block)


class PrefixWalk:
    """The decision of one request in one round, made while it is drafted (see `PrefixScheduler.walk`).

    Attributes:
        length: ℓ so far, the number of admitted drafts.
    """

    def __init__(
        self, curve: ThroughputCurve, block: int, other_rows: int = 0, limit: int | None = None, reason: str = ""
    ):
        self.length = 0
        self._curve = curve
        self._block = block
        self._first = 1 + other_rows
        self._limit = limit  # of the lagged policy
        self._reason = reason
        self._survival = 1.0
        self._expected = 1.0  # τ*
        self._best = 0.0 if limit is not None or block == 0 else float(curve.steps_per_second(self._first))
        self._stopped = False

    @property
    def finished(self) -> bool:
        """Whether no further draft can be admitted; true before the first one when nothing need be drafted."""
        return self._stopped or self.length >= (self._block if self._limit is None else min(self._block, self._limit))

    @property
    def reason(self) -> str:
        """What decided the length so far, as in `Schedule`."""
        if self._reason:
            return self._reason
        if self._block == 0:
            return NO_DRAFTS
        return _full_reason(self._curve, self._first, self._block) if self.length == self._block else CAUSAL_CUT

    def admit(self, confidence: float | torch.Tensor) -> bool:
        """Whether the next position is verified; once `False`, always `False`.

        Args:
            confidence: its c_k in [0, 1]; NaN counts as 0.

        Raises:
            DSparkConfigError: the confidence is outside [0, 1].
        """
        if self.finished:
            return False
        value = float(confidence)
        if value < 0 or value > 1:
            raise DSparkConfigError(_outside("confidence", value))
        self._survival *= value
        if not self._survival > 0:  # NaN too
            self._stopped = True
            self._reason = self._reason or CAUSAL_ZERO
            return False
        if self._limit is None:
            expected = self._expected + self._survival
            theta = expected * float(self._curve.steps_per_second(self._first + self.length + 1))
            if theta <= self._best:
                self._stopped = True
                self._reason = CAUSAL_STOP
                return False
            self._expected, self._best = expected, theta
        self.length += 1
        return True


def _full_reason(curve: ThroughputCurve, first: int, drafts: int) -> str:
    return FLAT_FULL if curve.is_flat(first, first + drafts) else CAUSAL_FULL


def _ranked(survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs with a > 0 of `survival` [R, γ], highest first: indices k·R + r, and their survivals."""
    flat = survival.T.ravel()  # position by position, so that a stable sort breaks ties by position, then request
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    return order, flat[order]


def _survival(confidences: Any, name: str) -> np.ndarray:
    """Survivals [R, γ] float64 of confidences [R, γ]."""
    if isinstance(confidences, torch.Tensor):
        confidences = confidences.detach().to("cpu", torch.float64).numpy()
    try:
        values = np.asarray(confidences, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DSparkConfigError(f"{name} must be numbers of shape [requests, positions]: {error}.") from None
    if values.shape == (0,):  # `[]`: no requests
        values = values.reshape(0, 0)
    if values.ndim != 2:
        raise DSparkConfigError(
            f"{name} has shape {list(values.shape)}, but must be [requests, positions]; one request: [[c_1, c_2, ...]]."
        )
    outside = (values < 0) | (values > 1)
    if outside.any():
        request, position = np.argwhere(outside)[0]
        raise DSparkConfigError(_outside(f"{name}[{request}][{position}]", values[request, position]))
    return np.cumprod(np.where(np.isnan(values), 0.0, values), axis=1)


def _rounds(past: Any) -> list[np.ndarray]:
    """Survivals of every round in `past`: nothing, one array [R', γ], or a sequence of them."""
    if past is None:
        return []
    rounds: Sequence[Any] = [past] if getattr(past, "ndim", 3) == 2 else list(past)
    if len(rounds) and not hasattr(rounds[0], "ndim") and len(rounds[0]) and not hasattr(rounds[0][0], "__len__"):
        rounds = [rounds]  # one round as nested lists
    return [_survival(confidences, f"past[{i}]") for i, confidences in enumerate(rounds)]


def _convex_envelope(values: np.ndarray) -> np.ndarray:
    """The greatest convex sequence [n] that is nowhere above `values` [n]."""
    # Only where the slope grows can the envelope have a corner: few places on a curve drawn through few points.
    corners = np.flatnonzero(np.diff(values, 2) > 1e-13 * values.max()) + 1
    hull: list[int] = []
    for i in [0, *corners.tolist(), len(values) - 1]:
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (i - a) < (values[i] - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    return np.interp(np.arange(len(values)), hull, values[hull])


def _check_count(name: str, value: int) -> None:
    if value < 0:
        raise DSparkConfigError(f"{name} is {value}, but must be 0 or more.")


def _outside(name: str, value: float) -> str:
    return f"{name} is {value}, but a confidence must be in [0, 1]; give probabilities, not logits."
