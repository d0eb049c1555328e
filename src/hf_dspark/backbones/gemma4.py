"""The Gemma4 backbone: sandwich norms, value norm, keys as values, score scale 1, layer scalars (FORMATS §1.5)."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..configuration_dspark import DSparkConfig
from .attention import BlockMask, apply_rope
from .qwen3 import KeysValues, Qwen3DraftAttention, RopeTables


class Gemma4DraftAttention(Qwen3DraftAttention):
    """As the Qwen3 one, but scores are not scaled, values are normed, and may come from `k_proj`."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.scaling = 1.0
        if config.attention_k_eq_v:
            self.v_proj = None  # type: ignore[assignment]
        self.q_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False)

    def keys_values(self, states: torch.Tensor, rope: RopeTables) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` [..., S, H] → keys (normed, rotated) and values (normed), each [..., S, kv_heads, hd]."""
        heads_shape = (*states.shape[:-1], -1, self.head_dim)
        raw_key = self.k_proj(states).view(heads_shape)
        raw_value = raw_key if self.v_proj is None else self.v_proj(states).view(heads_shape)
        return apply_rope(self.k_norm(raw_key), *rope), self.v_norm(raw_value)


class Gemma4DraftLayer(GradientCheckpointingLayer):
    """A Gemma4 decoder layer whose attention reads `[ctx ; block]`; its output is multiplied by `layer_scalar`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.self_attn = Gemma4DraftAttention(config)
        self.mlp = Qwen3MLP(config)  # the same gate/up/down shape; the activation comes from `hidden_act`
        self.input_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = nn.Buffer(torch.ones(1))

    def forward(
        self,
        states: torch.Tensor,
        rope: RopeTables,
        context: torch.Tensor | KeysValues,
        context_rope: RopeTables | None = None,
        mask: BlockMask | None = None,
    ) -> torch.Tensor:
        """`states` [B, A, γ, H] → [B, A, γ, H]; the other arguments are those of `Qwen3DraftLayer`."""
        attention = self.self_attn(self.input_layernorm(states), rope, context, context_rope, mask)
        states = states + self.post_attention_layernorm(attention)
        feedforward = self.mlp(self.pre_feedforward_layernorm(states))
        states = states + self.post_feedforward_layernorm(feedforward)
        return states * self.layer_scalar
