"""`BatchCandidateGenerator`: drafts the blocks of many rows in one packed pass, cut by one global schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..candidate_generator import PURE_PROCESSORS, ROW_WISE_PROCESSORS, DraftBlock, DSparkCandidateGenerator
from ..modeling_dspark import DSparkDraftModel
from ..scheduling.prefix_scheduler import Schedule
from .packed import PackedCache


class RowRequest(NamedTuple):
    """A row that wants drafts.

    Attributes:
        row: its id.
        ids: int64 [1, T], its text; the last token is the anchor.
        position: of the anchor, absolute.
        budget: the most drafts that are of use; `None`: no limit.
    """

    row: int
    ids: torch.Tensor
    position: int
    budget: int | None


class BatchCandidateGenerator(DSparkCandidateGenerator):
    """The draft's state for a call of many rows. Linear layers see γ tokens per row and nothing else.

    After an exception in the draft it proposes nothing more for any row and keeps the reason in `failure`.

    Args:
        draft: a draft model with a bound target (or with tables of its own).
        generation_config: the call's, as `DSparkCandidateGenerator` reads it.
        processors: each row's own; the pure ones are used for drafting.
    """

    def __init__(
        self, draft: DSparkDraftModel, generation_config: GenerationConfig, processors: Sequence[LogitsProcessorList]
    ):
        super().__init__(draft, generation_config, processors[0])
        self.row_processors: list[Any] = [
            LogitsProcessorList(p for p in row if type(p) in PURE_PROCESSORS) for row in processors
        ]
        self.row_wise = all(type(processor) in ROW_WISE_PROCESSORS for processor in self.processors)
        self.row_context_tokens = [0] * len(processors)
        self._contexts = PackedCache(len(processors))
        self._waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def observe_row(self, row: int, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Notes verified tokens of one row: features [T, L·Ht] and absolute positions int64 [T]."""
        if self.failure is None and len(features):
            self._waiting.setdefault(row, []).append((features, positions))
            self.row_context_tokens[row] += len(features)

    def forget_row(self, row: int) -> None:
        """The row is finished, and may become another's."""
        self._waiting.pop(row, None)
        self._contexts.free(row)
        self.row_context_tokens[row] = 0

    def add_row(self) -> int:
        """One more row, of the first one's processors; returns its id."""
        self.row_processors.append(self.row_processors[0])
        self.row_context_tokens.append(0)
        return self._contexts.add_row()

    def copy_row(self, source: int, target: int) -> None:
        """Gives row `target`, which is empty, the context of row `source`."""
        if source in self._waiting:
            self._waiting[target] = list(self._waiting[source])
        self._contexts.copy(source, target)
        self.row_context_tokens[target] = self.row_context_tokens[source]

    def propose_rows(
        self,
        requests: Sequence[RowRequest],
        reason: str,
        decide: Callable[[torch.Tensor], Schedule] | None,
        depth: int | None = None,
    ) -> list[DraftBlock]:
        """Drafts a block for every request, in their order.

        Args:
            requests: the active rows.
            reason: what decides the lengths where nothing else cuts them.
            decide: the global schedule: from confidences float64 [R, γ] of all requests, 0 where a row can have no
                draft, to their lengths. `None`: full blocks.
            depth: the most drafts that are made for a request; `None`: as many as it can have.
        """
        blocks = [self.empty_block(request.ids, "no context") for request in requests]
        limits: dict[int, int] = {}  # by place in `requests`
        for i, request in enumerate(requests):
            limit = self.limit if request.budget is None else min(self.limit, request.budget)
            if self.failure is not None:
                blocks[i] = self.empty_block(request.ids, "exception")
            elif limit == 0:
                blocks[i] = self.empty_block(request.ids, "length budget")
            elif self.row_context_tokens[request.row]:
                limits[i] = limit
        if not limits:
            return blocks
        drafting = [requests[i] for i in limits]
        longest = max(limits.values())
        depth = longest if depth is None else min(depth, longest)
        tokens: list[torch.Tensor] = []  # int64 [D] each
        rows: list[torch.Tensor] = []  # q [D, V], or the top logits [D] when greedy
        seen: list[torch.Tensor] = []  # confidence logits [D]
        try:
            self._draft(drafting, depth, tokens, rows, seen, decide is not None)
        except Exception as error:  # what was drafted before it stays
            self._fail(error)
            self._waiting.clear()
        lengths = torch.tensor([min(limit, len(tokens)) for limit in limits.values()])
        reasons = [
            "exception" if len(tokens) < min(limit, depth) else self._reason(limit, reason) for limit in limits.values()
        ]
        logits = torch.stack(seen, dim=1).to("cpu", torch.float64) if seen else None  # [D, depth]
        confidences = None if logits is None else self._calibrated(logits)
        if confidences is not None and self.threshold is not None:
            above = (confidences >= self.threshold).long().cumprod(dim=1).sum(dim=1)  # NaN is not above
            reasons = ["threshold" if a < n else why for a, n, why in zip(above, lengths, reasons)]
            lengths = torch.minimum(lengths, above)
        if confidences is not None and decide is not None:
            # Nothing is scheduled beyond what a row can have; the limits were known before anything was drafted.
            shown = torch.zeros((len(requests), depth), dtype=torch.float64)
            usable = torch.arange(depth) < lengths[:, None]
            shown[list(limits), : confidences.shape[1]] = confidences.where(usable[:, : confidences.shape[1]], 0.0)
            schedule = decide(shown)
            chosen = schedule.lengths[list(limits)]
            reasons = [
                schedule.reason if a < n or why == reason else why for a, n, why in zip(chosen, lengths, reasons)
            ]
            lengths = torch.minimum(lengths, chosen)
        if tokens:
            drafts = torch.stack(tokens, dim=1)  # [D, depth]
            marks = torch.stack([row.reshape(len(drafting), -1).sum(dim=1) for row in rows], dim=1)
            usable = marks.isnan().cumsum(dim=1) == 0
        for d, (i, limit) in enumerate(limits.items()):
            length = int(lengths[d])
            ids = requests[i].ids
            scheduled = min(limit, depth) if reasons[d] == "exception" else length
            block = self.empty_block(ids, reasons[d], scheduled)
            if logits is not None and confidences is not None:
                block = block._replace(
                    confidences=tuple(confidences[d].tolist()), confidence_logits=tuple(logits[d].tolist())
                )
            if length:
                block = block._replace(
                    token_ids=drafts[d : d + 1, :length].to(ids.device),
                    probabilities=torch.stack([row[d] for row in rows[:length]]).to(ids.device)
                    if self.do_sample
                    else None,
                    usable=usable[d, :length].to(ids.device),
                )
            blocks[i] = block
        return blocks

    def _draft(
        self,
        requests: list[RowRequest],
        depth: int,
        tokens: list[torch.Tensor],
        rows: list[torch.Tensor],
        seen: list[torch.Tensor],
        scheduled: bool,
    ) -> None:
        """One packed pass and the sequential stage of all rows, a position at a time; fills the lists."""
        draft = self.draft
        self._extend_contexts([request.row for request in requests])
        anchors = torch.cat([request.ids[:, -1] for request in requests]).to(draft.device)  # [D]
        positions = torch.tensor([request.position for request in requests])
        view = self._contexts.view([request.row for request in requests])
        hidden, state = draft.start_block(view, anchors, positions)
        base_logits = draft.base_logits(hidden[:, :depth])  # [D, depth, Vd]
        prefixes = [request.ids for request in requests]
        previous = anchors
        embeddings: list[torch.Tensor] = []  # [D, r] each; none without a Markov head
        for k in range(depth):
            logits, embedding, state = draft.sequential_step(base_logits[:, k], hidden[:, k], previous, state)
            if embedding is not None:
                embeddings.append(embedding)
            if self.row_wise:
                token, row = self._choose(logits, anchors[:, None])
            else:
                token, row = self._choose_by_row(logits, requests, prefixes)
                prefixes = [torch.cat([p, t.to(p.device)[None, None]], dim=1) for p, t in zip(prefixes, token)]
            tokens.append(token)
            rows.append(row)
            previous = token.to(previous.device)
        if draft.confidence_head is not None and (scheduled or draft.record_confidence or self.threshold is not None):
            shown = torch.stack(embeddings, dim=1) if embeddings else None  # [D, depth, r]
            seen += draft.confidence_head(hidden[:, :depth], shown).unbind(1)

    def _choose_by_row(
        self, logits: torch.Tensor, requests: list[RowRequest], prefixes: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_choose` where processors read each row's own text."""
        chosen = []
        for d, (request, prefix) in enumerate(zip(requests, prefixes)):
            self.processors = self.row_processors[request.row]
            chosen.append(self._choose(logits[d : d + 1], prefix))
        return torch.cat([token for token, _ in chosen]), torch.cat([row for _, row in chosen])

    def _extend_contexts(self, rows: list[int]) -> None:
        waiting = [row for row in rows if row in self._waiting]
        if not waiting:
            return
        parts = [part for row in waiting for part in self._waiting[row]]
        counts = [sum(len(features) for features, _ in self._waiting[row]) for row in waiting]
        features = torch.cat([features for features, _ in parts])  # [N, L·Ht]
        positions = torch.cat([positions for _, positions in parts])
        self._contexts.begin(waiting, counts)
        self.draft.extend_context(self._contexts, features[None], positions[None])
        self._contexts.end()
        for row in waiting:
            del self._waiting[row]

    def _reason(self, limit: int, reason: str) -> str:
        if limit < self.limit:
            return "length budget"
        return reason if limit == self.draft.config.num_draft_tokens else "num_assistant_tokens"

    def _calibrated(self, logits: torch.Tensor) -> torch.Tensor:
        """Confidence logits [D, depth] → c_k."""
        if self.temperatures is not None:
            logits = logits / torch.tensor(self.temperatures[: logits.shape[1]], dtype=logits.dtype)
        if self.shifts is not None:
            logits = logits + torch.tensor(self.shifts[: logits.shape[1]], dtype=logits.dtype)
        return logits.sigmoid()
