"""`MuonAdamW`: Muon for the matrices of the draft's layers, AdamW for tables, norms and heads, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import DSparkDependencyError

NEWTON_SCHULZ_STEPS = 4  # 5 is usual; on a CPU each costs as much as a tenth of a small training step


class MuonAdamW(torch.optim.Optimizer):
    """Two optimisers behind one interface: what schedulers, the Trainer and checkpoints see are all their groups.

    Muon (Jordan et al. 2024) orthogonalises the update of a matrix. It needs about half as many slots as AdamW for the
    same draft (docs/LOG.md), but has no meaning for tables, of which a step touches a few rows only.

    Args:
        matrices: 2-D parameters for Muon.
        others: all other parameters, for AdamW.
        muon_lr: Muon's peak learning rate; the scheduler scales both.
        adamw: AdamW's arguments (`lr`, `betas`, `eps`, `weight_decay`).

    Raises:
        DSparkDependencyError: this PyTorch has no Muon.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], muon_lr: float, adamw: dict[str, Any]
    ):
        try:
            from torch.optim import Muon
        except ImportError as error:
            raise DSparkDependencyError(
                f"muon_learning_rate needs PyTorch 2.9 or newer, but this is {torch.__version__}: upgrade, or leave it "
                "unset to train with AdamW alone."
            ) from error
        self.parts: list[torch.optim.Optimizer] = [
            Muon(list(matrices), lr=muon_lr, weight_decay=0.0, ns_steps=NEWTON_SCHULZ_STEPS),
            torch.optim.AdamW(list(others), **adamw),
        ]
        super().__init__([parameter for part in self.parts for g in part.param_groups for parameter in g["params"]], {})
        # The very dicts of the two, so that a learning rate set here is theirs.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the states of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters: the matrices of the decoder layers and of the feature fusion, and all others."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inside = name.startswith(("layers.", "fc.")) and parameter.ndim == 2
        (matrices if inside else others).append(parameter)
    return matrices, others
