"""Sequential temperature scaling on synthetic blocks whose temperatures are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_dspark.errors import DSparkConfigError, DSparkDataError, DSparkError
from hf_dspark.scheduling.calibration import (
    SequentialTemperatureScaling,
    expected_calibration_error,
    noise_floor,
    survivals,
)

TRUE = [1.6, 2.0, 0.8, 1.3]


def synthetic(count, temperatures=TRUE, seed=0, spread=2.0, centre=1.0):
    """Logits, and acceptance drawn left to right with probability σ(z / T_k)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(centre, spread, (count, len(temperatures)))
    accepts = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / temperatures))
    accepted = np.cumprod(accepts, axis=1).sum(axis=1)
    return logits, accepted, np.full(count, len(temperatures))


def ece_by_position(confidences, accepted):
    a = survivals(confidences)
    return np.array([expected_calibration_error(a[:, k], accepted > k) for k in range(a.shape[1])])


def test_known_temperatures_are_recovered():
    scaling = SequentialTemperatureScaling()
    temperatures = scaling.fit(*synthetic(20000))
    assert np.allclose(np.log(temperatures), np.log(TRUE), atol=0.12), temperatures
    assert (scaling.used, scaling.dropped) == (20000, 0)


@pytest.mark.parametrize("seed", range(4))
def test_no_position_falls_into_a_false_minimum_with_few_blocks(seed):
    # Logits around 0 spread over both signs: several temperatures get the mean of the fullest bin right.
    logits, accepted, proposed = synthetic(2500, [2.5, 2.0, 1.5, 0.7], seed, spread=3.0, centre=0.0)
    temperatures = SequentialTemperatureScaling().fit(logits, accepted, proposed)
    assert (np.abs(np.log(temperatures) - np.log([2.5, 2.0, 1.5, 0.7])) < np.log(2)).all(), temperatures


def test_over_confident_blocks_are_calibrated_on_blocks_not_used_for_fitting():
    logits, accepted, proposed = synthetic(20000, [2.0, 1.8, 1.6, 1.5])
    scaling = SequentialTemperatureScaling()
    temperatures = scaling.fit(logits[:10000], accepted[:10000], proposed[:10000])
    held_out, truth = logits[10000:], accepted[10000:]
    before = ece_by_position(scaling.apply(held_out, np.ones(4)), truth)
    after = ece_by_position(scaling.apply(held_out, temperatures), truth)
    assert (before > 0.05).all() and (after < 0.015).all(), (before, after)


def test_known_shifts_are_recovered():
    """A head that is too sure everywhere: logits are 0.6 too high before they are scaled."""
    logits, accepted, proposed = synthetic(20000)
    scaling = SequentialTemperatureScaling(shift=True)
    shifted = logits + 0.6 * np.array(TRUE)
    temperatures = scaling.fit(shifted, accepted, proposed)
    assert np.allclose(np.log(temperatures), np.log(TRUE), atol=0.15), temperatures
    assert np.allclose(scaling.shifts, -0.6, atol=0.12), scaling.shifts
    calibrated = scaling.apply(shifted, temperatures, scaling.shifts)
    assert (ece_by_position(calibrated, accepted) < 0.01).all()
    # Temperatures alone cannot: they draw towards one half, and this head must be drawn down.
    alone = SequentialTemperatureScaling()
    scaled = alone.apply(shifted, alone.fit(shifted, accepted, proposed))
    assert alone.shifts == [0.0] * 4 and ece_by_position(scaled, accepted)[0] > 0.02


def test_a_shift_stays_finite_where_every_draft_fails():
    logits, _, proposed = synthetic(3000)
    scaling = SequentialTemperatureScaling(shift=True)
    scaling.fit(logits, np.zeros(3000, dtype=int), proposed)
    assert np.isfinite(scaling.shifts).all() and min(scaling.shifts) < -3


def test_each_position_is_fitted_on_the_product_not_alone():
    # Acceptance of the second draft depends on the first one's logit too. Alone, draft 2 given draft 1 has T = 1; the
    # product is only calibrated with another one.
    rng = np.random.default_rng(0)
    logits = rng.normal(0.5, 1.5, (40000, 2))
    c = 1 / (1 + np.exp(-logits))
    first = rng.random(40000) < c[:, 0]
    shift = np.where(logits[:, 0] > 0.5, -1.0, 1.0)
    second = first & (rng.random(40000) < 1 / (1 + np.exp(-(logits[:, 1] + shift))))
    scaling = SequentialTemperatureScaling()
    accepted = first.astype(int) + second
    temperatures = scaling.fit(logits, accepted, np.full(40000, 2))
    ones = ece_by_position(scaling.apply(logits, np.ones(2)), accepted)
    fitted = ece_by_position(scaling.apply(logits, temperatures), accepted)
    assert temperatures[0] == pytest.approx(1.0, abs=0.05) and abs(np.log(temperatures[1])) > 0.1
    assert fitted[1] < ones[1] - 0.005, (ones, fitted)


def test_well_calibrated_logits_keep_a_temperature_of_about_one():
    temperatures = SequentialTemperatureScaling().fit(*synthetic(10000, [1.0, 1.0, 1.0]))
    assert np.allclose(temperatures, 1.0, atol=0.12), temperatures


