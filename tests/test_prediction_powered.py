"""Prediction-powered means: unbiased whatever the judge, narrower with a good one, no worse with a useless one."""

import numpy as np
import pytest

from rl.statistics import mean_interval
from rl.statistics.prediction_powered import FEWEST_LABELS, powered_mean

WORLDS = 400


def judged(
    correlation: float, n: int, seed: int, shift: float = 0.0, stretch: float = 1.0
) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    y = random.normal(0.3, 1.0, n + 1000)
    f = correlation * (y - 0.3) + (1 - correlation**2) ** 0.5 * random.normal(0, 1, n + 1000)
    f = shift + stretch * f
    return y[:n], f[:n], f[n:]


@pytest.mark.parametrize(
    ("correlation", "shift", "stretch", "least"), [(0.8, 0, 1, 0.2), (0.8, 0.4, 1.7, 0.2), (0.0, 0, 1, -0.08)]
)
@pytest.mark.parametrize("n", [30, 100])
def test_intervals_hold(correlation: float, shift: float, stretch: float, least: float, n: int) -> None:
    found = [powered_mean(*judged(correlation, n, seed, shift, stretch)) for seed in range(WORLDS)]
    assert 0.92 <= np.mean([one.low <= 0.3 <= one.high for one in found]) <= 0.98
    assert np.mean([one.narrower for one in found]) > least
    assert abs(np.mean([one.value for one in found]) - 0.3) < 0.03


def test_estimates_by_hand() -> None:
    # without belief it is the labels mean
    y, _f, _others = judged(0.8, 40, 1)
    found = powered_mean(y, np.zeros(40), np.zeros(500))
    plain = mean_interval(list(y))
    assert found.weight == 0
    assert found.value == pytest.approx(plain.value)
    assert found.labels_alone == pytest.approx((plain.low, plain.high))
    assert not found.helps
    # the estimate by hand: A judge that is always right: the estimate moves to its mean over all items, by
    # the weight 1 / (1 + n / N).
    random = np.random.default_rng(3)
    y, others = random.normal(0, 1, 50), random.normal(0, 1, 150)
    found = powered_mean(y, y, others)
    assert found.weight == pytest.approx(0.75, abs=0.02)
    assert found.value == pytest.approx(y.mean() + 0.75 * (others.mean() - y.mean()), abs=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        ([1.0] * 5, [1.0] * 5, [1.0]),
        ([1.0] * FEWEST_LABELS, [1.0] * FEWEST_LABELS, []),
        ([1.0] * FEWEST_LABELS, [1.0], [1.0]),
        ([float("nan")] * FEWEST_LABELS, [1.0] * FEWEST_LABELS, [1.0]),
    ],
)
def test_too_little_and_what_is_not_finite_is_refused(wrong: tuple[list[float], ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        powered_mean(*wrong)
