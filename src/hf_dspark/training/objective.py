"""The training objective (paper §3.3): anchors, slots, and the fused, chunked loss that never holds [slots × vocab]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, linear
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDraftModel, DSparkDraftOutput, head_logits

_CPU_CHUNK_BYTES = 24 * 2**20  # below glibc's largest threshold for memory that it keeps (32 MiB)
_CPU_PART_BYTES = 3 * 2**20
_DEVICE_CHUNK_BYTES = 256 * 2**20


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
    positions = (rows + anchors[..., None] + steps).flatten()  # of the teacher, in the flattened batch
    # Slots that share a teacher position stand side by side, so that its logits are formed once per chunk.
    index = slots.flatten().nonzero().squeeze(1)
    index = index[positions[index].argsort(stable=True)]  # [S]
    teacher_at = positions[index]
    weight = weights.to(anchors.device).repeat(slots.shape[0] * slots.shape[1])[index]
    scale = weight / denominator

    hidden = output.hidden_states.flatten(0, 2)[index]  # [S, H]
    latents = w2 = None
    if draft.markov_head is not None and output.markov_latents is not None:
        latents, w2 = output.markov_latents.flatten(0, 2)[index], draft.markov_head.markov_w2.weight  # [S, r], [Vd, r]
    own_head = draft.lm_head
    head_weight = None if own_head is None or not own_head.weight.requires_grad else own_head.weight
    loss, ce, l1, agrees = _FusedLoss.apply(
        hidden,
        latents,
        w2,
        head_weight,
        draft,
        teacher_states.reshape(batch * length, -1),
        teacher_at,
        input_ids.flatten()[teacher_at + 1],
        scale,
        (alpha_ce, alpha_tv),
        None if log_total is None else log_total.flatten(),
        None if top is None else top.flatten(),
    )
    overlap = 1.0 - 0.5 * l1
    confidence = torch.zeros((), device=loss.device)
    if output.confidence_logits is not None:
        bce = binary_cross_entropy_with_logits(output.confidence_logits.flatten()[index], overlap, reduction="none")
        confidence = (weight * bce).sum()
        loss = loss + alpha_conf * (scale * bce).sum()
    as_given = index.argsort()  # row-major again
    return ObjectiveOutput(
        loss=loss,
        ce=(weight * ce).sum(),
        l1=(weight * l1).sum(),
        confidence=confidence.detach(),
        weight=weight.sum(),
        overlap=overlap[as_given],
        agrees=agrees[as_given],
        slots=slots,
    )


class _FusedLoss(torch.autograd.Function):
    """Σ coef·(α_ce·CE + α_tv·‖q − p‖₁), some dozens of slots at a time; the gradient is formed in the forward.

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
        coef: torch.Tensor,
        alphas: tuple[float, float],
        log_total: torch.Tensor | None,
        top_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        count, size = len(labels), draft.config.draft_vocab_size
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

        chunk_slots, part_slots = chunk_sizes(size, dtype, hidden.device)
        bias_space = hidden.new_empty(0 if low_w2 is None else min(chunk_slots, count), size, dtype=dtype)
        grad_space = hidden.new_empty(min(chunk_slots, count) if needs_grad else 0, size, dtype=dtype)
        for start in range(0, count, chunk_slots):
            chunk = slice(start, min(start + chunk_slots, count))
            size_of_chunk = chunk.stop - start
            positions, row_of = torch.unique_consecutive(teacher_at[chunk], return_inverse=True)
            states = teacher_states[positions]
            if teacher_head is not None and log_total is not None and top_ids is not None:
                raw = draft.scale_and_cap(linear(states.to(dtype), teacher_head))  # [R, Vd]
                p, total, top = raw.float(), log_total[positions][:, None], top_ids[positions]
                p = p.sub_(total).exp_()
            else:
                raw = draft.scale_and_cap(head_logits(draft.target, states)).to(hidden.device)  # [R, V]
                p, top = _teacher_distribution(raw, kept, part_slots)  # [R, Vd], [R]
            del raw
            outside = None if kept is None else (1.0 - p.sum(dim=-1)).clamp_(min=0.0)  # [R]

            rows = hidden[chunk].to(dtype)
            with torch.enable_grad():
                rows = rows.requires_grad_(needs_grad)
                if own_head is None:
                    base = draft.base_logits(rows)  # [C, Vd]
                else:
                    base = draft.scale_and_cap(linear(rows, own_head.requires_grad_(head_weight is not None)))
            logits, bias = base.detach(), None
            if latents is not None and low_w2 is not None:
                low_latents = latents[chunk].to(dtype)
                bias = torch.mm(low_latents, low_w2.T, out=bias_space[:size_of_chunk])
            label = labels[chunk] if to_draft is None else to_draft[labels[chunk]]
            top = top if to_draft is None else to_draft[top]
            low = grad_space[:size_of_chunk]  # d loss / d logits, without `coef`
            for begin in range(0, size_of_chunk, part_slots):
                part = slice(begin, begin + part_slots)
                values = _slots(
                    logits[part].float(),
                    None if bias is None else bias[part],
                    p[row_of[part]],
                    top[row_of[part]],
                    label[part],
                    alphas,
                    low[part] if needs_grad else None,
                )
                for whole, value in zip((ce, l1, agrees), values):
                    whole[chunk][part] = value
            if outside is not None:
                l1[chunk] += outside[row_of]
            if not needs_grad:
                continue
            weight = coef[chunk][:, None]
            if head_weight is not None and own_head is not None:
                low *= weight  # the head's gradient mixes the slots
                grad_head += torch.autograd.grad(base, own_head, low, retain_graph=True)[0]
                weight = torch.ones_like(weight)
            grad_hidden[chunk] = torch.autograd.grad(base, rows, low)[0].float() * weight
            if low_w2 is not None:
                grad_latents[chunk] = (low @ low_w2).float() * weight
                grad_w2 += low.T @ (low_latents * weight).to(dtype)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(ce, l1, agrees)
        loss = (coef * (alphas[0] * ce + alphas[1] * l1)).sum()
        return loss, ce, l1, agrees

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *unused: Any) -> tuple:
        return (*(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 8)


def chunk_sizes(vocab_size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """How many slots have their logits in memory at a time, and of how many of them each element-wise step is done.

    Many slots make a product with the head efficient, which must read all of its weight each time. On a CPU, what
    follows is done for so few of them at a time that they stay in its cache, and a chunk stays below the size from
    which the C library hands memory back to the system at once and the next chunk pays for fresh pages.
    """
    row = vocab_size * dtype.itemsize
    if device.type != "cpu":
        slots = min(max(_DEVICE_CHUNK_BYTES // row, 32), 1024)
        return slots, slots
    return min(max(_CPU_CHUNK_BYTES // row, 32), 512), min(max(_CPU_PART_BYTES // (4 * vocab_size), 1), 512)


def _teacher_distribution(
    raw: torch.Tensor, kept: torch.Tensor | None, part_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, V] → fp32 probabilities of the draft vocabulary's ids [R, Vd], and the arg-max of all, int64 [R]."""
    p = raw.new_empty(len(raw), raw.shape[1] if kept is None else len(kept), dtype=torch.float32)
    top = torch.empty(len(raw), dtype=torch.long, device=raw.device)
    for begin in range(0, len(raw), part_rows):
        part = slice(begin, begin + part_rows)
        logits = raw[part].float()
        top[part] = logits.max(dim=-1).indices
        probabilities = logits.softmax(dim=-1)
        p[part] = probabilities if kept is None else probabilities[:, kept]
    return p, top


def _slots(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    p: torch.Tensor,
    top: torch.Tensor,
    label: torch.Tensor,
    alphas: tuple[float, float],
    gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, L1 distance inside the draft vocabulary, and whether the arg-max is `top`, of some slots.

    In place wherever it can be: this is memory traffic and nothing else.

    Args:
        logits: fp32 [n, Vd], changed; `bias` [n, Vd] is added to it.
        p: fp32 [n, Vd], the target's probabilities, changed.
        top: int64 [n], draft ids, -1 outside the draft vocabulary.
        label: int64 [n], likewise; one outside has no cross-entropy.
        alphas: α_ce, α_tv.
        gradient: [n, Vd], where d(α_ce·CE + α_tv·L1)/d logits is written.
    """
    if bias is not None:
        logits += bias
    known, label = label >= 0, label.clamp(min=0)[:, None]
    if bias is None:  # in bf16, logits tie
        highest, best = logits.max(dim=-1)
        agrees = best == top
    else:  # sums of two such numbers as good as never do, and an arg-max is the slowest step of all
        highest = logits.amax(dim=-1)
        agrees = (logits.gather(1, top.clamp(min=0)[:, None]).squeeze(1) == highest) & (top >= 0)
    label_logit = logits.gather(1, label).squeeze(1)
    q = torch.softmax(logits, dim=-1)
    ce = (highest - q.amax(dim=-1).log() - label_logit) * known
    difference = torch.sub(q, p, out=p)
    l1 = torch.abs(difference, out=logits).sum(dim=-1)
    if gradient is not None:
        # dCE/dz = q − onehot;  d‖q−p‖₁/dz = q ⊙ (s − ⟨q, s⟩) with s = sign(q − p)
        signed = difference.sign_().mul_(q)
        inner = signed.sum(dim=-1)
        scale = alphas[0] * known  # [n]
        q.mul_((scale - alphas[1] * inner)[:, None]).add_(signed, alpha=alphas[1])
        gradient.copy_(q.scatter_add_(1, label, -scale[:, None]))
    return ce, l1, agrees


def input_device(target: PreTrainedModel, default: torch.device) -> torch.device:
    """Where the target takes its inputs; `default` where its weights are offloaded, and brought in by hooks."""
    return default if target.device.type == "meta" else target.device


def teacher_forward(
    target: PreTrainedModel, layer_ids: list[int], input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One frozen forward of the target: the tapped states and what its head reads.

    Args:
        target: the bound target.
        layer_ids: tapped layers, as in `DSparkConfig.target_layer_ids`.
        input_ids, attention_mask: [B, T].

    Returns:
        Features [B, T, L·Ht] and the normed last hidden state [B, T, Ht], on the device of the latter: a target may be
        spread over several.
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    device = input_device(target, input_ids.device)
    with torch.no_grad():
        states = target(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            output_hidden_states=[*(i + 1 for i in layer_ids), depth],
            logits_to_keep=1,
            use_cache=False,
        ).hidden_states
    last = states[depth]
    return torch.cat([states[i + 1].to(last.device) for i in layer_ids], dim=-1), last
