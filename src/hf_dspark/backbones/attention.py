"""The attention that all backbones share: block queries over the keys and values of `[context ; block]`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3.modeling_qwen3 import rotate_half

# A tensor, or a list with one per sequence: which of them, `block_attention` asks once.
ContextStates = Any


def apply_rope(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `states` [..., S, heads, hd] by `cos`, `sin` [..., S, hd] (neox pairing, as in Llama and Qwen)."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return states * cos + rotate_half(states) * sin


def block_attention(
    query: torch.Tensor,
    context_key: ContextStates,
    context_value: ContextStates,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    scaling: float,
    context_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of A blocks per sequence over the context before each anchor and over their own block.

    Args:
        query: [B, A, γ, heads, hd].
        context_key, context_value: [B, kv_heads, T, hd], shared by all blocks of a sequence; or, with one block per
            sequence, B of [1, kv_heads, T_b, hd], each as long as it is.
        block_key, block_value: [B, A, γ, kv_heads, hd].
        scaling: factor on the scores.
        context_mask: bool [B, A, T], `True` where the block may look. `None`: one block that sees the whole context.

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
    batch, blocks, block_size, heads, head_dim = query.shape
    if context_mask is None:
        key = torch.cat([context_key, block_key[:, 0].transpose(1, 2)], dim=2)  # [B, kv_heads, T+γ, hd]
        value = torch.cat([context_value, block_value[:, 0].transpose(1, 2)], dim=2)
        out = scaled_dot_product_attention(
            query[:, 0].transpose(1, 2), key, value, scale=scaling, enable_gqa=heads != key.shape[1]
        )  # [B, heads, γ, hd]
        return out.transpose(1, 2).reshape(batch, 1, block_size, heads * head_dim)

    # Many blocks: scores against the context and against the own block are formed apart and share one soft-max, so
    # that no [A·γ, A·γ] matrix of blocks that must not see each other is ever made. The two parts are never joined:
    # slices of a joined matrix would be copied for every product, forwards and backwards.
    kv_heads = context_key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, blocks, block_size, kv_heads, groups, head_dim)
    query = query.permute(0, 3, 4, 1, 2, 5) * scaling  # [B, kv_heads, g, A, γ, hd]
    block_key = block_key.permute(0, 3, 1, 2, 4).unsqueeze(2)  # [B, kv_heads, 1, A, γ, hd]
    block_value = block_value.permute(0, 3, 1, 2, 4).unsqueeze(2)
    rows = query.reshape(batch, kv_heads, -1, head_dim)
    context_scores = (rows @ context_key.transpose(-1, -2)).view(*query.shape[:-1], -1)  # [B, kv_heads, g, A, γ, T]
    context_scores = context_scores.masked_fill(~context_mask[:, None, None, :, None, :], -torch.inf)
    block_scores = query @ block_key.transpose(-1, -2)  # [B, kv_heads, g, A, γ, γ]
    highest = torch.maximum(*(part.detach().amax(dim=-1, keepdim=True) for part in (context_scores, block_scores)))
    context_weights, block_weights = (context_scores - highest).exp(), (block_scores - highest).exp()
    total = sum(part.sum(dim=-1, keepdim=True, dtype=torch.float32) for part in (context_weights, block_weights))
    context_weights = context_weights.to(context_value.dtype).reshape(batch, kv_heads, rows.shape[2], -1)
    out = (context_weights @ context_value).view(*query.shape) + block_weights.to(block_value.dtype) @ block_value
    out = (out / total).to(block_value.dtype)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, blocks, block_size, heads * head_dim)
