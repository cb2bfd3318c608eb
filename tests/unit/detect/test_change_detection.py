"""The sequential test under the detector: what it finds, and what it takes for noise."""

import numpy as np
import pytest
from numpy.typing import NDArray
from plain_references import MeanErrors, RecentValues

from megatronapp_analyzer.detect.compute_channel import LogChannel
from megatronapp_analyzer.detect.settings import DEVICE, DetectorSettings
from megatronapp_analyzer.detect.statistics.change_detection import WINDOWS, error_of_mean

Floats = NDArray[np.float64]
REPLICAS, STAGES = 4, 2
UNITS = REPLICAS * STAGES


def correlated(rng: np.random.Generator, steps: int, columns: int, sigma: float, memory: float) -> Floats:
    out = rng.standard_normal((steps, columns))
    for step in range(1, steps):
        out[step] = memory * out[step - 1] + np.sqrt(1 - memory**2) * out[step]
    return out * sigma


def judged(logs: Floats) -> NDArray[np.bool_]:
    """Return for each step the units that are over, of compute times with these logarithms."""
    channel = LogChannel(
        np.repeat(np.arange(STAGES), REPLICAS), np.tile(np.arange(REPLICAS), STAGES), DetectorSettings()
    )
    return np.array([channel.read(0.05 * np.exp(row), DEVICE, np.zeros(UNITS)).over for row in logs])


def noise(seed: int, steps: int) -> Floats:
    """Draw a difference between ranks, slow and fast noise of each, and slow noise of all."""
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 0.004, UNITS)
    own = correlated(rng, steps, UNITS, 0.004, 0.8) + rng.normal(0, 0.005, (steps, UNITS))
    return bias + own + correlated(rng, steps, 1, 0.01, 0.95)


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
def test_the_error_of_a_mean_is_that_of_a_process_of_first_order(memory: float) -> None:
    values = correlated(np.random.default_rng(1), 40, 4000, 1.0, memory)
    means = np.cumsum(values, axis=0) / np.arange(1, 41)[:, None]
    for steps in (1, 2, 7, 40):
        assert error_of_mean(np.array([steps]), memory)[0] == pytest.approx(means[steps - 1].std(), rel=0.05)


def test_errors_of_means_are_learned_whatever_the_correlation() -> None:
    values = correlated(np.random.default_rng(2), 600, 200, 1.0, 0.9)
    recent, errors = RecentValues(200), MeanErrors()
    for row in values:
        recent.add(row)
        errors.add(recent.test(np.ones(200), errors, np.zeros(200)).means)
    assert errors.value == pytest.approx(error_of_mean(np.array(WINDOWS), 0.9), rel=0.15)


def test_healthy_units_are_not_over() -> None:
    assert not any(judged(noise(seed, 300)).any() for seed in range(3))


@pytest.mark.parametrize(("factor", "within"), [(1.03, 60), (1.05, 12), (1.1, 2)])
def test_a_unit_that_becomes_slow_is_over_until_it_is_not(factor: float, within: int) -> None:
    logs = noise(5, 180)
    logs[50:150, 3] += np.log(factor)
    over = judged(logs)
    first = int(np.flatnonzero(over[:, 3])[0])
    assert 50 <= first < 50 + within
    assert over[first:150, 3].mean() > 0.6
    assert over[165:].mean() < 0.05
    assert not over[:, [unit for unit in range(UNITS) if unit != 3]].any()


def test_slow_from_the_start_and_ramps_are_found() -> None:
    logs = noise(6, 300)
    logs[:, 2] += np.log(1.06)
    logs[40:, 5] += np.log1p(5e-4 * np.arange(260))
    over = judged(logs)
    assert over[30:, 2].mean() > 0.9
    assert 60 < np.flatnonzero(over[:, 5])[0] < 200
    assert over[250:, 5].all()
    assert not over[:, [0, 1, 3, 4, 6, 7]].any()


def test_work_that_varies_between_replicas_is_no_slowness() -> None:
    rng = np.random.default_rng(7)
    work = np.tile(rng.normal(0, 0.07, (200, REPLICAS)), (1, STAGES))
    over = judged(noise(7, 200) + work)
    assert over.mean() < 0.002
    slow = noise(7, 200) + work
    slow[100:, 1] += np.log(1.3)
    assert judged(slow)[110:, 1].mean() > 0.9
