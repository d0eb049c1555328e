"""What `return_dict_in_generate` returns, per token, in the shapes of plain `generate`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput


class OutputRecorder:
    """Collects scores, logits, hidden states and attentions, one entry per new token.

    A tuple that was not asked for stays `None`. Rows of a round are split as plain decoding shapes them: hidden states
    [1, 1, H], attentions [1, heads, 1, keys at that step]; the first entry holds the whole prompt.
    """

    def __init__(self, generation_config: GenerationConfig):
        wanted = bool(generation_config.return_dict_in_generate)
        self.scores: tuple | None = () if wanted and generation_config.output_scores else None
        self.logits: tuple | None = () if wanted and generation_config.output_logits else None
        self.attentions: tuple | None = () if wanted and generation_config.output_attentions else None
        self.hidden_states: tuple | None = () if wanted and generation_config.output_hidden_states else None
        self._selection = generation_config.output_hidden_states

    @property
    def keeps_rows(self) -> bool:
        """Whether the scores or the raw logits of every token are kept."""
        return self.scores is not None or self.logits is not None

    def requested_hidden_states(self, tapped: list[int]) -> bool | list[int]:
        """The `output_hidden_states` to ask of the target: the tapped ones, and what the caller wants to see."""
        if self.hidden_states is None:
            return tapped
        if self._selection is True:
            return True
        wanted = [self._selection] if isinstance(self._selection, int) else list(self._selection)
        return [*wanted, *tapped]

    def add_choice(self, raw: torch.Tensor, scores: torch.Tensor) -> None:
        """The raw and the processed row, each fp32 [1, V], that a token is chosen from."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)

    def add_prefill(self, outputs: Any) -> None:
        """The first token's hidden states and attentions, which are the whole prompt's."""
        if self.hidden_states is not None:
            self.hidden_states += (self._selected(outputs.hidden_states),)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add_rows(self, outputs: Any, count: int, target: PreTrainedModel, cache: Cache) -> None:
        """The first `count` rows of a round, before the cache is cropped."""
        if self.hidden_states is not None:
            layers = self._selected(outputs.hidden_states)
            for i in range(count):
                self.hidden_states += (tuple(None if h is None else h[:, i : i + 1] for h in layers),)
        if self.attentions is not None:
            if not outputs.attentions:  # attention kernels that give no weights: plain decoding has empty tuples
                self.attentions += (outputs.attentions,) * count
                return
            windows = _key_windows(target, cache)
            for i in range(count):
                self.attentions += (
                    tuple(_attention_row(weights, i, windows[n]) for n, weights in enumerate(outputs.attentions)),
                )

    def _selected(self, hidden_states: tuple) -> tuple:
        """What the caller selected, `None` elsewhere."""
        if self._selection is True:
            return hidden_states
        wanted = [self._selection] if isinstance(self._selection, int) else self._selection
        total = len(hidden_states)
        kept = {i % total for i in wanted if -total <= i < total}
        return tuple(h if i in kept else None for i, h in enumerate(hidden_states))

    def result(self, sequences: Any, cache: Cache) -> GenerateDecoderOnlyOutput:
        """The output object of plain `generate`."""
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            cache=cache,
        )


def _key_windows(target: PreTrainedModel, cache: Cache) -> list[int | None]:
    """Per layer, the most keys that one row sees; 0 for no limit and `None` for static layers, which show all slots."""
    config = target.config.get_text_config(decoder=True)
    windows: list[int | None] = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            windows.append(None)
        elif isinstance(layer, DummyLayer):  # it reads another layer's keys, whose kind the config tells
            windows.append(config.sliding_window if config.layer_types[i] == "sliding_attention" else 0)
        else:
            windows.append(layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0)
    return windows


def _attention_row(weights: torch.Tensor, row: int, window: int | None) -> torch.Tensor:
    """Row `row` of [1, heads, rows, keys], cut to the keys that existed at that step."""
    if window is None:
        return weights[:, :, row : row + 1]
    end = weights.shape[-1] - weights.shape[-2] + row + 1
    start = max(end - window, 0) if window else 0
    return weights[:, :, row : row + 1, start:end]
