"""Shared fixtures. Models are built once per session; nothing may change them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TARGETS


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the models are so small that threads only cost


@pytest.fixture(scope="session")
def targets():
    """`targets(name)` gives the tiny target of that name."""
    built = {}

    def get(name: str):
        if name not in built:
            built[name] = TARGETS[name]()
        return built[name]

    return get


@pytest.fixture(params=list(TARGETS))
def target(request, targets):
    return targets(request.param)


@pytest.fixture
def llama(targets):
    return targets("llama")
