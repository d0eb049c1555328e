"""Shared fixtures. Models are built once per session; nothing may change them."""

from __future__ import annotations

import os

import pytest
import torch
from fake_hub import connected
from huggingface_hub import constants
from tiny_models import TARGETS


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the models are so small that threads only cost
    # Of child processes too: two threads that wait for each other beside other workers take many times as long.
    os.environ["OMP_NUM_THREADS"] = "1"


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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub in memory, behind the real client; its cache is `tmp_path / "cache"`."""
    with connected(monkeypatch, tmp_path) as fake:
        yield fake


@pytest.fixture
def offline(monkeypatch):
    """Call it to cut the network as HF_HUB_OFFLINE=1 does."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
