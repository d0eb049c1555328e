"""Real draft models whose sequential step is scripted: they propose a known continuation, rightly or wrongly.

Everything else of the draft (features, context, backbone, head) runs as it is, so the loop cannot tell the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tiny_models import tiny_draft
from transformers import PreTrainedModel

from hf_dspark import DSparkDraftModel

_SURE = 50.0  # logit of the scripted id; the others have 0, an id to avoid has -1


class Script:
    """Proposes `continuation[i + 1 + k]` as draft k of the round whose anchor is new token i.

    Args:
        draft: the draft model to script.
        continuation: the new tokens of plain `generate`.
        is_wrong: says of a position in the continuation whether a wrong id is proposed there.
        disturb: called with (round, k, logits) before draft k is drawn; it may raise, or return other logits.
    """

    def __init__(
        self,
        draft: DSparkDraftModel,
        continuation: list[int],
        is_wrong: Callable[[int], bool] = lambda position: False,
        disturb: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda round_, k, logits: logits,
    ):
        self.continuation, self.is_wrong, self.disturb = continuation, is_wrong, disturb
        self.round, self.first_anchor = -1, None
        self._start_block = draft.start_block
        draft.start_block, draft.sequential_step = self.start_block, self.sequential_step

    def start_block(self, cache, anchor_ids, anchor_positions):
        position = int(anchor_positions)
        if self.first_anchor is None:
            self.first_anchor = position
        self.anchor, self.round, self.k = position - self.first_anchor, self.round + 1, 0
        # The text so far is plain `generate`'s, whatever was proposed before.
        assert int(anchor_ids) == self.continuation[self.anchor]
        return self._start_block(cache, anchor_ids, anchor_positions)

    def sequential_step(self, base_logits, hidden, previous_ids, state):
        position = self.anchor + 1 + self.k
        right = self.continuation[position] if position < len(self.continuation) else 0
        logits = torch.zeros_like(base_logits)
        if self.is_wrong(position):
            logits[:, (right + 1) % logits.shape[-1]] = _SURE
            logits[:, right] = -1.0
        else:
            logits[:, right] = _SURE
        logits = self.disturb(self.round, self.k, logits)
        self.k += 1
        embedding = torch.zeros(1, 8)
        return logits, embedding, None


def _corrupted(probability: float) -> Callable[[int], bool]:
    # Positions 1 and 2 are fixed, so that every corrupted run has an acceptance and a refusal.
    return lambda position: position == 2 or (position != 1 and random.Random(position).random() < probability)


DRAFT_KINDS = ("random", "oracle", "wrong", "corrupted10", "corrupted50")


def scripted_draft(target: PreTrainedModel, kind: str, continuation: list[int], **changes) -> DSparkDraftModel:
    """A draft for `target` of one of `DRAFT_KINDS`."""
    draft = tiny_draft(target, **changes)
    if kind == "oracle":
        Script(draft, continuation)
    elif kind == "wrong":
        Script(draft, continuation, lambda position: True)
    elif kind == "corrupted10":
        Script(draft, continuation, _corrupted(0.1))
    elif kind == "corrupted50":
        Script(draft, continuation, _corrupted(0.5))
    else:
        assert kind == "random"
    return draft


def assert_drafted(draft: DSparkDraftModel, kind: str) -> None:
    """That the last call proposed, and that what was accepted and refused is what the kind of draft implies.

    A run that proposes nothing is lossless too, so no test of losslessness may do without this.
    """
    stats = draft.last_stats
    proposed, accepted = sum(stats.proposed), sum(stats.accepted)
    assert stats.failure is None
    assert proposed > 0, stats
    if kind == "oracle":
        assert accepted == proposed or (stats.accepted[:-1] == stats.proposed[:-1] and accepted > 0), stats
    elif kind == "wrong":
        assert accepted == 0, stats
    elif kind.startswith("corrupted"):
        assert 0 < accepted < proposed, stats


class BatchScript:
    """As `Script`, for the rows of a batch: `continuations[r]` are the new tokens of row r in plain `generate`."""

    def __init__(self, draft: DSparkDraftModel, continuations: list[list[int]], is_wrong: Callable[[int, int], bool]):
        self.continuations, self.is_wrong = continuations, is_wrong
        self.first_anchor: dict[int, int] = {}
        self._start_block = draft.start_block
        draft.start_block, draft.sequential_step = self.start_block, self.sequential_step

    def start_block(self, cache, anchor_ids, anchor_positions):
        self.rows, self.k = cache.rows, 0
        self.anchors = []
        for row, anchor, position in zip(cache.rows, anchor_ids.tolist(), anchor_positions.tolist()):
            at = position - self.first_anchor.setdefault(row, position)
            assert anchor == self.continuations[row][at]  # the text so far is plain `generate`'s
            self.anchors.append(at)
        return self._start_block(cache, anchor_ids, anchor_positions)

    def sequential_step(self, base_logits, hidden, previous_ids, state):
        logits = torch.zeros_like(base_logits)
        for i, (row, at) in enumerate(zip(self.rows, self.anchors)):
            position = at + 1 + self.k
            known = self.continuations[row]
            right = known[position] if position < len(known) else 0
            wrong = self.is_wrong(row, position)
            logits[i, (right + wrong) % logits.shape[-1]] = _SURE
            if wrong:
                logits[i, right] = -1.0
        self.k += 1
        return logits, torch.zeros(len(base_logits), 8), None