def test_where_the_data_say_nothing_the_temperature_is_one():
    accepted = np.tile([0, 1], 1500)
    logits = np.zeros((3000, 2))  # σ(0 / T) = 1/2 for every T
    assert SequentialTemperatureScaling().fit(logits, accepted, np.full(3000, 2)) == [1.0, 1.0]


def test_the_order_of_each_position_is_kept():
    logits, _, _ = synthetic(500)
    confidences = SequentialTemperatureScaling.apply(logits, [0.3, 1.7, 4.0, 1.0])
    assert (confidences.argsort(axis=0) == logits.argsort(axis=0)).all()
    assert confidences.dtype == np.float64 and confidences.shape == (500, 4)


def test_apply_divides_the_logits():
    torch.manual_seed(0)
    logits = torch.randn(7, 3)
    expected = torch.sigmoid(logits.double() / torch.tensor([0.5, 1.0, 2.0]))
    assert np.allclose(SequentialTemperatureScaling.apply(logits, [0.5, 1.0, 2.0]), expected)
    extreme = SequentialTemperatureScaling.apply([[np.inf, -np.inf, 800.0, -800.0]], np.ones(4))
    assert extreme.tolist() == [[1.0, 0.0, 1.0, pytest.approx(0.0)]]


def test_cut_blocks_are_dropped_and_counted():
    logits, accepted, proposed = synthetic(3000)
    expected = SequentialTemperatureScaling().fit(logits, accepted, proposed)
    cut = np.full((500, 4), np.nan)
    scaling = SequentialTemperatureScaling()
    temperatures = scaling.fit(
        np.concatenate([cut, logits]),
        np.concatenate([np.zeros(500, int), accepted]),
        np.concatenate([np.tile([0, 3], 250), proposed]),
    )
    assert temperatures == expected
    assert (scaling.used, scaling.dropped, scaling.dropped_nan) == (3000, 500, 0)


def test_full_blocks_with_a_nan_logit_are_dropped_and_counted():
    logits, accepted, proposed = synthetic(3000)
    logits[::100, 2] = np.nan
    scaling = SequentialTemperatureScaling()
    assert np.isfinite(scaling.fit(logits, accepted, proposed)).all()
    assert (scaling.used, scaling.dropped, scaling.dropped_nan) == (2970, 30, 30)


def test_too_few_blocks_are_refused():
    logits, accepted, proposed = synthetic(2100)
    proposed[:101], accepted[:101] = 3, np.minimum(accepted[:101], 3)
    scaling = SequentialTemperatureScaling()
    with pytest.raises(DSparkError, match=r"1999 full blocks \(101 were left out\).*at least 2000.*more prompts"):
        scaling.fit(logits, accepted, proposed)
    proposed[0] = 4
    scaling.fit(logits, accepted, proposed)
    logits[:150, 0] = np.nan
    with pytest.raises(DSparkError, match="50 of them for NaN logits"):
        scaling.fit(logits, accepted, proposed)
    assert len(SequentialTemperatureScaling(minimum_blocks=10).fit(logits, accepted, proposed)) == 4
    with pytest.raises(DSparkConfigError, match="minimum_blocks is 0"):
        SequentialTemperatureScaling(minimum_blocks=0)


@pytest.mark.parametrize(
    "accepted, proposed, message",
    [
        ([5, 0], [4, 4], "Block 0 has accepted 5 of proposed 4"),
        ([0, -1], [4, 4], "Block 1 has accepted -1"),
        ([0, 3], [4, 2], "Block 1 has accepted 3 of proposed 2"),
        ([0, 0], [4, 5], "proposed ≤ 4"),
        ([0], [4, 4], "do not fit"),
    ],
)
def test_counts_that_cannot_be_are_refused(accepted, proposed, message):
    with pytest.raises(DSparkDataError, match=message):
        SequentialTemperatureScaling().fit(np.zeros((2, 4)), accepted, proposed)


def test_bf16_tensors_are_taken():
    logits, accepted, proposed = synthetic(2500)
    tensors = torch.tensor(logits).bfloat16(), torch.tensor(accepted), torch.tensor(proposed)
    as_arrays = SequentialTemperatureScaling().fit(tensors[0].double().numpy(), accepted, proposed)
    assert SequentialTemperatureScaling().fit(*tensors) == as_arrays


def test_ece_by_hand():
    probabilities = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    events = np.array([0, 1, 1, 1, 1])
    # Two bins: 2/5 · |0.05 - 0.5| + 3/5 · |2.9 / 3 - 1|
    assert expected_calibration_error(probabilities, events) == pytest.approx(0.18 + 0.02)


def test_the_noise_floor_is_the_mean_ece_of_calibrated_probabilities():
    rng = np.random.default_rng(0)
    probabilities = rng.beta(1, 3, 2000)
    chance = [expected_calibration_error(probabilities, rng.random(2000) < probabilities) for _ in range(300)]
    assert noise_floor(probabilities) == pytest.approx(np.mean(chance), rel=0.05)
