"""The training objective (paper §3.3): anchors, slots, and the fused, chunked loss that never holds [slots × vocab]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, linear
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDraftModel, DSparkDraftOutput, head_logits

CHUNK_SLOTS = 128  # rows of logits alive at a time: large enough for an efficient GEMM, small enough for a CPU's cache


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator) -> torch.Tensor:
    """Anchor positions of one sequence: places a where `loss_mask[a]` and `loss_mask[a+1]` are 1 (DESIGN §8).

    Args:
        loss_mask: [T], 1 where the token is the target's own text.
        num_anchors: how many to draw; all candidates are taken when there are no more than that.
        generator: its state alone decides the draw.

    Returns:
        Ascending int64 [A], A ≤ num_anchors.
    """
    candidates = (loss_mask[:-1].bool() & loss_mask[1:].bool()).nonzero().squeeze(-1)
    if len(candidates) > num_anchors:
        chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
        candidates = candidates[chosen].sort().values
    return candidates


def slot_mask(loss_mask: torch.Tensor, anchors: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Which slots are supervised: slot k of anchor a, while every label up to a+k+1 lies inside and is masked in.

    Args:
        loss_mask: [..., T].
        anchors: int64 [..., A]; a negative value marks an absent anchor.
        num_slots: n, predicting slots per block.

    Returns:
        bool [..., A, n].
    """
    length = loss_mask.shape[-1]
    labels_at = anchors[..., None] + 1 + torch.arange(num_slots, device=anchors.device)  # [..., A, n]
    inside = (labels_at < length) & (anchors[..., None] >= 0)
    index = labels_at.clamp(0, length - 1)
    kept = loss_mask.bool().gather(-1, index.flatten(-2)).view_as(index) & inside
    return kept.cumprod(dim=-1).bool()


def slot_weights(num_slots: int, loss_decay_gamma: float) -> torch.Tensor:
    """w_k = exp(-k / loss_decay_gamma), fp32 [n]: early slots decide whether later ones are reached."""
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32) / loss_decay_gamma)


class ObjectiveOutput(NamedTuple):
    """The loss and what it is made of; sums run over the supervised slots, weighted by w_k.

    Attributes:
        loss: scalar, (α_ce·ce + α_tv·l1 + α_conf·confidence) / denominator; its gradient reaches the draft only.
        ce, l1, confidence: fp32 scalars, detached weighted sums.
        weight: fp32 scalar, Σ w_k over the supervised slots of this batch.
        overlap: fp32 [S], 1 - ½‖p_draft − p_target‖₁ per supervised slot: its acceptance when sampling.
        agrees: bool [S], whether both arg-maxes are the same id: its acceptance when greedy.
        slots: bool [B, A, n], where the S slots are (row-major).
    """

    loss: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    weight: torch.Tensor
    overlap: torch.Tensor
    agrees: torch.Tensor
    slots: torch.Tensor


