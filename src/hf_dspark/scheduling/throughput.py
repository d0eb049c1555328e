"""What a forward of the target costs by the number of tokens in it: `ThroughputCurve` (SPS(B), paper §3.2), its
refinement from real rounds (`CurveLearner`), and a machine's whole measurement (`ThroughputProfile`). Numbers alone.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..errors import DSparkConfigError, DSparkDataError

_CURVE_FORMAT = "hf-dspark throughput curve 1"
_PROFILE_FORMAT = "hf-dspark throughput profile 1"
_NOISE = 0.04  # by which medians of many rounds may differ for no reason; those of few by more


# --------------------------------------------------------------------------------------------------------------------
# The curve
# --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ThroughputCurve:
    """Seconds of one target forward (a step) as a function of the number of tokens B in it. Immutable.

    Reads as the non-decreasing curve nearest to the points (isotonic regression): more tokens never cost less, and
    what a noisy machine measured against that would send a scheduler to the wrong place. Linear between two points,
    constant before the first, the last slope carried on after the last.

    Attributes:
        tokens: B of each point, ascending.
        seconds: seconds per step there, as measured.

    Raises:
        DSparkConfigError: no points, a B that is no whole number of at least 1 or not above the one before it, or
            seconds that are not positive and finite.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    _x: np.ndarray = field(init=False, repr=False, compare=False)
    _y: np.ndarray = field(init=False, repr=False, compare=False)
    _slope: float = field(init=False, repr=False, compare=False)  # seconds per token after the last point

    def __post_init__(self) -> None:
        _check_points(self.tokens, self.seconds)
        y = _isotonic(self.seconds)
        object.__setattr__(self, "tokens", tuple(int(b) for b in self.tokens))
        object.__setattr__(self, "seconds", tuple(float(s) for s in self.seconds))
        object.__setattr__(self, "_x", np.array(self.tokens, dtype=np.float64))
        object.__setattr__(self, "_y", y)
        slope = (y[-1] - y[-2]) / (self.tokens[-1] - self.tokens[-2]) if len(y) > 1 else 0.0
        object.__setattr__(self, "_slope", float(slope))

    @classmethod
    def from_points(cls, points: Mapping[int, float]) -> ThroughputCurve:
        """From `{tokens: steps per second}`, in any order; the constructor's errors."""
        return cls.from_seconds({b: 1 / sps if sps else math.inf for b, sps in points.items()})

    @classmethod
    def from_seconds(cls, points: Mapping[int, float]) -> ThroughputCurve:
        """From `{tokens: seconds per step}`, in any order; the constructor's errors."""
        return cls(tuple(sorted(points)), tuple(points[b] for b in sorted(points)))

    @overload
    def seconds_per_step(self, tokens: int) -> float: ...
    @overload
    def seconds_per_step(self, tokens: np.ndarray) -> np.ndarray: ...
    def seconds_per_step(self, tokens: int | np.ndarray) -> float | np.ndarray:
        """Seconds of a forward with `tokens` tokens in it; an integer array gives a float64 array of its shape."""
        if isinstance(tokens, np.ndarray):
            inside = np.interp(tokens, self._x, self._y)
            return inside + self._slope * np.maximum(tokens - self._x[-1], 0)
        return float(np.interp(tokens, self._x, self._y)) + self._slope * max(tokens - self.tokens[-1], 0)

    @overload
    def steps_per_second(self, tokens: int) -> float: ...
    @overload
    def steps_per_second(self, tokens: np.ndarray) -> np.ndarray: ...
    def steps_per_second(self, tokens: int | np.ndarray) -> float | np.ndarray:
        """SPS(B): forwards per second with `tokens` tokens in each."""
        return 1 / self.seconds_per_step(tokens)

    def charged(self, draft_seconds: float) -> ThroughputCurve:
        """The curve of whole rounds: the draft's seconds on top of every point.

        Raises:
            DSparkConfigError: `draft_seconds` is negative or not finite.
        """
        if not 0 <= draft_seconds < math.inf:
            raise DSparkConfigError(f"draft_seconds is {draft_seconds}, but must be finite and at least 0.")
        return ThroughputCurve(self.tokens, tuple(seconds + draft_seconds for seconds in self.seconds))

    def is_flat(self, low: int, high: int, tolerance: float = 0.03) -> bool:
        """Whether a step with `high` tokens costs at most `tolerance` (a share) more than one with `low`.

        Length cannot matter on such a curve: verifying the full block is best whatever the confidences.
        """
        return self.seconds_per_step(high) <= (1 + tolerance) * self.seconds_per_step(low)

    def refined(self, measured: Mapping[int, float]) -> ThroughputCurve:
        """The curve with newly measured points `{tokens: seconds}` in the place of its own.

        Points that were not measured are scaled by the median of measured over former seconds: a machine that is
        slower today is slower at every B. No measurements give the curve itself.
        """
        if not measured:
            return self
        ratio = statistics.median(seconds / self.seconds_per_step(b) for b, seconds in measured.items())
        return ThroughputCurve.from_seconds({**{b: s * ratio for b, s in zip(self.tokens, self.seconds)}, **measured})

    def to_dict(self) -> dict[str, Any]:
        """The points, in types that JSON knows."""
        return {"tokens": list(self.tokens), "seconds": list(self.seconds)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the points as JSON; a file that is there is whole."""
        _write_json(path, {"format": _CURVE_FORMAT, **self.to_dict()})

    @classmethod
    def load(cls, path: str | os.PathLike) -> ThroughputCurve:
        """Reads what `save` wrote.

        Raises:
            DSparkDataError: the file is something else; the message names it.
            OSError: there is no such file.
        """
        values = _read_json(path, _CURVE_FORMAT, "a throughput curve", "ThroughputCurve.save")
        with _naming(path, "a throughput curve"):
            return cls(tuple(values["tokens"]), tuple(values["seconds"]))


def _check_points(tokens: Sequence[int], seconds: Sequence[float]) -> None:
    if len(tokens) == 0 or len(tokens) != len(seconds):
        raise DSparkConfigError(
            f"A throughput curve needs at least one point, and as many times as token counts; got {len(tokens)} token "
            f"counts and {len(seconds)} times."
        )
    for i, (b, s) in enumerate(zip(tokens, seconds)):
        if isinstance(b, bool) or not isinstance(b, (int, np.integer)) or b < 1 or (i > 0 and b <= tokens[i - 1]):
            raise DSparkConfigError(
                f"The token counts of a throughput curve are {list(tokens)}, but must be whole numbers from 1 up, "
                "ascending."
            )
        if isinstance(s, bool) or not isinstance(s, (int, float, np.number)) or not 0 < s < math.inf:
            raise DSparkConfigError(
                f"The throughput at {b} tokens is {s!r} seconds per step, but must be positive and finite. Measure it "
                "again."
            )


def _isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in (weighted) least squares, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight and size
    for value, weight in zip(values, weights or [1.0] * len(values)):
        mean, size = float(value), 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, count = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, size = weight + other_weight, size + count
        pools.append((mean, weight, size))
    return np.repeat([mean for mean, _, _ in pools], [size for _, _, size in pools])


# --------------------------------------------------------------------------------------------------------------------
# Refinement from real rounds
# --------------------------------------------------------------------------------------------------------------------
class CurveLearner:
    """A curve from the times of real rounds. The newest `window` times of each token count are kept.

    Medians, so that a round which waited for something else does not count; a token count is believed from `least`
    times on. The curve keeps the steps among them, and not their noise. `add` takes constant time, and `curve`
    works only when something is new.
    """

    def __init__(self, window: int = 64, least: int = 3):
        self._window, self._least = window, least
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._stale: set[int] = set()
        self._base: ThroughputCurve | None = None
        self._curve: ThroughputCurve | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Notes one forward of `tokens` tokens. A time that is not positive and finite (a clock that stood) is left
        out."""
        if 0 < seconds < math.inf:
            self._times.setdefault(tokens, deque(maxlen=self._window)).append(seconds)
            self._stale.add(tokens)

    def count(self, tokens: int) -> int:
        """How many times are kept for this token count."""
        return len(self._times.get(tokens, ()))

    def medians(self) -> dict[int, float]:
        """`{tokens: median seconds}` of the token counts that are believed."""
        for tokens in self._stale:
            if self.count(tokens) >= self._least:
                self._medians[tokens] = statistics.median(self._times[tokens])
        self._stale.clear()
        return self._medians

    def curve(self, base: ThroughputCurve | None = None) -> ThroughputCurve | None:
        """`base` refined by the medians, or the medians alone without one; `None` while nothing is known at all."""
        if not self._stale and base is self._base and self._curve is not None:
            return self._curve
        medians = self.medians()
        if base is not None:
            self._curve = base.refined(medians)
        else:
            counts = {b: self.count(b) for b in medians}
            self._curve = ThroughputCurve.from_seconds(_knots(medians, counts)) if medians else None
        self._base = base
        return self._curve


def _knots(medians: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """Those of `{tokens: seconds}` that matter: straight lines between them miss no other by more than its noise.

    Medians of a few rounds differ by some percent of themselves, and the schedule would take every such bump for a step
    at which more drafts stop to pay. So counts that are rarely seen give way to their neighbours: in the isotonic
    regression, weighted by `counts`, and in what they must differ by. (Douglas and Peucker 1973.)
    """
    tokens = sorted(medians)
    rising = _isotonic([medians[b] for b in tokens], [counts[b] for b in tokens])
    allowed = [_NOISE * (1 + 2 / math.sqrt(counts[b])) for b in tokens]
    kept = {0, len(tokens) - 1}
    spans = [(0, len(tokens) - 1)]
    while spans:
        low, high = spans.pop()
        line = np.interp(tokens[low : high + 1], [tokens[low], tokens[high]], [rising[low], rising[high]])
        misses = np.abs(line / rising[low : high + 1] - 1) / allowed[low : high + 1]
        worst = low + int(misses.argmax())
        if misses[worst - low] > 1:
            kept.add(worst)
            spans += [(low, worst), (worst, high)]
    return {tokens[i]: float(rising[i]) for i in sorted(kept)}


# --------------------------------------------------------------------------------------------------------------------
# A whole measurement
# --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ThroughputProfile:
    """What `measure_throughput` found for one target, and one draft model, on one machine.

    Attributes:
        curves: the target's curve by the number of tokens before the step (context bucket).
        spreads: by context bucket, for each point of its curve: median absolute deviation over median, a share.
        draft_seconds: of drafting 1, 2, …, γ tokens, in the largest context bucket; `None` without a draft model.
        facts: what was measured and where (see `generation/profiling.py`).

    Raises:
        DSparkConfigError: there is no curve, the parts do not fit each other, or a time is not positive and finite.
    """

    curves: dict[int, ThroughputCurve]
    spreads: dict[int, tuple[float, ...]]
    draft_seconds: tuple[float, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.curves or {c: len(s) for c, s in self.spreads.items()} != {
            c: len(curve.tokens) for c, curve in self.curves.items()
        }:
            raise DSparkConfigError(
                f"A throughput profile needs a curve per context and a spread per point; got curves for "
                f"{list(self.curves)} and spreads for {list(self.spreads)}."
            )
        times = self.draft_seconds
        if times is not None and not (times and all(0 < seconds < math.inf for seconds in times)):
            raise DSparkConfigError(f"draft_seconds is {times}, but must be positive and finite, one per length.")

    def curve(self, context_tokens: int) -> ThroughputCurve:
        """The curve of the smallest bucket that holds `context_tokens`, else of the largest."""
        buckets = sorted(self.curves)
        return self.curves[buckets[min(bisect_left(buckets, context_tokens), len(buckets) - 1)]]

    @property
    def longest(self) -> int:
        """The longest block that all curves cover, and no longer than the draft's γ; at least 1."""
        covered = max(1, min(curve.tokens[-1] for curve in self.curves.values()) - 1)
        return covered if self.draft_seconds is None else min(covered, len(self.draft_seconds))

    @cached_property
    def draft_line(self) -> tuple[float, float]:
        """Seconds that any draft costs, and seconds per drafted token, both ≥ 0: least squares over the lengths."""
        if self.draft_seconds is None:
            return 0.0, 0.0
        seconds = np.array(self.draft_seconds)
        lengths = np.arange(1, len(seconds) + 1)
        deviation = lengths - lengths.mean()
        square = float((deviation**2).sum())
        step = max(float((deviation * seconds).sum()) / square, 0.0) if square else 0.0
        step = min(step, float(seconds.mean() / lengths.mean()))  # else the fixed part would be negative
        return float(seconds.mean() - step * lengths.mean()), step

    def draft_cost(self, length: int) -> float:
        """Seconds of drafting `length` tokens; 0 for none, and 0 when no draft model was measured."""
        fixed, step = self.draft_line
        return fixed + step * length if length > 0 else 0.0

    def expected_speedup(self, acceptance: float, context_tokens: int, length: int) -> float:
        """Speed over plain decoding with blocks of `length` drafts, each accepted with probability `acceptance` if all
        before it were: (1 + p + … + p^ℓ) · t(1) / (t(ℓ+1) + draft(ℓ))."""
        curve = self.curve(context_tokens)
        tokens = sum(acceptance**k for k in range(length + 1))
        return tokens * curve.seconds_per_step(1) / (curve.seconds_per_step(length + 1) + self.draft_cost(length))

    def best_length(self, acceptance: float, context_tokens: int) -> int:
        """The block length from 1 up with the highest `expected_speedup`; the full one on a flat curve."""
        if self.curve(context_tokens).is_flat(1, self.longest + 1):
            return self.longest
        lengths = range(1, self.longest + 1)
        return max(lengths, key=lambda length: self.expected_speedup(acceptance, context_tokens, length))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return {
            "facts": dict(self.facts),
            "contexts": {
                str(context): {**curve.to_dict(), "spread": list(self.spreads[context])}
                for context, curve in sorted(self.curves.items())
            },
            "draft_seconds": None if self.draft_seconds is None else list(self.draft_seconds),
        }

    def save(self, path: str | os.PathLike) -> None:
        """Writes everything as JSON; a file that is there is whole."""
        _write_json(path, {"format": _PROFILE_FORMAT, **self.to_dict()})

    @classmethod
    def load(cls, path: str | os.PathLike) -> ThroughputProfile:
        """Reads what `save` wrote.

        Raises:
            DSparkDataError: the file is something else; the message names it.
            OSError: there is no such file.
        """
        values = _read_json(path, _PROFILE_FORMAT, "a throughput profile", "hf-dspark profile")
        with _naming(path, "a throughput profile"):
            contexts = {int(context): entry for context, entry in values["contexts"].items()}
            draft_seconds = values["draft_seconds"]
            return cls(
                {c: ThroughputCurve(tuple(e["tokens"]), tuple(e["seconds"])) for c, e in contexts.items()},
                {c: tuple(e["spread"]) for c, e in contexts.items()},
                None if draft_seconds is None else tuple(draft_seconds),
                dict(values["facts"]),
            )


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------
def _write_json(path: str | os.PathLike, values: dict[str, Any]) -> None:
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may measure at once
    try:
        temporary.write_text(json.dumps(values, indent=1, allow_nan=False), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_json(path: str | os.PathLike, wanted: str, what: str, made_by: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise DSparkDataError(f"{path} is not {what} ({error}). Write a new one with {made_by}.") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != wanted:
        raise DSparkDataError(
            f"{path} is not {what}: its format is {found!r}, not {wanted!r}. Write a new one with {made_by}."
        )
    return values


@contextmanager
def _naming(path: str | os.PathLike, what: str) -> Iterator[None]:
    """Around the reading of values: whatever is wrong with them becomes one error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DSparkDataError(
            f"{path} is not {what} ({type(error).__name__}: {error}). Measure again and write a new one."
        ) from error
