"""The sequential heads (vanilla Markov, gated, rnn; paper §3.1) and the confidence head (paper §3.2)."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """Adds to the base logits of slot k a low-rank bias that depends on the token drafted for slot k-1.

    With e = W1[x_{k-1}] and h the backbone output of the slot, the bias is W2·m, where the latent m is
    vanilla: e; gated: σ(gate[h;e])⊙e; rnn: tanh(O) with (G,C,O) = split(joint[s;e;h]) and s ← σ(G)s + (1-σ(G))tanh(C).
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latent(
        self, hidden: torch.Tensor, embedding: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step. `hidden` [..., H], `embedding` e [..., r], `state` s [..., r] (rnn only, `None` at the start).

        Returns the latent m [..., r], to be multiplied by W2, and the next state.
        """
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
            return gate * embedding, None
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def teacher_forced(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All slots at once, given the true previous tokens (target ids).

        Args:
            hidden: [..., γ, H].
            previous_ids: int64 [..., γ]; slot 0's previous token is the anchor.

        Returns:
            The latents m and the embeddings e, each [..., γ, r].
        """
        embedding = self.markov_w1(previous_ids)  # [..., γ, r]
        if self.head_type != "rnn":
            return self.latent(hidden, embedding, None)[0], embedding
        latents, state = [], None
        for k in range(hidden.shape[-2]):
            latent, state = self.latent(hidden[..., k, :], embedding[..., k, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2), embedding


class ConfidenceHead(nn.Module):
    """The logit of c_k, the chance that draft k is accepted given that the earlier ones were."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """`hidden` [..., H] and the Markov embedding e [..., r] → fp32 logits [...]."""
        if self.with_markov:
            assert embedding is not None  # the config refuses a Markov-fed head without a Markov head
            hidden = torch.cat([hidden, embedding], dim=-1)
        return self.proj(hidden).squeeze(-1).float()