def dspark_objective(
    draft: DSparkDraftModel,
    output: DSparkDraftOutput,
    teacher_states: torch.Tensor,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    denominator: torch.Tensor | float,
    alpha_ce: float = 0.1,
    alpha_tv: float = 0.9,
    alpha_conf: float = 1.0,
    log_total: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
) -> ObjectiveOutput:
    """L = (α_ce·CE + α_tv·‖p_draft − p_target‖₁ + α_conf·BCE(c, 1 − ½‖·‖₁)) over supervised slots, weighted by w_k.

    Args:
        draft: the model that made `output`; its head map gives draft and teacher logits.
        output: of `draft(...)` for these anchors.
        teacher_states: [B, T, Ht], what the target's head reads (its last hidden state after the final norm).
        input_ids: int64 [B, T].
        anchors: int64 [B, A]; absent ones may hold any valid index, their slots are masked.
        slots: bool [B, A, n], the supervised slots.
        weights: fp32 [n], w_k.
        denominator: Σ w_k over all ranks and accumulation steps.
        alpha_ce, alpha_tv, alpha_conf: the three factors.
        log_total, top: fp32 and int64 [B, T], log Σ exp and arg-max of the teacher's logits over the whole vocabulary,
            where they are known. With them and a reduced draft vocabulary only its ids' logits are formed.
    """
    batch, length = input_ids.shape
    num_slots = slots.shape[-1]
    steps = torch.arange(num_slots, device=anchors.device)
    rows = torch.arange(batch, device=anchors.device)[:, None, None] * length
    teacher_at = (rows + anchors[..., None] + steps)[slots]  # [S], index into the flattened sequence
    labels = input_ids.flatten()[teacher_at + 1]  # [S]
    weight = weights.to(anchors.device).expand(slots.shape)[slots]  # [S]
    scale = weight / denominator

    hidden = output.hidden_states[slots]  # [S, H]
    latents = w2 = None
    if draft.markov_head is not None and output.markov_latents is not None:
        latents, w2 = output.markov_latents[slots], draft.markov_head.markov_w2.weight  # [S, r], [Vd, r]
    own_head = draft.lm_head
    head_weight = None if own_head is None or not own_head.weight.requires_grad else own_head.weight
    # Slots that share a teacher position stand side by side, so that its logits are formed once per chunk.
    order = teacher_at.argsort(stable=True)
    loss, ce, l1, agrees = _FusedLoss.apply(
        hidden,
        latents,
        w2,
        head_weight,
        draft,
        teacher_states.reshape(batch * length, -1),
        teacher_at,
        labels,
        order,
        scale * alpha_ce,
        scale * alpha_tv,
        None if log_total is None else log_total.flatten(),
        None if top is None else top.flatten(),
    )
    overlap = 1.0 - 0.5 * l1
    confidence = torch.zeros((), device=loss.device)
    if output.confidence_logits is not None:
        logits = output.confidence_logits[slots]
        bce = binary_cross_entropy_with_logits(logits, overlap, reduction="none")
        confidence = (weight * bce).sum()
        loss = loss + alpha_conf * (scale * bce).sum()
    return ObjectiveOutput(
        loss=loss,
        ce=(weight * ce).sum(),
        l1=(weight * l1).sum(),
        confidence=confidence.detach(),
        weight=weight.sum(),
        overlap=overlap,
        agrees=agrees,
        slots=slots,
    )


