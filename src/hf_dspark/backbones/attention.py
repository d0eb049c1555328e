"""The attention that all backbones share: block queries over the keys and values of `[context ; block]`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3.modeling_qwen3 import rotate_half

# A tensor, or a list with one per sequence: which of them, `block_attention` asks once.
ContextStates = Any

_GROUP = 64  # blocks whose scores are formed together: none of them needs more context than the last one sees


def apply_rope(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `states` [..., S, heads, hd] by `cos`, `sin` [..., S, hd] (neox pairing, as in Llama and Qwen)."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return states * cos + rotate_half(states) * sin


class BlockMask(NamedTuple):
    """Which context the blocks of a training batch see, and how the blocks are taken together.

    Attributes:
        visible: bool [B, A, T], `True` where a block may look.
        groups: neighbouring blocks: the first, the one after the last, and how many context tokens any of them sees.
    """

    visible: torch.Tensor
    groups: list[tuple[int, int, int]]

    @classmethod
    def before_anchors(cls, anchor_positions: torch.Tensor, attention_mask: torch.Tensor) -> BlockMask:
        """For blocks that see what is before their anchors, int64 [B, A], and no padding (0 in the mask, [B, T])."""
        index = torch.arange(attention_mask.shape[1], device=anchor_positions.device)
        visible = (index < anchor_positions[:, :, None]) & attention_mask[:, None, :].bool()
        reach = anchor_positions.amax(dim=0).tolist()
        starts = range(0, len(reach), _GROUP)
        return cls(visible, [(i, min(i + _GROUP, len(reach)), max(*reach[i : i + _GROUP], 1)) for i in starts])


def block_attention(
    query: torch.Tensor,
    context_key: ContextStates,
    context_value: ContextStates,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    scaling: float,
    mask: BlockMask | None,
) -> torch.Tensor:
    """Attention of A blocks per sequence over the context before each anchor and over their own block.

    Args:
        query: [B, A, γ, heads, hd].
        context_key, context_value: [B, kv_heads, T, hd], shared by all blocks of a sequence; or, with one block per
            sequence, B of [1, kv_heads, T_b, hd], each as long as it is.
        block_key, block_value: [B, A, γ, kv_heads, hd].
        scaling: factor on the scores.
        mask: what the blocks see. `None`: one block that sees the whole context.

    Returns:
        [B, A, γ, heads * hd].
    """
    if isinstance(context_key, list):
        lone = (slice(i, i + 1) for i in range(len(context_key)))
        return torch.cat(
            [
                block_attention(query[b], key, value, block_key[b], block_value[b], scaling, None)
                for b, key, value in zip(lone, context_key, context_value)
            ]
        )
    batch, _, block_size, heads, head_dim = query.shape
    if mask is None:
        key = torch.cat([context_key, block_key[:, 0].transpose(1, 2)], dim=2)  # [B, kv_heads, T+γ, hd]
        value = torch.cat([context_value, block_value[:, 0].transpose(1, 2)], dim=2)
        out = scaled_dot_product_attention(
            query[:, 0].transpose(1, 2), key, value, scale=scaling, enable_gqa=heads != key.shape[1]
        )  # [B, heads, γ, hd]
        return out.transpose(1, 2).reshape(batch, 1, block_size, heads * head_dim)
    query, context_key, block_key = (t.to(context_value.dtype) for t in (query * scaling, context_key, block_key))
    sizes = [end - start for start, end, _ in mask.groups]
    per_block = (query, block_key, block_value, mask.visible)
    outs = []
    for (_, _, length), parts in zip(mask.groups, zip(*(t.split(sizes, dim=1) for t in per_block))):
        group_query, group_key, group_value, visible = parts
        outs.append(
            _grouped_attention(
                group_query,
                context_key[:, :, :length],
                context_value[:, :, :length],
                group_key,
                group_value,
                visible[:, :, :length],
            )
        )
    return torch.cat(outs, dim=1)


def _grouped_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """`block_attention` of the blocks of one group, on scaled queries.

    Scores against the context and against the own block are formed apart and share one soft-max, so that no [A·γ, A·γ]
    matrix of blocks that must not see each other is ever made. The two parts are never joined: slices of a joined
    matrix would be copied for every product, forwards and backwards.
    """
    batch, blocks, block_size, heads, head_dim = query.shape
    kv_heads = context_key.shape[1]
    query = query.reshape(batch, blocks, block_size, kv_heads, heads // kv_heads, head_dim)
    query = query.permute(0, 3, 4, 1, 2, 5)  # [B, kv_heads, g, A, γ, hd]
    block_key = block_key.permute(0, 3, 1, 2, 4).unsqueeze(2)  # [B, kv_heads, 1, A, γ, hd]
    block_value = block_value.permute(0, 3, 1, 2, 4).unsqueeze(2)
    rows = query.reshape(batch, kv_heads, -1, head_dim)
    # Autocast would copy everything to fp32 for `exp`. The sums are fp32 without it.
    with torch.autocast(query.device.type, enabled=False):
        context_weights = (rows @ context_key.transpose(-1, -2)).view(*query.shape[:-1], -1)
        context_weights.masked_fill_(~visible[:, None, None, :, None, :], -torch.inf)
        block_weights = query @ block_key.transpose(-1, -2)
        parts = (context_weights, block_weights)  # [B, kv_heads, g, A, γ, T] and [..., γ]
        highest = torch.maximum(*(part.detach().amax(dim=-1, keepdim=True) for part in parts))
        for part in parts:
            part.sub_(highest).exp_()
        total = sum(part.sum(dim=-1, keepdim=True, dtype=torch.float32) for part in parts)
        flat = context_weights.view(batch, kv_heads, rows.shape[2], -1)
        out = (flat @ context_value).view(*query.shape) + block_weights @ block_value
        out = (out / total).to(block_value.dtype)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, blocks, block_size, heads * head_dim)
