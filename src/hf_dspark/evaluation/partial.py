"""Results of a long evaluation, kept line by line, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Key = tuple[float, str, int]


class PartialResults:
    """A JSONL file: one line of settings, then one line per finished prompt.

    A file whose settings differ is started anew: its numbers belong to another experiment. A last line that was cut
    off (the process was killed while writing) is dropped.
    """

    def __init__(self, path: str | os.PathLike, settings: dict[str, Any]):
        """`settings`: JSON-ready; everything that the results depend on."""
        self.path = Path(path)
        self._rows: dict[Key, dict[str, Any]] = {}
        settings = json.loads(json.dumps(settings))  # as they will be read back: tuples become lists
        if self.path.is_file():
            self._rows = _read(self.path, settings)
        # Written anew, so that a cut last line does not run into the next one.
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({"settings": settings}) + "\n")
            for key, row in self._rows.items():
                stream.write(_line(key, row))
        os.replace(temporary, self.path)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Key) -> dict[str, Any] | None:
        """The row of a finished prompt, or `None`."""
        return self._rows.get(key)

    def add(self, key: Key, row: dict[str, Any]) -> None:
        """Keeps a finished prompt, on disk before this returns."""
        self._rows[key] = row
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(_line(key, row))

    def remove(self) -> None:
        """Deletes the file, once the whole result is written elsewhere."""
        self.path.unlink(missing_ok=True)


def _line(key: Key, row: dict[str, Any]) -> str:
    return json.dumps({"key": list(key), "row": row}) + "\n"


def _read(path: Path, settings: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[Key, dict[str, Any]] = {}
    try:
        if not lines or json.loads(lines[0]).get("settings") != settings:
            return {}
        for line in lines[1:]:
            entry = json.loads(line)
            temperature, prompt_set, index = entry["key"]
            rows[(temperature, prompt_set, index)] = entry["row"]
    except json.JSONDecodeError:
        pass  # the cut line; what stands before it is whole
    return rows


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of a model's tensors: a draft trained further under the same path is another draft."""
    return fingerprint_of(model.state_dict())


def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same for tensors by name, as in a file of weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
