"""How well confidences are calibrated, per draft position, on blocks that were not used for fitting.

The expected calibration error is that of the survival a_k = c₁·…·c_k against "at least k drafts accepted", over all
full blocks, with ten equal-width bins. Two AUROCs stand beside it: of c_k among the blocks whose first k-1 drafts were
accepted (temperatures cannot change it), and of a_k over all blocks (they can: they change each position's weight).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..errors import DSparkDataError, DSparkDependencyError
from ..scheduling.calibration import (
    BINS,
    MINIMUM_BLOCKS,
    SequentialTemperatureScaling,
    bin_index,
    expected_calibration_error,
    noise_floor,
    survivals,
)

try:
    from torchmetrics.functional.classification import binary_auroc
except ImportError as error:
    raise DSparkDependencyError("Calibration needs torchmetrics: pip install 'hf-dspark[eval]'.") from error

BOOTSTRAP_SAMPLES = 1000
_CHUNK = 50  # resamples at a time, so that their weights take megabytes and not gigabytes

Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]  # confidence logits [N, γ], accepted [N], proposed [N]


@dataclass
class Quality:
    """What confidences were worth at one position, before or after calibration.

    Attributes:
        ece: of a_k, from 0 to 1.
        ece_interval: 95 %, by drawing blocks anew (see `bootstrap_ece`).
        noise_floor: the ECE that chance alone gives perfectly calibrated a_k of this many blocks.
        auroc: of c_k, among blocks whose first k-1 drafts were accepted; `None` where these all ended alike.
        survival_auroc: of a_k, over all blocks.
        bins: per bin the blocks in it, the mean a_k, and the share of them that accepted k drafts or more.
    """

    ece: float
    ece_interval: tuple[float, float]
    noise_floor: float
    auroc: float | None
    survival_auroc: float | None
    bins: list[dict[str, Any]]


@dataclass
class Position:
    """One draft position on the held-out blocks.

    Attributes:
        position: k, from 1.
        temperature: T_k.
        shift: s_k.
        reached: blocks whose first k-1 drafts were accepted.
        survival: the share of all blocks that accepted k drafts or more.
    """

    position: int
    temperature: float
    shift: float
    reached: int
    survival: float
    before: Quality
    after: Quality


@dataclass
class Calibration:
    """The temperatures of one decoding mode, and what they do.

    Attributes:
        mode: `"greedy"` or `"sample"`.
        temperatures, shifts: γ floats each.
        fit_blocks, fit_dropped: full blocks that were fitted on, and blocks left out.
        held_out_blocks, held_out_dropped: full blocks that `positions` speak of, and blocks left out.
        positions: per draft position.
    """

    mode: str
    temperatures: list[float]
    shifts: list[float]
    fit_blocks: int
    fit_dropped: int
    held_out_blocks: int
    held_out_dropped: int
    positions: list[Position]

    @property
    def is_worse(self) -> bool:
        """Whether the mean ECE went up by more than chance explains, so that the temperatures had better not be
        used: the held-out blocks are then of another kind than those fitted on."""
        rise = np.mean([p.after.ece - p.before.ece for p in self.positions])
        return bool(rise > np.mean([p.after.noise_floor for p in self.positions]))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def calibrate_blocks(
    mode: str, fit: Blocks, held_out: Blocks, minimum_blocks: int = MINIMUM_BLOCKS, shift: bool = True
) -> Calibration:
    """Fits temperatures, and shifts, on some blocks and measures them on others.

    Args:
        mode: what kind of blocks they are, for the record and for messages.
        fit, held_out: confidence logits [N, γ], accepted [N], proposed [N].
        minimum_blocks: the fewest full blocks to fit on.
        shift: see `SequentialTemperatureScaling`.

    Raises:
        DSparkDataError: too few full blocks on either side.
    """
    scaling = SequentialTemperatureScaling(minimum_blocks, shift)
    try:
        temperatures = [round(t, 4) for t in scaling.fit(*fit)]
    except DSparkDataError as error:
        raise DSparkDataError(f"{mode}: {error}") from error
    logits, accepted, proposed = held_out
    known = (proposed == logits.shape[1]) & ~np.isnan(logits).any(axis=1)
    if not known.any():
        raise DSparkDataError(f"{mode}: not one held-out block is full. Hold out more prompts.")
    shifts = [round(shift, 4) for shift in scaling.shifts]
    positions = assess(logits[known], accepted[known], temperatures, shifts)
    count = int(known.sum())
    return Calibration(mode, temperatures, shifts, scaling.used, scaling.dropped, count, len(known) - count, positions)


def assess(
    confidence_logits: np.ndarray, accepted: np.ndarray, temperatures: list[float], shifts: list[float]
) -> list[Position]:
    """Every position before and after calibration, on full blocks.

    Args:
        confidence_logits: [N, γ], without NaN.
        accepted: int [N].
        temperatures, shifts: γ floats each, the temperatures positive.
    """
    depth = len(temperatures)
    events = accepted[:, None] > np.arange(depth)  # [N, γ]
    apply = SequentialTemperatureScaling.apply
    c = [apply(confidence_logits, np.ones(depth)), apply(confidence_logits, temperatures, shifts)]
    a = [survivals(confidences) for confidences in c]
    # Both in one go: on the same resamples.
    intervals = bootstrap_ece(np.concatenate(a, axis=1), np.concatenate([events, events], axis=1))  # [2, 2γ]

    def quality(which: int, k: int) -> Quality:
        reached = accepted >= k
        low, high = intervals[:, which * depth + k]
        return Quality(
            ece=expected_calibration_error(a[which][:, k], events[:, k]),
            ece_interval=(float(low), float(high)),
            noise_floor=noise_floor(a[which][:, k]),
            auroc=auroc(c[which][reached, k], events[reached, k]),
            survival_auroc=auroc(a[which][:, k], events[:, k]),
            bins=reliability_bins(a[which][:, k], events[:, k]),
        )

    return [
        Position(
            k + 1,
            temperatures[k],
            shifts[k],
            int((accepted >= k).sum()),
            events[:, k].mean().item(),
            quality(0, k),
            quality(1, k),
        )
        for k in range(depth)
    ]


def bootstrap_ece(
    probabilities: np.ndarray,
    events: np.ndarray,
    samples: int = BOOTSTRAP_SAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> np.ndarray:
    """Intervals of the ECE of each column, float64 [2, M] (low, high), over resampled rows.

    Chance raises an ECE, and a resample has the chance of the data and its own. So the percentiles are shifted by what
    the resamples' mean exceeds the ECE by; as they are, they miss well-calibrated columns' ECE too often.

    Args:
        probabilities, events: [N, M]; row i is one block, and is drawn as a whole.
    """
    count, columns = probabilities.shape
    # A bin's part of the ECE is |Σ(p - y)| / N, so a resample is a product of its row counts with this table.
    table = np.zeros((count, columns * BINS))
    place = bin_index(probabilities) + BINS * np.arange(columns)
    np.put_along_axis(table, place, probabilities - events, axis=1)
    rng = np.random.default_rng(seed)
    found = []
    for start in range(0, samples, _CHUNK):
        size = min(_CHUNK, samples - start)
        drawn = rng.integers(count, size=(size, count))
        weights = np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(np.float64)
        gaps = np.abs(weights @ table).reshape(size, columns, BINS)
        found.append(gaps.sum(axis=2) / count)
    drawn_anew = np.concatenate(found)  # [samples, M]
    tail = (1 - level) / 2
    excess = drawn_anew.mean(axis=0) - np.abs(table.sum(axis=0)).reshape(columns, BINS).sum(axis=1) / count
    return (np.quantile(drawn_anew, [tail, 1 - tail], axis=0) - excess).clip(min=0)


def auroc(scores: np.ndarray, events: np.ndarray) -> float | None:
    """Area under the ROC curve; `None` where there is only one kind of event."""
    if events.all() or not events.any():
        return None
    return binary_auroc(torch.from_numpy(scores), torch.from_numpy(events).long()).item()


def reliability_bins(probabilities: np.ndarray, events: np.ndarray) -> list[dict[str, Any]]:
    """Per equal-width bin `count`, and (`None` in an empty one) the mean `predicted` and the `observed` share."""
    index = bin_index(probabilities)
    counts = np.bincount(index, minlength=BINS)
    predicted = np.bincount(index, weights=probabilities, minlength=BINS)
    observed = np.bincount(index, weights=events, minlength=BINS)
    return [
        {"count": int(n), "predicted": float(p / n) if n else None, "observed": float(o / n) if n else None}
        for n, p, o in zip(counts, predicted, observed)
    ]
