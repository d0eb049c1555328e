"""The target's side of a batch: tapped states, what its head reads, and optionally a folder that keeps both."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..errors import DSparkConfigError
from ..modeling_dspark import DSparkDraftModel, head_logits
from .objective import chunk_sizes, teacher_forward

_SAMPLED = 64  # entries of each parameter that enter the fingerprint: a fine-tune with the same config differs there


@dataclass
class TeacherStates:
    """What the frozen target says about a batch.

    Attributes:
        features: [B, T, L·Ht], the tapped states.
        states: [B, T, Ht], what the target's head reads.
        log_total: fp32 [B, T], log Σ exp of the target's logits over its whole vocabulary; `None`: not known.
        top: int64 [B, T], the arg-max of its logits; `None`: not known.
    """

    features: torch.Tensor
    states: torch.Tensor
    log_total: torch.Tensor | None = None
    top: torch.Tensor | None = None


class StateFolder:
    """Keeps the target's states of every sequence on disk after their first use, so that later epochs and runs (a
    twin, another block size) do without the target's forward and without most of its head.

    Worth it where the target's forward is a large part of a step and the text is small: a token takes
    2·(L+1)·Ht + 8 bytes in bf16. One safetensors file a sequence, named by its ids, in a folder named by the target's
    weights and the tapped layers; several processes may share it.

    Args:
        folder: the parent folder.
        draft: bound to its target; gives the tapped layers and the head map.

    Raises:
        DSparkConfigError: the target's weights are offloaded or sharded, so that the folder cannot be named by them.
    """

    def __init__(self, folder: str | os.PathLike, draft: DSparkDraftModel):
        self.draft, self.target = draft, draft.target
        self.layer_ids = list(draft.config.target_layer_ids)
        for name, parameter in self.target.named_parameters():
            if parameter.is_meta or isinstance(parameter, DTensor):
                how = "offloaded" if parameter.is_meta else "sharded over processes"
                raise DSparkConfigError(
                    f"target_states keeps states in a folder named by the target's weights, but {name} is {how}. Leave "
                    "target_states unset, or load the target whole."
                )
        self.folder = os.path.join(folder, _fingerprint(self.target, self.layer_ids))
        os.makedirs(self.folder, exist_ok=True)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> TeacherStates:
        """States of right-padded sequences: `input_ids`, `attention_mask` [B, T]."""
        rows = [self._of(ids[: int(length)]) for ids, length in zip(input_ids, attention_mask.sum(dim=-1))]
        device = input_ids.device
        padded = {
            name: pad_sequence([row[name] for row in rows], batch_first=True).to(device)
            for name in ("features", "states", "log_total", "top")
        }
        return TeacherStates(**{**padded, "top": padded["top"].long()})

    def path(self, input_ids: torch.Tensor) -> str:
        """The file of one sequence of ids [T]."""
        name = hashlib.blake2b(input_ids.to("cpu", torch.int64).numpy().tobytes(), digest_size=16).hexdigest()
        return os.path.join(self.folder, f"{name}.safetensors")

    def _of(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        path = self.path(input_ids)
        if os.path.exists(path):
            return load_file(path)
        features, states = teacher_forward(
            self.target, self.layer_ids, input_ids[None], torch.ones_like(input_ids)[None]
        )
        totals, tops = [], []
        rows, _ = chunk_sizes(self.draft.config.vocab_size, states.dtype, states.device)
        with torch.no_grad():
            for chunk in states[0].split(rows):
                logits = self.draft.scale_and_cap(head_logits(self.target, chunk)).float()  # [C, V]
                totals.append(logits.logsumexp(dim=-1))
                tops.append(logits.argmax(dim=-1).int())
        tensors = {"features": features[0], "states": states[0], "log_total": torch.cat(totals), "top": torch.cat(tops)}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
        os.close(handle)
        save_file(tensors, temporary)
        os.replace(temporary, path)
        return tensors


def _fingerprint(target: PreTrainedModel, layer_ids: list[int]) -> str:
    """Names what the states depend on: architecture, weights (a few entries of each), dtype and tapped layers."""
    digest = hashlib.blake2b(digest_size=12)
    config = {**target.config.to_diff_dict(), "_name_or_path": None, "transformers_version": None}
    digest.update(repr((sorted(config.items(), key=str), layer_ids, str(target.dtype))).encode())
    for name, parameter in target.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:_SAMPLED].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
