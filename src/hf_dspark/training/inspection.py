"""What a training file is to the trainer: how much is supervised, how long samples are, and which text it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import DSparkDataError
from .data import encode_records, has_anchor, to_messages
from .masks import Sample


@dataclass
class Inspection:
    """Counts over a data file, as it is trained on when samples are cut at `max_length` tokens.

    Attributes:
        max_length: the cut.
        records, skipped: records, and those of which nothing can be trained (no answer, or none before the cut).
        samples: encoded samples that are trained on; more than one per record where the chat template shows earlier
            turns differently.
        tokens, supervised: of these samples, after the cut.
        longer: how many of them were cut.
        unfinished: records whose last answer was cut when it was written.
        answers: records by their number of assistant turns.
        temperatures: records by the temperature that they name.
        lengths: of the samples before the cut, in tokens.
        shown: some samples as pieces of text, each with whether it is supervised.
    """

    max_length: int
    records: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    longer: int = 0
    unfinished: int = 0
    answers: dict[int, int] = field(default_factory=dict)
    temperatures: dict[float, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    shown: list[list[tuple[str, bool]]] = field(default_factory=list)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens that are trained on."""
        return self.supervised / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        low, median, high = np.percentile(self.lengths, [10, 50, 90]).tolist() if self.lengths else [0.0] * 3
        return {
            **{name: value for name, value in asdict(self).items() if name != "lengths"},
            "supervised_share": self.supervised_share,
            "length": {
                "median": median,
                "percentile_10": low,
                "percentile_90": high,
                "max": max(self.lengths, default=0),
            },
            "histogram": [{"from": a, "to": b, "samples": n} for a, b, n in self.histogram()],
        }

    def histogram(self, bins: int = 12) -> list[tuple[int, int, int]]:
        """Lengths in at most `bins` equal ranges with round borders, from the shortest: (first, last, samples)."""
        longest = max(self.lengths, default=0)
        width = next(w for p in range(12) for w in (10**p, 2 * 10**p, 5 * 10**p) if w * bins >= longest)
        counts = np.bincount([(length - 1) // width for length in self.lengths], minlength=1)
        shortest = int(np.flatnonzero(counts)[0]) if self.lengths else 0
        return [(i * width + 1, (i + 1) * width, int(n)) for i, n in enumerate(counts) if i >= shortest]


def inspect_records(
    records: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    show: int = 3,
    seed: int = 0,
    on_record: Callable[[int], None] = lambda done: None,
) -> Inspection:
    """Encodes records as the trainer does, and counts.

    Args:
        records: of the trainer's format.
        tokenizer: the target's.
        max_length: longer samples are cut, in tokens.
        show: how many samples to show, drawn by `seed`.
        seed: of the draw.
        on_record: called with the number of records done.

    Raises:
        DSparkDataError: a record cannot be encoded, or nothing at all is supervised.
    """
    found = Inspection(max_length)
    drawn: list[tuple[float, Sample]] = []
    random = np.random.default_rng(seed)
    for record, samples in encode_records(records, tokenizer):
        found.records += 1
        answers = sum(message.get("role") == "assistant" for message in to_messages(record))
        found.answers[answers] = found.answers.get(answers, 0) + 1
        found.unfinished += record.get("finished") is False
        if record.get("temperature") is not None:
            found.temperatures[record["temperature"]] = found.temperatures.get(record["temperature"], 0) + 1
        kept = 0
        for ids, mask in samples:
            found.lengths.append(len(ids))
            if has_anchor(np.array(mask[:max_length])):
                kept += 1
                found.tokens += len(ids[:max_length])
                found.supervised += sum(mask[:max_length])
                found.longer += len(ids) > max_length
                # The `show` smallest of one random number each: a fair draw without keeping every sample.
                drawn = sorted([*drawn, (random.random(), (ids, mask))], key=lambda entry: entry[0])[:show]
        found.samples += kept
        found.skipped += not kept
        on_record(found.records)
    if not found.samples:
        raise DSparkDataError(
            f"Nothing to supervise: none of {found.records} records has two neighbouring tokens of assistant text "
            f"within {max_length} tokens. Check that the data has assistant turns, and the chat template."
        )
    found.shown = [pieces(tokenizer, ids[:max_length], mask[:max_length]) for _, (ids, mask) in drawn]
    return found


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int]) -> list[tuple[str, bool]]:
    """The text of a sample, cut where supervision begins and ends: pairs (text, supervised)."""
    borders = [i for i in range(1, len(ids)) if mask[i] != mask[i - 1]] + [len(ids)]
    found, text = [], ""
    for border in borders:
        # Decoded from the start: some decoders drop a blank at the beginning of what they are given.
        longer = tokenizer.decode(ids[:border], clean_up_tokenization_spaces=False)
        found.append((longer[len(text) :], bool(mask[border - 1])))
        text = longer
    return found
