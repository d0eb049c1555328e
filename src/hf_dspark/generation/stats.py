"""`GenerationStats`: what one `generate` call with a draft model did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """Counts and times of one call. The lists have one entry per round (one target forward after the prefill).

    Attributes:
        new_tokens: tokens that the call added, the first one (from the prefill) included.
        proposed: drafts that were verified in each round.
        accepted: of these, how many were committed to the text, after any cut by a stop inside the block.
        scheduled: the length ℓ that was decided for each round before drafting it.
        reasons: what decided it: "full block" (with why, where there was a choice), "num_assistant_tokens", "length
            budget", "threshold", a reason of the scheduler's (see `Schedule`), "paused", "plain step (timed)", "NaN
            logits", "exception", "no context", "synced_gpus".
        confidences: the calibrated confidences c_k of each round, of the positions that were looked at, in order;
            empty where nothing depended on them.
        confidence_logits: their logits before calibration, with `draft.record_confidence` set.
        draft_seconds: wall time of drafting, all rounds; no device synchronisation is added for it.
        verify_seconds: wall time of the target's forwards and of the decisions, all rounds, without the prefill.
        calibrated: whether the draft's config has confidence temperatures for this kind of decoding, greedy or
            sampling; `None` without a confidence head.
        paused_rounds: rounds that were plain steps because drafting did not pay.
        context_tokens: how many tokens of the prompt the draft had features for. Less than the prompt when a
            user-made cache already held a part of it.
        failure: the exception that switched drafting off, if any.
    """

    new_tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    calibrated: bool | None = None
    paused_rounds: int = 0
    context_tokens: int = 0
    failure: str | None = None

    def add_round(
        self,
        proposed: int,
        accepted: int,
        scheduled: int,
        reason: str,
        confidences: Sequence[float] = (),
        confidence_logits: Sequence[float] = (),
    ) -> None:
        """Records one round."""
        self.proposed.append(proposed)
        self.accepted.append(accepted)
        self.scheduled.append(scheduled)
        self.reasons.append(reason)
        self.confidences.append(list(confidences))
        self.confidence_logits.append(list(confidence_logits))

    @property
    def rounds(self) -> int:
        """Target forwards after the prefill."""
        return len(self.proposed)

    @property
    def accepted_length(self) -> float:
        """τ = (new tokens - 1) / rounds, the target's own token included; 1 is what plain decoding has."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per proposed draft."""
        return sum(self.accepted) / sum(self.proposed) if any(self.proposed) else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position k: of the rounds that proposed a draft there, the share in which it was committed."""
        shares = []
        for k in range(1, max(self.proposed, default=0) + 1):
            rounds = [accepted for proposed, accepted in zip(self.proposed, self.accepted) if proposed >= k]
            shares.append(sum(accepted >= k for accepted in rounds) / len(rounds))
        return shares

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived values included, in types that JSON knows."""
        return {
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "accepted_length": self.accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "proposed": list(self.proposed),
            "accepted": list(self.accepted),
            "scheduled": list(self.scheduled),
            "reasons": list(self.reasons),
            "confidences": [list(row) for row in self.confidences],
            "confidence_logits": [list(row) for row in self.confidence_logits],
            "calibrated": self.calibrated,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "paused_rounds": self.paused_rounds,
            "context_tokens": self.context_tokens,
            "failure": self.failure,
        }

    def __str__(self) -> str:
        text = (
            f"{self.new_tokens} new tokens in {self.rounds} rounds after the prefill: accepted length "
            f"{self.accepted_length:.2f}, {sum(self.accepted)} of {sum(self.proposed)} drafts accepted"
        )
        if any(self.proposed):
            text += f" (by position: {', '.join(f'{share:.2f}' for share in self.acceptance_by_position)})"
        text += (
            f". Drafting took {self.draft_seconds:.2f} s, verifying {self.verify_seconds:.2f} s. The draft had "
            f"features for {self.context_tokens} prompt tokens."
        )
        if self.paused_rounds:
            text += f" Drafting paused for {self.paused_rounds} rounds, where it did not pay."
        if self.calibrated is False and any(self.confidences):
            text += " The confidences that decided lengths are not calibrated for this mode (hf-dspark calibrate)."
        if self.failure is not None:
            text += f" Drafting was switched off by an exception: {self.failure}."
        return text


@dataclass
class BatchGenerationStats:
    """Counts and times of one call of several rows. The lists have one entry per round.

    Attributes:
        rows: of each row, in the order of the output; rounds in which it was finished already are not in there, and
            the seconds are the call's, in equal shares of each round's active rows.
        tokens: how many tokens were in the target's forward: 1 + ℓ of every active row.
        active: how many rows were active.
        reasons: what decided the lengths of the round; a row's own reasons may differ.
        draft_seconds, verify_seconds: as in `GenerationStats`.
        calibrated, paused_rounds, failure: as in `GenerationStats`.
    """

    rows: list[GenerationStats]
    tokens: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    calibrated: bool | None = None
    paused_rounds: int = 0
    failure: str | None = None

    @property
    def rounds(self) -> int:
        """Target forwards after the prefill."""
        return len(self.tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens that the call added to all rows, each row's first one included."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def accepted_length(self) -> float:
        """New tokens per row and round, the target's own token included; 1 is what plain decoding has."""
        taken = sum(row.rounds for row in self.rows)
        return (self.new_tokens - len(self.rows)) / taken if taken else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per proposed draft."""
        proposed = sum(sum(row.proposed) for row in self.rows)
        return sum(sum(row.accepted) for row in self.rows) / proposed if proposed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived values included, in types that JSON knows."""
        return {
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "accepted_length": self.accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens": list(self.tokens),
            "active": list(self.active),
            "reasons": list(self.reasons),
            "calibrated": self.calibrated,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "paused_rounds": self.paused_rounds,
            "failure": self.failure,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        rounds = max(self.rounds, 1)
        text = (
            f"{self.new_tokens} new tokens for {len(self.rows)} rows in {self.rounds} rounds after the prefill: "
            f"accepted length {self.accepted_length:.2f} per row, {sum(self.tokens) / rounds:.1f} tokens in a forward "
            f"of {sum(self.active) / rounds:.1f} rows; {self.draft_seconds:.2f} s drafting, "
            f"{self.verify_seconds:.2f} s verifying"
        )
        if self.paused_rounds:
            text += f"; {self.paused_rounds} rounds paused because drafting did not pay"
        if self.failure is not None:
            text += f"; drafting ended early: {self.failure}"
        return f"{text}."
