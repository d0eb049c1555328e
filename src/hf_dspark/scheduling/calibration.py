"""Sequential temperature scaling of the confidence head, and how calibration is measured (paper §3.2).

The scheduler multiplies confidences: a_k = c₁·…·c_k is the chance that a round accepts at least k drafts. So what has
to be calibrated is the product, and the temperature of position k is fitted with those before it already in place.

Numbers alone: logits of the confidence head [N, γ], and for each of the N blocks how many drafts were accepted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import DSparkConfigError, DSparkDataError

BINS = 10
MINIMUM_BLOCKS = 2000

_LOWEST, _HIGHEST = 0.1, 10.0
_COARSE_POINTS = 81  # odd, so that 1 is among them
_FINE_POINTS = 21
_NEAR = 0.5  # of the noise floor
_FARTHEST, _HALVINGS = 6.0, 30  # of a shift: a head that is off by more says nothing


def survivals(confidences: np.ndarray) -> np.ndarray:
    """a [N, γ] from c [N, γ], float64: a_k = c₁·…·c_k."""
    return np.cumprod(np.asarray(confidences, dtype=np.float64), axis=-1)


def bin_index(probabilities: np.ndarray) -> np.ndarray:
    """Which of the `BINS` equal-width bins of [0, 1] each probability is in; 1 itself is in the last one."""
    return np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)


def expected_calibration_error(probabilities: np.ndarray, events: np.ndarray) -> float:
    """ECE of probabilities [N] against 0/1 events [N]: the mean gap between the two over ten equal-width bins, each
    weighted by its share of the blocks. From 0 to 1."""
    gaps = np.bincount(bin_index(probabilities), weights=probabilities - events, minlength=BINS)
    return float(np.abs(gaps).sum() / len(probabilities))


def noise_floor(probabilities: np.ndarray) -> float:
    """The ECE that perfectly calibrated probabilities [N] show by chance, on average: events drawn from them gather a
    gap of standard deviation √Σp(1-p) in each bin, of which the mean size is √(2/π) times that."""
    variances = np.bincount(bin_index(probabilities), weights=probabilities * (1 - probabilities), minlength=BINS)
    return float(np.sqrt(2 / np.pi * variances).sum() / len(probabilities))


class SequentialTemperatureScaling:
    """Fits one temperature per draft position, left to right; c_k = σ(logit_k / T_k + s_k), s_k = 0 without `shift`.

    For position k it searches a grid from 0.1 to 10 (log-spaced, then finer around the best) for the temperature with
    the lowest ECE of a_k against the event "at least k drafts accepted", those of the earlier positions being fixed.

    That ECE is a step function of the temperature, full of chance: blocks hop between bins, and where most of them
    lie in one bin, any temperature that gets their mean right scores well. On synthetic blocks its bare minimum is
    off by up to ten times the error that the data allow. So all temperatures whose ECE exceeds the lowest one by at
    most half the noise floor count as equally good, and the likelihood decides among them (a proper score, smooth,
    with one minimum), times a weak log-normal prior of unit width around 1: where the data say nothing, T = 1.

    A positive factor keeps the order of c_k, so its AUROC stays as it was; so does adding a number.

    The paper has temperatures alone. A temperature draws every c_k towards one half, so it cannot mend a head that is a
    little too sure everywhere, as on prompts of another kind than its training text. With `shift` each temperature of
    the search comes with the s_k that makes the mean of a_k right, and the rest is as above.

    Attributes:
        shifts: s_k of the last `fit`, γ floats.
        used: blocks that the last `fit` used.
        dropped: blocks that it left out: cut short (by a length limit, an end of text, a threshold, the scheduler), or
            with a NaN logit.
        dropped_nan: of these, the full blocks with a NaN logit; many of them mean that the draft overflows.
    """

    def __init__(self, minimum_blocks: int = MINIMUM_BLOCKS, shift: bool = False):
        """
        Args:
            minimum_blocks: with fewer full blocks `fit` refuses; chance would decide.
            shift: whether to fit s_k, too.
        """
        if minimum_blocks < 1:
            raise DSparkConfigError(f"minimum_blocks is {minimum_blocks}, but must be at least 1.")
        self.minimum_blocks, self.shift = minimum_blocks, shift
        self.shifts: list[float] = []
        self.used = self.dropped = self.dropped_nan = 0

    def fit(self, confidence_logits: Any, accepted: Any, proposed: Any) -> list[float]:
        """The temperatures, γ floats.

        Args:
            confidence_logits: [N, γ], raw logits of the confidence head. Infinite ones are certain; rows of blocks
                that are not full may hold anything.
            accepted: int [N], drafts accepted in each block, 0 to γ.
            proposed: int [N], drafts whose fate is known; a block with fewer than γ is left out, because acceptance
                beyond them was not observed.

        Raises:
            DSparkDataError: shapes or counts do not fit, or fewer than `minimum_blocks` full blocks.
        """
        logits, accepted, proposed = _array(confidence_logits, np.float64), _array(accepted), _array(proposed)
        if logits.ndim != 2 or logits.shape[1] < 1 or not accepted.shape == proposed.shape == logits.shape[:1]:
            raise DSparkDataError(
                f"confidence_logits {logits.shape}, accepted {accepted.shape} and proposed {proposed.shape} do not fit "
                "each other; give [N, γ], [N] and [N]."
            )
        positions = logits.shape[1]
        wrong = (accepted < 0) | (accepted > proposed) | (proposed > positions)
        if wrong.any():
            i = int(wrong.argmax())
            raise DSparkDataError(
                f"Block {i} has accepted {accepted[i]} of proposed {proposed[i]}; "
                f"0 ≤ accepted ≤ proposed ≤ {positions} must hold."
            )
        full = proposed == positions
        known = full & ~np.isnan(logits).any(axis=1)
        self.used = int(known.sum())
        self.dropped = len(logits) - self.used
        self.dropped_nan = int(full.sum()) - self.used
        if self.used < self.minimum_blocks:
            nan = f", {self.dropped_nan} of them for NaN logits" if self.dropped_nan else ""
            raise DSparkDataError(
                f"{self.used} full blocks ({self.dropped} were left out{nan}), but at least {self.minimum_blocks} are "
                "needed to fit temperatures. Generate from more prompts, or more tokens from each."
            )
        logits, accepted = logits[known], accepted[known]
        survival = np.ones(len(logits))
        temperatures: list[float] = []
        self.shifts = []
        for k in range(positions):
            temperature, shift = self._fit_position(logits[:, k], survival, accepted > k)
            temperatures.append(temperature)
            self.shifts.append(shift)
            survival = survival * _sigmoid(logits[:, k] / temperature + shift)
        return temperatures

    @staticmethod
    def apply(confidence_logits: Any, temperatures: Any, shifts: Any = 0.0) -> np.ndarray:
        """c [N, γ] = σ(logit / T + s), float64.

        Args:
            confidence_logits: [N, γ].
            temperatures: γ positive numbers; ones give the confidences as the head has them.
            shifts: γ numbers; 0 for none.
        """
        scaled = _array(confidence_logits, np.float64) / _array(temperatures, np.float64)
        return _sigmoid(scaled + _array(shifts, np.float64))

    def _fit_position(self, logits: np.ndarray, survival: np.ndarray, events: np.ndarray) -> tuple[float, float]:
        """T and s of one position; `survival` [N] is a_{k-1}, `events` bool [N] whether ≥ k were accepted."""

        def shift_for(temperature: float) -> float:
            return _shift(logits / temperature, survival, events) if self.shift else 0.0

        def scores_of(temperatures: np.ndarray) -> np.ndarray:
            return np.array([_scores(t, shift_for(t), logits, survival, events) for t in temperatures])

        grid = np.geomspace(_LOWEST, _HIGHEST, _COARSE_POINTS)
        scores = scores_of(grid)
        best = _choose(grid, scores)
        around = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], _FINE_POINTS)
        scores, grid = np.concatenate([scores, scores_of(around)]), np.concatenate([grid, around])
        temperature = float(grid[_choose(grid, scores)])
        return temperature, shift_for(temperature)


def _shift(scaled: np.ndarray, survival: np.ndarray, events: np.ndarray) -> float:
    """The s for which the mean of a_k is the share of `events`, by halving; within ±`_FARTHEST` where there is none."""
    low, high, wanted = -_FARTHEST, _FARTHEST, events.mean()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if (survival * _sigmoid(scaled + middle)).mean() < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _scores(
    temperature: float, shift: float, logits: np.ndarray, survival: np.ndarray, events: np.ndarray
) -> tuple[float, ...]:
    """ECE, its noise floor, and the negative log posterior."""
    a = survival * _sigmoid(logits / temperature + shift)
    tiny = np.finfo(np.float64).tiny
    loss = -np.log(np.where(events, a, 1 - a).clip(min=tiny)).sum() + np.log(temperature) ** 2 / 2
    return expected_calibration_error(a, events), noise_floor(a), float(loss)


def _choose(grid: np.ndarray, scores: np.ndarray) -> int:
    ece, floor, loss = scores.T
    lowest = ece.argmin()
    near = ece <= ece[lowest] + _NEAR * floor[lowest]
    candidates = np.flatnonzero(near & (loss <= loss[near].min() + 1e-9))  # equal up to rounding: the one nearest 1
    return int(candidates[np.abs(np.log(grid[candidates])).argmin()])


def _sigmoid(values: np.ndarray) -> np.ndarray:
    # Either exponential is of a number ≤ 0, so nothing overflows.
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1, small) / (1 + small)


def _array(values: Any, dtype: Any = None) -> np.ndarray:
    if isinstance(values, torch.Tensor):  # numpy knows no bf16, and nothing of devices
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)
