"""Whether two greedy texts are the same, and if not, whether a floating-point tie explains it.

A target's forward pass over several rows rounds differently from one over a single row. In bf16 the two best logits
are now and then so close that this decides between them: then the texts part, and neither is wrong. What tells such a
tie from a fault is the gap between the plain run's best logit and the logit of the token that the other run took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

TIE = "tie"
DIFFERENT = "DIFFERENT"
TIE_ULPS = 2.0


@dataclass
class Divergence:
    """Where a draft run's text leaves the plain run's.

    Attributes:
        position: 0-based index among the new tokens.
        plain_token, draft_token: the ids there; `None` where a text has ended.
        top1, top2: the plain run's two highest scores there; `None` where plain had ended.
        chosen: the plain run's score of `draft_token`.
        ulp: the spacing of the target's dtype at `top1`.
        label: `"tie"` or `"DIFFERENT"`.
    """

    position: int
    plain_token: int | None
    draft_token: int | None
    top1: float | None
    top2: float | None
    chosen: float | None
    ulp: float | None
    label: str

    @property
    def gap(self) -> float | None:
        """The plain run's top-2 gap."""
        return None if self.top1 is None or self.top2 is None else self.top1 - self.top2

    def __str__(self) -> str:
        if self.gap is None or self.ulp is None:
            return f"{self.label} at new token {self.position} (one text ends there)"
        return f"{self.label} at new token {self.position} (top-2 gap {self.gap:.3g} = {self.gap / self.ulp:.1f} ulp)"


def ulp(value: float, dtype: torch.dtype) -> float:
    """The spacing between neighbouring numbers of `dtype` at `value`."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(value), info.tiny)))


def first_difference(plain: list[int], other: list[int]) -> int | None:
    """The first index at which two lists of ids differ, the end of the shorter one included; `None`: the same."""
    for i, (a, b) in enumerate(zip(plain, other)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


def label_divergence(scores: torch.Tensor, draft_token: int, dtype: torch.dtype) -> tuple[str, float, float, float]:
    """Judges a divergence by the plain run's scores there.

    Args:
        scores: fp32 [V], the plain run's scores (processed logits) at the position.
        draft_token: the id that the other run took.
        dtype: the target's.

    Returns:
        The label, the two highest scores, and the score of `draft_token`. It is a tie when that score is within
        `TIE_ULPS` spacings of the highest: then so is the second highest.
    """
    top1, top2 = scores.topk(2).values.tolist()
    chosen = scores[draft_token].item()
    return (TIE if top1 - chosen <= TIE_ULPS * ulp(top1, dtype) else DIFFERENT), top1, top2, chosen


def compare_greedy(
    target: Any,
    inputs: dict[str, torch.Tensor],
    plain: list[int],
    other: list[int],
    **kwargs: Any,
) -> Divergence | None:
    """`None` when two greedy texts are the same, else where and how they part.

    The plain run is repeated up to that position with its scores kept: one-row forwards again, so the scores are
    exactly those it chose by.

    Args:
        target: the target, a `PreTrainedModel` that generates.
        inputs: the prompt, as given to `generate`.
        plain, other: new token ids of the plain run and of the run with a draft model.
        kwargs: those of the `generate` call.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    plain_token = plain[position] if position < len(plain) else None
    draft_token = other[position] if position < len(other) else None
    if plain_token is None or draft_token is None:
        return Divergence(position, plain_token, draft_token, None, None, None, None, DIFFERENT)
    kwargs = {**kwargs, "max_new_tokens": position + 1}
    again = target.generate(**inputs, **kwargs, return_dict_in_generate=True, output_scores=True)
    scores = again.scores[position][0].float()
    label, top1, top2, chosen = label_divergence(scores, draft_token, target.dtype)
    return Divergence(position, plain_token, draft_token, top1, top2, chosen, ulp(top1, target.dtype), label)
