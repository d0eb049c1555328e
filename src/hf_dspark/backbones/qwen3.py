"""The default backbone: Qwen3 decoder layers (per-head q/k norm, SwiGLU), used for any dense decoder-only target."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from ..configuration_dspark import DSparkConfig
from .attention import BlockMask, ContextStates, apply_rope, block_attention

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos, sin [..., S, hd]
KeysValues = tuple[ContextStates, ContextStates]  # each [B, kv_heads, T, hd], or a list with one per sequence


class Qwen3DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        heads, kv_heads, bias = config.num_attention_heads, config.num_draft_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states: torch.Tensor, rope: RopeTables) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` [..., S, H] → keys (normed, rotated) and values, each [..., S, kv_heads, hd]."""
        heads_shape = (*states.shape[:-1], -1, self.head_dim)
        key = apply_rope(self.k_norm(self.k_proj(states).view(heads_shape)), *rope)
        return key, self.v_proj(states).view(heads_shape)

    def context_keys_values(self, ctx: torch.Tensor, rope: RopeTables) -> KeysValues:
        """Keys and values of the context features `ctx` [B, T, H], each [B, kv_heads, T, hd]."""
        key, value = self.keys_values(ctx, rope)
        return key.transpose(1, 2), value.transpose(1, 2)

    def forward(
        self,
        states: torch.Tensor,
        rope: RopeTables,
        context: torch.Tensor | KeysValues,
        context_rope: RopeTables | None,
        mask: BlockMask | None,
    ) -> torch.Tensor:
        """`states` [B, A, γ, H] → [B, A, γ, H]; the other arguments are those of `Qwen3DraftLayer`."""
        if isinstance(context, torch.Tensor):
            assert context_rope is not None
            context = self.context_keys_values(context, context_rope)
        query = self.q_norm(self.q_proj(states).view(*states.shape[:-1], -1, self.head_dim))
        query = apply_rope(query, *rope)  # [B, A, γ, heads, hd]
        key, value = self.keys_values(states, rope)
        out = block_attention(query, *context, key, value, self.scaling, mask)
        return self.o_proj(out)


class Qwen3DraftLayer(GradientCheckpointingLayer):
    """A pre-norm decoder layer. `ctx` enters its attention as keys and values only, and is not input-layernormed."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.self_attn = Qwen3DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        rope: RopeTables,
        context: torch.Tensor | KeysValues,
        context_rope: RopeTables | None = None,
        mask: BlockMask | None = None,
    ) -> torch.Tensor:
        """One layer on A blocks per sequence.

        Args:
            states: [B, A, γ, H].
            rope: of the block slots, each [B, A, γ, hd].
            context: kept keys and values; or, in training, ctx [B, T, H] itself. Then keys and values are formed in
                here, where FSDP has gathered the projections and where checkpointing forms them again.
            context_rope: of ctx, each [B, T, hd].
            mask: see `block_attention`.

        Returns:
            [B, A, γ, H].
        """
        attention = self.self_attn(self.input_layernorm(states), rope, context, context_rope, mask)
        states = states + attention
        return states + self.mlp(self.post_attention_layernorm(states))
