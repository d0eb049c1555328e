"""Checkpoint layouts: recognise one from raw config.json and tensor names, and give its `DSparkConfig`."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file

from ..configuration_dspark import DSparkConfig
from ..errors import DSparkCheckpointError
from ..hub_errors import HUB_FAILURES, explain
from . import deepspec, dspark
from .foreign import name_foreign_layout

# What of `from_pretrained`'s keywords is passed on to every download.
_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


@dataclass
class Checkpoint:
    """A recognised checkpoint: its configuration, the names of its tensors, and its generation config, if any."""

    config: DSparkConfig
    tensor_names: set[str]
    generation_config: GenerationConfig | None


def read_checkpoint(path_or_id: str | os.PathLike, kwargs: dict[str, Any]) -> Checkpoint:
    """Recognises the checkpoint at `path_or_id`.

    Args:
        path_or_id: a folder or a Hub id.
        kwargs: the keywords of `from_pretrained`; those that concern the Hub are used.

    Raises:
        DSparkCheckpointError: a file is missing, or the layout is another one, which the message names.
    """
    hub_kwargs = {key: kwargs[key] for key in _HUB_KWARGS if key in kwargs}
    raw = _read_config(path_or_id, hub_kwargs)
    names = _tensor_names(path_or_id, hub_kwargs)
    for layout in (dspark, deepspec):
        if layout.recognises(raw, names):
            generation_config = _generation_config(path_or_id, hub_kwargs) if layout is dspark else None
            return Checkpoint(layout.read_config(raw, names, str(path_or_id)), names, generation_config)
    raise DSparkCheckpointError(
        f"{path_or_id} is {name_foreign_layout(raw, names)}, which this package does not load. It loads its own "
        "layout (model_type 'dspark') and DeepSpec's (Qwen3DSparkModel and Gemma4DSparkModel, dflash_* included)."
    )


def _read_config(path_or_id: str | os.PathLike, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    text = _read_text(path_or_id, "config.json", hub_kwargs)
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise DSparkCheckpointError(f"config.json of {path_or_id} is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise DSparkCheckpointError(f"config.json of {path_or_id} is a {type(raw).__name__}, not an object.")
    return raw


def _read_text(path_or_id: str | os.PathLike, name: str, hub_kwargs: dict[str, Any]) -> str:
    file = _resolve(path_or_id, name, hub_kwargs, required=True)
    if file is None:
        raise DSparkCheckpointError(
            f"{path_or_id} has no {name}. Give a folder that holds config.json and model.safetensors, or the id of "
            "a Hub repository that does."
        )
    with open(file, encoding="utf-8") as stream:
        return stream.read()


def _resolve(
    path_or_id: str | os.PathLike, name: str, hub_kwargs: dict[str, Any], required: bool = False
) -> str | None:
    """The local path of a file, or `None` where there is none. An optional file that the network keeps from us counts
    as absent, so one that must be there is asked for with `required`: then the error tells the two apart."""
    try:
        return cached_file(path_or_id, name, **hub_kwargs, _raise_exceptions_for_missing_entries=required)
    except HUB_FAILURES as error:
        reason = explain(error, os.fspath(path_or_id), hub_kwargs.get("revision"))
        if reason is None:
            reason = f"Cannot read {name} of {path_or_id}: {str(error).strip().splitlines()[0]}"
        raise DSparkCheckpointError(reason) from error


def _tensor_names(path_or_id: str | os.PathLike, hub_kwargs: dict[str, Any]) -> set[str]:
    index = _resolve(path_or_id, "model.safetensors.index.json", hub_kwargs)
    if index is not None:
        with open(index, encoding="utf-8") as stream:
            return set(json.load(stream)["weight_map"])
    file = _resolve(path_or_id, "model.safetensors", hub_kwargs)
    if file is None and not os.path.isdir(path_or_id):  # missing, or kept from us: that raises, with the reason
        file = _resolve(path_or_id, "model.safetensors", hub_kwargs, required=True)
    if file is None:
        raise DSparkCheckpointError(
            f"{path_or_id} has no model.safetensors (nor an index of shards). Only safetensors files are read."
        )
    with open(file, "rb") as stream:  # the header alone: the tensors themselves may be gigabytes
        (size,) = struct.unpack("<Q", stream.read(8))
        return set(json.loads(stream.read(size))) - {"__metadata__"}


def _generation_config(path_or_id: str | os.PathLike, hub_kwargs: dict[str, Any]) -> GenerationConfig | None:
    file = _resolve(path_or_id, "generation_config.json", hub_kwargs)
    return None if file is None else GenerationConfig.from_pretrained(os.path.dirname(file), local_files_only=True)
