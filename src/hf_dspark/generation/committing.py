"""`CommittedText`: the text of one sequence, and how a round's rows of logits become more of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..candidate_generator import ROW_WISE_PROCESSORS, DraftBlock
from .outputs import OutputRecorder
from .verification import Verdict, verify_greedy, verify_one, verify_sampled


class CommittedText:
    """One sequence: per committed token, in order, processors, choice or accept/refuse, stopping criteria, streamer.

    Args:
        ids: int64 [1, T], the prompt.
        processors: the call's; they see each committed token once, in order.
        criteria: the call's.
        do_sample: sampling or greedy.
        recorder: keeps the scores and logits that the caller asked for.
        streamer: gets every committed token; `None` for none.

    Attributes:
        ids: int64 [1, T], the text so far.
        finished: whether a criterion has fired.
        max_length: of the criteria, in tokens, the prompt included; `None`: no limit.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        recorder: OutputRecorder,
        streamer: Any = None,
    ):
        self.ids = ids
        self.processors: Any = processors
        self.do_sample = do_sample
        self.recorder = recorder
        self.streamer = streamer
        self.finished = False
        self.row_wise = all(type(processor) in ROW_WISE_PROCESSORS for processor in processors)
        self._start = ids.shape[1]
        self._set_criteria(criteria)

    def limit_to(self, max_length: int) -> None:
        """From now on nothing ends the text but its length."""
        self._set_criteria(StoppingCriteriaList([MaxLengthCriteria(max_length=max_length)]))

    def _set_criteria(self, criteria: StoppingCriteriaList) -> None:
        self.criteria: Any = criteria
        # Length and eos are decided on the host's own copy of the ids; any other criterion sees every prefix.
        self.plain_stops = all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in criteria)
        self.max_length = min(
            (criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)), default=None
        )
        self.eos_ids = {
            token for criterion in criteria if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.tolist()
        }  # fmt: skip

    @property
    def new_tokens(self) -> int:
        """How many tokens were committed."""
        return self.ids.shape[1] - self._start

    @property
    def budget(self) -> int | None:
        """The most drafts that the next round can use: what is left to `max_length`, less the target's own token."""
        return None if self.max_length is None else max(self.max_length - self.ids.shape[1] - 1, 0)

    def commit(self, logits: torch.Tensor, block: DraftBlock | None) -> tuple[int, int, int]:
        """Chooses and commits tokens from the rows `logits` [1, ℓ+1, V], until a refusal, a stop or the last row.

        Returns how many tokens were committed, how many of these are drafts, and how many drafts were proposed.
        """
        if self.row_wise:
            return self._commit_rows(logits[0], block)
        drafts = [] if block is None else block.token_ids[0].tolist()
        proposed = 0 if block is None else int(block.usable.sum())
        q = None if block is None else block.probabilities
        accepted = 0
        for i in range(proposed + 1):
            raw = logits[:, i].to(dtype=torch.float32, device=self.ids.device, copy=True)
            scores = self.processors(self.ids, raw)
            draft = drafts[i] if i < proposed else None
            if self.do_sample:
                p = scores.softmax(dim=-1)[0]
                token, is_draft = verify_one(p, draft, None if q is None or draft is None else q[i])
            else:
                token = int(scores.max(dim=-1).indices)
                is_draft = token == draft
            self.recorder.add_choice(raw, scores)
            accepted += is_draft
            self._append([token])
            self._check_stops(token)
            if self.finished or not is_draft:
                break
        return i + 1, accepted, proposed

    def _commit_rows(self, rows: torch.Tensor, block: DraftBlock | None) -> tuple[int, int, int]:
        """As `commit`, all rows [ℓ+1, V] at once: no processor looks at more than its row."""
        device = self.ids.device
        token_ids = usable = q = None
        if block is not None and block.length > 0:
            token_ids, usable, q = block.token_ids[0], block.usable, block.probabilities
        raw = scores = rows
        if self.processors or self.do_sample or self.recorder.keeps_rows:
            raw = rows.to(dtype=torch.float32, device=device, copy=True)
            scores = self.processors(self.ids, raw)
        verdict: Verdict
        if self.do_sample:
            verdict = verify_sampled(scores.softmax(dim=-1), token_ids, q, usable)
        else:
            verdict = verify_greedy(scores, token_ids, usable)
        if self.plain_stops and not self.recorder.keeps_rows:
            count = self._count_until_stop(verdict.tokens)
            self._append(verdict.tokens[:count])
            return count, min(count, verdict.accepted), verdict.usable
        count = 0
        for i, token in enumerate(verdict.tokens):
            # Copies: a row must not keep its whole round alive.
            self.recorder.add_choice(raw[i : i + 1].clone(), scores[i : i + 1].clone())
            self._append([token])
            self._check_stops(token)
            count += 1
            if self.finished:
                break
        return count, min(count, verdict.accepted), verdict.usable

    def _count_until_stop(self, tokens: list[int]) -> int:
        """How many of `tokens` are committed: up to the first end-of-sequence token or the length limit."""
        room = len(tokens) if self.max_length is None else self.max_length - self.ids.shape[1]
        for i, token in enumerate(tokens):
            if token in self.eos_ids or i + 1 >= room:
                self.finished = token in self.eos_ids or (self.max_length is not None and i + 1 >= room)
                return i + 1
        return len(tokens)

    def _check_stops(self, token: int) -> None:
        if self.plain_stops:
            self.finished = token in self.eos_ids or self.ids.shape[1] >= (self.max_length or self.ids.shape[1] + 1)
        else:
            self.finished = bool(self.criteria(self.ids, self.recorder.scores).all())

    def _append(self, tokens: list[int]) -> None:
        self.ids = torch.cat([self.ids, torch.tensor([tokens], dtype=self.ids.dtype, device=self.ids.device)], dim=1)
        if self.streamer is not None:
            for token in tokens:
                self.streamer.put(torch.tensor([token]))