class _FusedLoss(torch.autograd.Function):
    """Σ coef_ce·CE + coef_tv·‖q − p‖₁, a few dozen slots at a time; the gradient is formed in the forward.

    Logits, both soft-maxes, loss and gradient of a chunk live together and are dropped before the next one, so that
    memory does not grow with slots × vocabulary. Gradients go to the hidden states, the latents and W2 (and to the
    draft's own head when it trains); the target's head is a constant.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        latents: torch.Tensor | None,
        w2: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        draft: DSparkDraftModel,
        teacher_states: torch.Tensor,
        teacher_at: torch.Tensor,
        labels: torch.Tensor,
        order: torch.Tensor,
        coef_ce: torch.Tensor,
        coef_tv: torch.Tensor,
        log_total: torch.Tensor | None,
        top_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        count = len(labels)
        ce = torch.zeros(count, device=hidden.device)
        l1 = torch.zeros(count, device=hidden.device)
        agrees = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        grads: list[Any] = [
            None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in (hidden, latents, w2, head_weight)
        ]
        grad_hidden, grad_latents, grad_w2, grad_head = grads
        kept = draft.draft_token_ids  # [Vd] or None
        to_draft = None
        if kept is not None:
            to_draft = torch.full((draft.config.vocab_size,), -1, dtype=torch.long, device=kept.device)
            to_draft[kept] = torch.arange(len(kept), device=kept.device)

        # Cast once: autocast would cast both vocabulary-sized weights again for every chunk.
        device_type = hidden.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else hidden.dtype
        own_head = None if draft.lm_head is None else draft.lm_head.weight.detach().to(dtype)
        low_w2 = None if w2 is None else w2.to(dtype)
        # A frozen head of the draft's own holds the target's rows: it gives the teacher's logits as well.
        teacher_head = own_head if kept is not None and head_weight is None else None

        for start in range(0, count, CHUNK_SLOTS):
            chunk = order[start : start + CHUNK_SLOTS]
            positions, row_of = torch.unique_consecutive(teacher_at[chunk], return_inverse=True)
            states = teacher_states[positions]
            if teacher_head is not None and log_total is not None and top_ids is not None:
                top, total = top_ids[positions], log_total[positions][:, None]
                teacher = draft.scale_and_cap(linear(states.to(dtype), teacher_head)).float()  # [R, Vd]
            else:
                teacher = draft.scale_and_cap(head_logits(draft.target, states)).to(hidden.device).float()  # [R, V]
                top, total = teacher.argmax(dim=-1), teacher.logsumexp(dim=-1, keepdim=True)
                teacher = teacher if kept is None else teacher[:, kept]
            p, outside = (teacher - total).exp_(), None  # [R, Vd]
            if kept is not None:
                outside = (1.0 - p.sum(dim=-1)).clamp_(min=0.0)[row_of]
            p = p[row_of]  # [C, Vd]

            rows = hidden[chunk].to(dtype)
            with torch.enable_grad():
                rows = rows.requires_grad_(needs_grad)
                if own_head is None:
                    base = draft.base_logits(rows)  # [C, Vd]
                else:
                    base = draft.scale_and_cap(linear(rows, own_head.requires_grad_(head_weight is not None)))
            logits = base.detach().float()
            if latents is not None and low_w2 is not None:
                low_latents = latents[chunk].to(dtype)
                logits += linear(low_latents, low_w2)
            agrees[chunk] = _to_target(logits.argmax(dim=-1), kept) == top[row_of]
            label = labels[chunk] if to_draft is None else to_draft[labels[chunk]]
            known = label >= 0  # a label outside the draft vocabulary has no cross-entropy; its mass counts in the l1
            label = label.clamp(min=0)[:, None]
            q = logits.softmax(dim=-1)
            label_logit = logits.gather(1, label).squeeze(1)
            ce[chunk] = (logits.logsumexp(dim=-1) - label_logit) * known
            difference = q - p
            distance = difference.abs().sum(dim=-1)
            l1[chunk] = distance if outside is None else distance + outside
            if not needs_grad:
                continue
            # dCE/dz = q − onehot;  d‖q−p‖₁/dz = q ⊙ (s − ⟨q, s⟩) with s = sign(q − p)
            sign = difference.sign_()
            inner = (q * sign).sum(dim=-1, keepdim=True)
            tv = coef_tv[chunk][:, None]
            weight_ce = (coef_ce[chunk] * known)[:, None]
            grad = sign.sub_(inner).mul_(tv).add_(weight_ce).mul_(q)  # [C, Vd]
            grad.scatter_add_(1, label, -weight_ce)
            low = grad.to(dtype)
            inputs = [rows] if head_weight is None or own_head is None else [rows, own_head]
            through_head = torch.autograd.grad(base, inputs, low)
            grad_hidden[chunk] = through_head[0].float()
            if head_weight is not None:
                grad_head += through_head[1]
            if low_w2 is not None:
                grad_latents[chunk] = (low @ low_w2).float()
                grad_w2 += low.T @ low_latents
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(ce, l1, agrees)
        loss = (coef_ce * ce + coef_tv * l1).sum()
        return loss, ce, l1, agrees

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *unused: Any) -> tuple:
        return (*(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 9)


def _to_target(draft_ids: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return draft_ids if kept is None else kept[draft_ids]


def teacher_forward(
    target: PreTrainedModel, layer_ids: list[int], input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One frozen forward of the target: the tapped states and what its head reads.

    Args:
        target: the bound target.
        layer_ids: tapped layers, as in `DSparkConfig.target_layer_ids`.
        input_ids, attention_mask: [B, T].

    Returns:
        Features [B, T, L·Ht] and the normed last hidden state [B, T, Ht].
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    with torch.no_grad():
        states = target(
            input_ids=input_ids.to(target.device),
            attention_mask=attention_mask.to(target.device),
            output_hidden_states=[*(i + 1 for i in layer_ids), depth],
            logits_to_keep=1,
            use_cache=False,
        ).hidden_states
    return torch.cat([states[i + 1] for i in layer_ids], dim=-1), states[depth]
