"""The target's tapped hidden states during the prefill, and the proof that they are what the draft was trained on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import DSparkTargetError

# Layer ids proved so far, per target class: the proof costs nothing to repeat, but hooks are best left out.
_proved: weakref.WeakKeyDictionary[type, set[int]] = weakref.WeakKeyDictionary()


@contextmanager
def captured_prefill(
    target: PreTrainedModel, layer_ids: list[int], join: Callable[[tuple], torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Collects the features of every forward of `target` inside the block; a chunked prefill has several.

    The hooks are gone when the block ends. In the first prefill of a target class, further hooks on the decoder layers
    prove that entry i+1 of `hidden_states` is the output of layer i (and entry 0 the input of layer 0).

    Args:
        target: the model whose forwards ask for `hidden_states`.
        layer_ids: the tapped layers.
        join: makes features [1, T, L·Ht] of a `hidden_states` tuple.

    Yields:
        A list that is filled with the features of each forward, in order.

    Raises:
        DSparkTargetError: the target hands out no hidden states, or other ones than its layers' outputs.
    """
    features: list[torch.Tensor] = []
    seen: dict[int, torch.Tensor] = {}
    proved = _proved.setdefault(type(target), set())
    to_prove = [i for i in layer_ids if i not in proved]
    handles = [layer_hook for i in to_prove for layer_hook in (_watch_layer(target, i, seen),)]

    def on_forward(module: nn.Module, args: tuple, output: Any) -> None:
        hidden_states = output.hidden_states
        if not hidden_states:
            raise DSparkTargetError(
                f"{type(target).__name__} returns no hidden states, which a DSpark draft model reads."
            )
        for i in to_prove:
            if not _same(hidden_states[i + 1], seen[i]):
                raise DSparkTargetError(
                    f"{type(target).__name__} returns something else than the output of decoder layer {i} as "
                    f"hidden_states[{i + 1}], so a draft model trained on that layer would read wrong features."
                )
        features.append(join(hidden_states))

    handles.append(target.register_forward_hook(on_forward))
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()
    proved.update(to_prove)


def _watch_layer(target: PreTrainedModel, layer_id: int, seen: dict[int, torch.Tensor]) -> Any:
    layer = _decoder_layers(target)[max(layer_id, 0)]

    def note_input(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen[-1] = args[0] if args else kwargs["hidden_states"]

    def note_output(module: nn.Module, args: tuple, output: Any) -> None:
        seen[layer_id] = output[0] if isinstance(output, tuple) else output

    if layer_id == -1:
        return layer.register_forward_pre_hook(note_input, with_kwargs=True)
    return layer.register_forward_hook(note_output)


def _decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers: the first module list inside the decoder that has as many entries as layers."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    for module in target.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise DSparkTargetError(f"{type(target).__name__} has no list of its {count} decoder layers that could be tapped.")


def _same(captured: torch.Tensor, seen: torch.Tensor) -> bool:
    if captured is seen:
        return True
    if captured.shape != seen.shape:
        return False
    seen = seen.to(captured.device)
    return bool(((captured == seen) | (captured.isnan() & seen.isnan())).all())
