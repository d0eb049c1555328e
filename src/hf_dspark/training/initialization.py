"""A start that already knows something: token pairs for the sequential head, the last position for the first layer.

Both are closed-form, take seconds, and stand for the first few hundred steps of training. A Markov table learns slowly
by gradient, because each of its rows is seen as rarely as its token; and attention towards the newest context feature,
without which a draft is no more than a table of pairs, is found late. Copies of the target's own last layers, which
look like the obvious start, gave nothing (docs/LOG.md).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from ..modeling_dspark import DSparkDraftModel
from .data import DSparkDataset
from .objective import teacher_forward

_SAMPLES = 8  # sequences on which queries and keys are fitted
_SHARPNESS = 2.0  # of the attention towards the last position; 1 is what normed random vectors have
_FAST_PAIRS = 6  # RoPE pairs used for it: the fastest ones tell neighbouring positions apart
_BALANCE = 0.25  # power of the frequencies by which errors are weighed in the factorisation
_DISCOUNT = 0.5  # taken off every pair's count, so that pairs seen once weigh little


@torch.no_grad()
def initialize_draft(draft: DSparkDraftModel, dataset: DSparkDataset) -> None:
    """Initialises a fresh draft from its target and from the supervised text.

    * The final norm starts as the target's.
    * The sequential head (vanilla, gated, rnn) starts at a low-rank factorisation of the positive pointwise mutual
      information of neighbouring tokens: W2·W1[prev] ≈ log p(next | prev) − log p(next).
    * All heads of the first layer look at the position before the anchor, and hand its feature on unchanged where the
      shapes allow it.

    Args:
        draft: bound to its target.
        dataset: the training samples.
    """
    final_norm = getattr(draft.target.get_decoder(), "norm", None)
    if final_norm is not None and final_norm.weight.shape == draft.norm.weight.shape:
        draft.norm.weight.copy_(final_norm.weight)
    if draft.markov_head is not None:
        w1, w2 = factorise_pairs(draft, dataset)
        draft.markov_head.markov_w1.weight.copy_(w1)
        draft.markov_head.markov_w2.weight.copy_(w2)
    if draft.config.backbone == "qwen3":
        _look_at_the_last_position(draft, [dataset[i]["input_ids"] for i in range(min(_SAMPLES, len(dataset)))])


def factorise_pairs(draft: DSparkDraftModel, dataset: DSparkDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 [V, r] and W2 [Vd, r] from the counts of neighbouring tokens whose second one is supervised."""
    config = draft.config
    kept = draft.draft_token_ids
    to_draft = np.full(config.vocab_size, -1)
    to_draft[np.arange(config.vocab_size) if kept is None else kept.cpu().numpy()] = np.arange(config.draft_vocab_size)
    previous, following = [], []
    for ids, mask in dataset.samples:
        supervised = mask[1:].astype(bool)
        previous.append(ids[:-1][supervised])
        following.append(to_draft[ids[1:][supervised]])
    first, second = np.concatenate(previous).astype(np.int64), np.concatenate(following)
    first, second = first[second >= 0], second[second >= 0]
    pairs, counts = np.unique(first * config.draft_vocab_size + second, return_counts=True)
    rows, columns = (
        torch.from_numpy(pairs // config.draft_vocab_size),
        torch.from_numpy(pairs % config.draft_vocab_size),
    )
    count = torch.from_numpy(counts).float()
    total = count.sum()
    of_row = torch.zeros(config.vocab_size).index_add(0, rows, count)
    of_column = torch.zeros(config.draft_vocab_size).index_add(0, columns, count)
    information = ((count - _DISCOUNT) * total / (of_row[rows] * of_column[columns])).log().clamp(min=0.0)
    information = torch.where(count > 1, information, 0.5 * information)

    # Rows and columns are scaled so that the rank is spent on frequent tokens, and scaled back afterwards.
    row_scale, column_scale = (of_row + 1) ** _BALANCE, (of_column + 1) ** _BALANCE
    matrix = torch.sparse_coo_tensor(
        torch.stack([rows, columns]),
        information * row_scale[rows] * column_scale[columns],
        (config.vocab_size, config.draft_vocab_size),
        check_invariants=True,
    ).coalesce()
    rank = config.markov_rank
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)  # the factorisation is randomised; it must not depend on, or move, the caller's generator
    width = min(rank + 16, *matrix.shape)
    left, values, right = torch.svd_lowrank(matrix, q=width, niter=4)
    torch.set_rng_state(generator_state)
    w1 = torch.zeros(config.vocab_size, rank)
    w2 = torch.zeros(config.draft_vocab_size, rank)
    used = min(rank, width)
    w1[:, :used] = left[:, :used] * values[:used].sqrt() / row_scale[:, None]
    w2[:, :used] = right[:, :used] * values[:used].sqrt() / column_scale[:, None]
    balance = (w2.pow(2).mean() / w1.pow(2).mean().clamp(min=1e-12)) ** 0.25
    return w1 * balance, w2 / balance


def _look_at_the_last_position(draft: DSparkDraftModel, samples: list[torch.Tensor]) -> None:
    """Queries u and keys v of one direction each, rotated against each other by one position.

    The direction is written with rank one: q = u·(aᵀx), where a is fitted so that aᵀx ≈ 1 on embedded tokens, and after
    the norm only the sign of aᵀx is left. Keys are fitted to +1 on context features and −1 on block states, so that
    the block does not look at itself. RoPE then makes the score a function of the distance alone, largest at 1.
    """
    config, layer, attention = draft.config, draft.layers[0], draft.layers[0].self_attn
    head_dim, half = config.head_dim, config.head_dim // 2
    frequencies = draft.rotary_emb.inv_freq[:_FAST_PAIRS].float().cpu()
    features = [
        teacher_forward(draft.target, config.target_layer_ids, ids[None], torch.ones_like(ids[None]))[0][0]
        for ids in samples
    ]
    context = draft.fuse(torch.cat(features)[None])[0].cpu()  # [N, H]
    tokens = torch.cat([*samples, torch.full((len(context) // 4,), config.mask_token_id)])
    block = layer.input_layernorm(draft.embed(tokens)).cpu()
    a = _ridge(block, torch.ones(len(block)))
    b = _ridge(torch.cat([context, block]), torch.cat([torch.ones(len(context)), -torch.ones(len(block))]))
    u, v = torch.zeros(head_dim), torch.zeros(head_dim)
    fast = torch.arange(len(frequencies))
    u[fast], u[fast + half] = torch.cos(frequencies), -torch.sin(frequencies)
    v[fast] = 1.0
    for projection, direction, reading in ((attention.q_proj, u, a), (attention.k_proj, v, b)):
        heads = projection.out_features // head_dim
        # Some of the random weights stay, so that the heads do not learn the same thing.
        projection.weight.mul_(0.5).add_(torch.outer(direction, reading).mul(3.0).repeat(heads, 1).to(draft.device))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(math.sqrt(_SHARPNESS))
    for projection in (attention.v_proj, attention.o_proj):
        if projection.in_features == projection.out_features:
            nn.init.eye_(identity := torch.empty_like(projection.weight))
            projection.weight.mul_(0.3).add_(identity)


def _ridge(inputs: torch.Tensor, targets: torch.Tensor, penalty: float = 1e-2) -> torch.Tensor:
    """Ridge regression: [N, H], [N] → [H]."""
    inputs, targets = inputs.float(), targets.float()
    gram = inputs.T @ inputs / len(inputs) + penalty * torch.eye(inputs.shape[1])
    return torch.linalg.solve(gram, inputs.T @ targets / len(inputs))
