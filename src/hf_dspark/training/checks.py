"""What is checked before the first step: a wrong pair or wrong data would only fail much later, or never."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..errors import DSparkDataError, DSparkTargetError
from ..modeling_dspark import DSparkDraftModel, head_logits
from .objective import input_device, teacher_forward

_CHECKED_TOKENS = 256  # of each
_CHECKED_COLUMNS = 16
_HEAD_TOLERANCE = 0.05  # of the largest logit; bf16 rows of different lengths differ by less


@torch.no_grad()
def head_is_targets(draft: DSparkDraftModel) -> bool:
    """Whether the rows of the draft's own head are the target's, by some of their columns."""
    if draft.lm_head is None:
        return True
    weight = draft.lm_head.weight
    columns = torch.linspace(0, weight.shape[1] - 1, min(_CHECKED_COLUMNS, weight.shape[1])).long()
    units = torch.eye(weight.shape[1], dtype=draft.target.dtype)[columns]
    theirs = head_logits(draft.target, units).to(weight)  # [C, V]: through the module, so that a quantised head answers
    kept = draft.draft_token_ids
    return torch.equal(theirs if kept is None else theirs[:, kept], weight[:, columns.to(weight.device)].T)


@torch.no_grad()
def check_head_map(draft: DSparkDraftModel, target: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Proves that the head map on the captured states gives the target's own logits.

    A state taken before the final norm, or a soft-cap or logit scale that the config lacks, would train the draft
    towards another distribution, and nothing would say so.
    """
    _, states = teacher_forward(target, draft.config.target_layer_ids, input_ids, torch.ones_like(input_ids))
    theirs = target(input_ids.to(input_device(target, input_ids.device)), logits_to_keep=1).logits[:, -1].float()
    ours = draft.scale_and_cap(head_logits(target, states[:, -1])).to(theirs.device).float()
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
    if error > _HEAD_TOLERANCE:
        raise DSparkTargetError(
            f"The head map of {type(target).__name__} is not what the draft's config says: its logits differ by "
            f"{error:.0%} from head(last hidden state) with logit_scale {draft.config.logit_scale} and "
            f"final_logit_softcapping {draft.config.final_logit_softcapping}. Build the draft with "
            "`DSparkDraftModel.for_target(target)`."
        )


@torch.no_grad()
def check_data(target: PreTrainedModel, samples: list[dict[str, torch.Tensor]]) -> None:
    """Refuses text that the target finds less likely than ids drawn at random: another tokenizer's, as a rule."""
    losses = []
    for sample in samples:
        kept = sample["loss_mask"][1:].nonzero().squeeze(-1)[:_CHECKED_TOKENS]
        ids = sample["input_ids"]
        device = input_device(target, torch.device("cpu"))
        # Logits of whole samples would be the peak of a small run's memory.
        logits = target(ids[None].to(device), logits_to_keep=kept.to(device)).logits[0].float().cpu()
        losses.append(cross_entropy(logits, ids[1:][kept]))
    loss, random = torch.stack(losses).mean().item(), math.log(target.config.get_text_config().vocab_size)
    if loss >= random:
        raise DSparkDataError(
            f"Target and data disagree: the target's loss on the supervised text is {loss:.1f}, and {random:.1f} would "
            "be chance. Check that tokenizer and chat template are the target's own; check_data=False trains anyway."
        )
