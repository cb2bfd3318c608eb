"""The sequential test under the detector: what it finds, and what it takes for noise."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from plain_references import MeanErrors, RecentValues

from megatronapp_analyzer.detect.compute_channel import LogChannel
from megatronapp_analyzer.detect.settings import DEVICE, DetectorSettings
from megatronapp_analyzer.detect.statistics.change_detection import PRIOR_CORRELATION, WINDOWS, error_of_mean
from megatronapp_analyzer.detect.statistics.two_references import ReferenceLimits, TwoReferences

Floats = NDArray[np.float64]
LIMITS = ReferenceLimits(
    floor=0.004, own=0.012, peers=0.012, cap=0.5, peer_spread=0.012, least_peer_spread=0.004, largest_step=1.0
)
WINDOWS_OF_NOISE = 60
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


def noise(seed: int, steps: int, memory: float = 0.8) -> Floats:
    """Draw a difference between ranks, slow and fast noise of each, and slow noise of all."""
    rng = np.random.default_rng(seed)
    bias = rng.normal(0, 0.004, UNITS)
    own = correlated(rng, steps, UNITS, 0.004, memory) + rng.normal(0, 0.005, (steps, UNITS))
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


def test_noise_that_lasts_is_no_shift_in_many_windows() -> None:
    """Each window is judged in each step, before the correlation of its noise has been measured."""
    most_votes = [
        int(sliding_window_view(judged(noise(seed, 120, memory=0.93)), 5, axis=0).sum(axis=-1).max())
        for seed in range(WINDOWS_OF_NOISE)
    ]
    assert max(most_votes) < DetectorSettings().confirm_votes


def test_errors_before_any_are_learned_are_about_those_of_recorded_noise() -> None:
    steps = np.array([length for length in WINDOWS if 1 < length <= 60])
    rng = np.random.default_rng(3)
    values = correlated(rng, 60, 1000, 0.004, 0.93) + rng.normal(0, 0.005, (60, 1000))
    of_a_step = np.diff(values, axis=0).std() / np.sqrt(2)
    means = (np.cumsum(values, axis=0) / np.arange(1, 61)[:, None])[steps - 1] / of_a_step
    ratio = error_of_mean(steps, PRIOR_CORRELATION) / means.std(axis=1)
    assert ratio.min() > 0.7 and ratio.max() < 1.1


@pytest.mark.parametrize(("columns", "limit"), [(2, 4.941), (8, 5.214), (16384, 6.512)])
def test_limit_of_a_score_grows_with_columns_and_with_tests(columns: int, limit: float) -> None:
    """By a shift of known size: strength is its score over the limit, sqrt(2 log(columns x tests))."""
    many, few = (strength_of_a_jump(columns, tests) for tests in (1e5, 1.0))
    assert few / many == pytest.approx(limit / np.sqrt(2 * np.log(columns)), rel=1e-3)


def strength_of_a_jump(columns: int, tests: float) -> float:
    """Return the strength of the first column's step to a value above all others, which are equal."""
    test = TwoReferences(np.zeros(columns, np.int64), DetectorSettings(independent_tests=tests))
    values = np.zeros(columns)
    for _ in range(10):
        test.read(values, LIMITS, np.zeros_like)
    values[0] = 0.02
    return float(test.read(values, LIMITS, np.zeros_like).strength[0])


def test_less_than_a_test_of_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="ColumnTest: independent_tests is 0"):
        TwoReferences(np.zeros(2, np.int64), DetectorSettings(independent_tests=0.5))


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
