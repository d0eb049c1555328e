"""`RecordFile`: a JSONL file of training records that is written in parts, and the record of how it was made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DSparkDataError


class RecordFile:
    """Records with an `id` each in `path`, and beside it `<path>.meta.json`: settings, counts, runs.

    Records are appended in whole lines, a batch at a time; a last line that was cut off (the process was killed while
    writing) is dropped when the file is opened again. The meta file is replaced as a whole.

    Attributes:
        ids: of the records that are there.
        counts: whatever is to be counted over all runs; kept in the meta file.

    Args:
        path: of the JSONL file.
        settings: JSON-ready; everything that the records depend on. Records made with others are not added to.
        notes: JSON-ready; what is kept beside the settings, and may differ between runs.
        run: JSON-ready; describes this run (versions, machine). The meta file lists it after those that wrote
            something before.

    Raises:
        DSparkDataError: there are records at `path` of which there is no meta file, that were made with other settings
            (the message says which), or that cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike, settings: dict[str, Any], notes: dict[str, Any], run: dict[str, Any]
    ) -> None:
        self.path = Path(path)
        self.meta_path = meta_path(path)
        self.ids: set[str] = set()
        self.counts: dict[str, int] = {}
        self._settings = json.loads(json.dumps(settings))  # as they will be read back: tuples become lists
        self._notes = notes
        self._run = {**run, "records": 0}
        self._earlier_runs: list[dict[str, Any]] = []
        if self.path.exists() and self.path.stat().st_size:
            self._open_again()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()  # now, so that a place that cannot be written to is told before the work
        self.save_meta()

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records, read from the file."""
        with open(self.path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    record = json.loads(line)
                    record["id"]
                except (ValueError, TypeError, KeyError) as error:
                    raise DSparkDataError(
                        f"{self.path}, line {number} is not a record of this command. Mend or remove the line."
                    ) from error
                yield record

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds records; they are on disk before this returns."""
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self.ids.update(record["id"] for record in records)
        self._run["records"] += len(records)

    def sort(self, order: list[str]) -> None:
        """Puts the records into the order of their ids in `order`, which has them all."""
        place = {id: i for i, id in enumerate(order)}
        records = sorted(self, key=lambda record: place[record["id"]])
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        os.replace(temporary, self.path)

    def save_meta(self) -> None:
        """Writes the meta file."""
        values = {
            "settings": self._settings,
            **self._notes,
            "counts": {"records": len(self.ids), **self.counts},
            "runs": [*self._earlier_runs, self._run],
        }
        temporary = self.meta_path.with_name(self.meta_path.name + ".tmp")
        temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, self.meta_path)

    def _open_again(self) -> None:
        meta = read_meta(self.path)
        if meta is None:
            raise DSparkDataError(
                f"{self.path} exists, but {self.meta_path.name}, which says how it was made, does not. Give another "
                "--output, or remove the file."
            )
        changed = _differences(meta["settings"], self._settings)
        if changed:
            raise DSparkDataError(
                f"{self.path} was made with other settings: {'; '.join(changed)}. Run with the old ones to go on, or "
                "give another --output."
            )
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(self.path, end)
        for record in self:
            if record["id"] in self.ids:
                raise DSparkDataError(
                    f"{self.path} has the id {record['id']!r} twice: did two processes write to it? Remove one line."
                )
            self.ids.add(record["id"])
        self.counts = {name: count for name, count in meta["counts"].items() if name != "records"}
        runs = meta["runs"]
        runs[-1]["records"] = len(self.ids) - sum(run["records"] for run in runs[:-1])  # it may have been killed
        self._earlier_runs = [run for run in runs if run["records"]]


def meta_path(path: str | os.PathLike) -> Path:
    """Where the record of a data file is."""
    return Path(f"{os.fspath(path)}.meta.json")


def read_meta(path: str | os.PathLike) -> dict[str, Any] | None:
    """The record of a data file; `None` when it has none.

    Raises:
        DSparkDataError: it cannot be read.
    """
    file = meta_path(path)
    if not file.is_file():
        return None
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        meta["settings"], meta["counts"], meta["runs"]
    except (ValueError, TypeError, KeyError) as error:
        raise DSparkDataError(f"{file} is damaged. Remove it and {path}, or give another --output.") from error
    return meta


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """A phrase for each setting that is not the same."""

    def short(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else text[:57] + "…"

    names = dict.fromkeys([*there, *here])
    return [
        f"{name} {short(there.get(name))} there, {short(here.get(name))} now"
        for name in names
        if there.get(name) != here.get(name)
    ]
