"""What the verbs that measure write beside their numbers: everything that these depend on, and JSON files."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.prompts import PromptSet


def refuse_doubles(option: str, given: list[str], names: list[str]) -> None:
    """
    Raises:
        DSparkDataError: two of `names`, which are what the option's values go by in the results, are the same.
    """
    from ..errors import DSparkDataError

    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise DSparkDataError(f"{option}: {given} gives {doubles} twice; results are told apart by these names.")


def describe_data(paths: list[str], prompt_sets: list[PromptSet]) -> dict[str, Any]:
    """Per prompt set its file, size and hash."""
    import hashlib

    return {
        prompts.name: {
            "file": path,
            "prompts": len(prompts.conversations),
            "sha256": hashlib.sha256(json.dumps(prompts.conversations).encode()).hexdigest()[:16],
        }
        for path, prompts in zip(paths, prompt_sets)
    }


def describe_machine(target: PreTrainedModel) -> dict[str, Any]:
    """Data type, device, threads and versions."""
    import torch
    import transformers

    from .. import __version__

    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {
            "hf-dspark": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def write_json(path: str | os.PathLike, values: dict[str, Any], indent: int = 1) -> None:
    """Writes to a temporary name and moves it: never half a file."""
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(values, stream, indent=indent)
        stream.write("\n")
    os.replace(temporary, path)
