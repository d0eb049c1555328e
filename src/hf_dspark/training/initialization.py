"""Starting a draft's layers from copies of the target's own, instead of from noise."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..errors import DSparkConfigError
from ..modeling_dspark import DSparkDraftModel

_SAMPLES = 8  # sequences on which the size of the target's queries and keys is measured


@torch.no_grad()
def initialize_from_target(
    draft: DSparkDraftModel, target: PreTrainedModel, layer_ids: list[int], dataset: Dataset
) -> None:
    """Copies one target layer into each draft layer, and lets the context features start as the last tapped state.

    Draft layers norm queries and keys per head; where the target does not (Llama), the norms start at the root mean
    square that its own queries and keys have, measured on a few samples. All layers read the same `ctx`, normed once,
    so the difference between the copied layers' input norms is folded into their projections.

    Args:
        draft: a fresh draft with backbone "qwen3".
        target: its target, with Llama-like decoder layers.
        layer_ids: as many target layers as the draft has layers.
        dataset: items with `input_ids`, to measure on.

    Raises:
        DSparkConfigError: the number of layers or their shapes do not fit.
    """
    config = draft.config
    if len(layer_ids) != config.num_hidden_layers or not all(0 <= i < config.num_target_layers for i in layer_ids):
        raise DSparkConfigError(
            f"initialize_from_target is {layer_ids}, but must be {config.num_hidden_layers} layer id(s) from 0 to "
            f"{config.num_target_layers - 1}, one per draft layer."
        )
    if config.backbone != "qwen3" or config.hidden_size != config.target_hidden_size:
        raise DSparkConfigError("initialize_from_target needs backbone 'qwen3' and a draft as wide as its target.")
    decoder = target.get_decoder()
    sources = [decoder.layers[i] for i in layer_ids]
    scales = _root_mean_squares(target, sources, config.head_dim, dataset)
    ctx_norm = sources[-1].input_layernorm.weight.float()
    for layer, source in zip(draft.layers, sources):
        ratio = source.input_layernorm.weight.float() / ctx_norm
        for name in ("q_proj", "k_proj", "v_proj"):
            _copy(getattr(layer.self_attn, name), getattr(source.self_attn, name).weight.float() * ratio, name)
        _copy(layer.self_attn.o_proj, source.self_attn.o_proj.weight, "o_proj")
        layer.input_layernorm.weight.copy_(ctx_norm)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(layer.mlp, name), getattr(source.mlp, name).weight, name)
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            theirs = getattr(source.self_attn, norm, None)  # Qwen3 has the same norms; Llama has none
            if theirs is not None:
                getattr(layer.self_attn, norm).weight.copy_(theirs.weight)
            else:
                getattr(layer.self_attn, norm).weight.fill_(scales[getattr(source.self_attn, projection)])
    # ctx = norm(last tapped state); the other states start small and are learned.
    width = config.target_hidden_size
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, -width:] = torch.eye(width)
    draft.hidden_norm.weight.copy_(ctx_norm)
    draft.norm.weight.copy_(decoder.norm.weight)


def _copy(module: nn.Linear, weight: torch.Tensor, name: str) -> None:
    if module.weight.shape != weight.shape:
        raise DSparkConfigError(
            f"initialize_from_target: the draft's {name} is {tuple(module.weight.shape)}, the target's is "
            f"{tuple(weight.shape)}. Leave widths and heads of the draft at the target's."
        )
    module.weight.copy_(weight)


def _root_mean_squares(
    target: PreTrainedModel, layers: list[nn.Module], head_dim: int, dataset: Dataset
) -> dict[nn.Module, float]:
    """Root mean square of a head of queries and keys, per projection module."""
    seen: dict[nn.Module, list[float]] = {}

    def measure(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        heads = output.float().view(*output.shape[:-1], -1, head_dim)
        seen.setdefault(module, []).append(heads.pow(2).mean(dim=-1).sqrt().mean().item())

    projections = {getattr(layer.self_attn, name) for layer in layers for name in ("q_proj", "k_proj")}
    hooks = [projection.register_forward_hook(measure) for projection in projections]
    try:
        for i in range(min(_SAMPLES, len(dataset))):
            target(input_ids=dataset[i]["input_ids"][None].to(target.device), logits_to_keep=1, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {module: sum(values) / len(values) for module, values in seen.items()}
