"""Accepting and refusing drafts: greedy match, and speculative sampling (Leviathan et al. 2023; paper §2)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..candidate_generator import sample_index


class Verdict(NamedTuple):
    """What a round commits, before any stop inside it: `accepted` drafts, then one token of the target's own.

    `usable` is how many drafts there were before the first one that came from NaN logits; that one and the later ones
    count as not proposed.
    """

    tokens: list[int]
    accepted: int
    usable: int


def residual_weights(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The distribution after a refusal, max(p-q, 0) up to its norm; p itself where that is empty or NaN.

    `p` and `q` are fp32 [V]. It is empty only through rounding (p ≤ q everywhere means p = q, and then no draft is
    refused); it is NaN only where q is, which means that no draft was proposed there.
    """
    residual = (p - q).clamp(min=0)
    return torch.where(residual.sum() > 0, residual, p)


def verify_greedy(rows: torch.Tensor, token_ids: torch.Tensor | None, usable: torch.Tensor | None) -> Verdict:
    """Accepts drafts while they are the arg-max of their row.

    Args:
        rows: [ℓ+1, V], the target's scores: row i is the distribution of the token after draft i.
        token_ids: int64 [ℓ], the drafts; `None` when ℓ = 0.
        usable: bool [ℓ], `False` where the draft came from NaN logits.
    """
    # `max` and `argmax` agree, the first index wins in both; on bf16 rows `argmax` is several times slower on a CPU.
    chosen = rows.max(dim=-1).indices
    if token_ids is None or usable is None:
        return Verdict(chosen.tolist(), 0, 0)
    length = len(token_ids)
    packed = torch.cat([chosen, token_ids, usable.long()]).tolist()  # the round's one transfer to the host
    chosen_ids, drafts, flags = packed[: length + 1], packed[length + 1 : 2 * length + 1], packed[2 * length + 1 :]
    count = _leading(flags)
    accepted = _leading([a == b for a, b in zip(chosen_ids[:count], drafts)])
    return Verdict(chosen_ids[: accepted + 1], accepted, count)


def verify_sampled(
    p: torch.Tensor, token_ids: torch.Tensor | None, q: torch.Tensor | None, usable: torch.Tensor | None
) -> Verdict:
    """Speculative sampling: draft x is accepted iff r < p(x)/q(x); the first refused one is replaced from the residual.

    Args:
        p: fp32 [ℓ+1, V], the target's probabilities after every processor.
        token_ids: int64 [ℓ], the drafts, drawn from q; `None` when ℓ = 0.
        q: fp32 [ℓ, V], the very distributions that the drafts were drawn from.
        usable: bool [ℓ], `False` where the draft came from NaN logits.

    Raises:
        RuntimeError: the target's probabilities are NaN or infinite where a token had to be drawn, as
            `torch.multinomial` does in plain sampling.
    """
    if token_ids is None or q is None or usable is None:
        token = sample_index(p[0])
        packed = torch.stack([token, p[0].sum().isfinite().long()]).tolist()
        _check_finite(packed[1])
        return Verdict(packed[:1], 0, 0)
    length = len(token_ids)
    p_x = p[:length].gather(1, token_ids[:, None])[:, 0]
    q_x = q.gather(1, token_ids[:, None])[:, 0]
    kept = (torch.rand_like(q_x) * q_x < p_x) & usable  # NaN compares as refused
    count = kept.long().cumprod(0).sum()  # stays on the device, as all that follows
    p_n = p.index_select(0, count[None])[0]
    q_n = q.index_select(0, count.clamp(max=length - 1)[None])[0]
    weights = torch.where(count < length, residual_weights(p_n, q_n), p_n)
    token = sample_index(weights)
    state = torch.stack([count, token, weights.sum().isfinite().long()])
    packed = torch.cat([state, token_ids, usable.long()]).tolist()  # the round's one transfer to the host
    _check_finite(packed[2])
    accepted = packed[0]
    drafts, flags = packed[3 : 3 + length], packed[3 + length :]
    return Verdict([*drafts[:accepted], packed[1]], accepted, _leading(flags))


def verify_one(p: torch.Tensor, token_id: int | None, q: torch.Tensor | None) -> tuple[int, bool]:
    """One position of `verify_sampled`, for processors that must see each committed token before the next.

    Args:
        p: fp32 [V].
        token_id: the draft, `None` where nothing was proposed.
        q: fp32 [V], the distribution it was drawn from.

    Returns:
        The token, and whether it is the draft.
    """
    if token_id is not None and q is not None:
        if bool(torch.rand((), device=p.device) * q[token_id] < p[token_id]):
            return token_id, True
        p = residual_weights(p, q)
    _check_finite(bool(p.sum().isfinite()))
    return int(sample_index(p)), False


def _check_finite(finite: bool | int) -> None:
    if not finite:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0 (the target's logits)")


def _leading(flags: list) -> int:
    """How many entries are true before the first false one."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
