"""All ranks slower than before: named as a cause, with the job as its subject."""

import numpy as np
import pytest
from detect.faults import parse
from detect.noise import GPU
from detect.runner import run
from detect.score import Score, score
from detect.simulation import Events, SimulatedJob
from detect.suite import LAYOUTS, DetectionCase
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.detect.causes.job_regression import NEWEST, JobBaseline


def steps_over(shifts: np.ndarray) -> list[int]:
    """Return the steps, of shifts [step, unit] in logarithms, in which the job is slower than before."""
    baseline = JobBaseline()
    return [step for step, row in enumerate(shifts) if baseline.read(0.1 * np.exp(row)).over]


@settings(max_examples=12)
@given(st.integers(2, 12), st.floats(0.12, 1.0), st.integers(0, 2**32 - 1))
def test_a_common_growth_is_over_soon_and_until_it_ends(units: int, size: float, seed: int) -> None:
    shifts = np.random.default_rng(seed).normal(0.0, 0.005, (100, units))
    shifts[40:80] += size
    over = steps_over(shifts)
    assert over[0] in range(40, 40 + NEWEST)
    assert over == list(range(over[0], over[-1] + 1))
    assert over[-1] in range(79, 80 + NEWEST)


@settings(max_examples=12)
@given(st.integers(3, 12), st.floats(0.2, 1.0), st.integers(0, 2**32 - 1))
def test_growth_of_some_units_is_none_of_the_job(units: int, size: float, seed: int) -> None:
    shifts = np.random.default_rng(seed).normal(0.0, 0.005, (80, units))
    shifts[40:, : units - 1 - units // 8] += size
    assert steps_over(shifts) == []


@settings(max_examples=12)
@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_a_slow_warm_up_and_lost_units_are_none(units: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shifts = rng.normal(0.0, 0.005, (100, units)) + 0.05 * (1.0 - np.exp(-np.arange(100) / 20.0))[:, None]
    shifts[rng.random(shifts.shape) < 0.3] = np.nan
    assert steps_over(shifts) == []


def scored(text: str, *, events: Events | None = None) -> Score:
    grid = LAYOUTS["dp2-pp4"]
    faults = parse(text, grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=faults, events=events or Events())
    case = DetectionCase(row="job", layout="dp2-pp4", job=job, seed=3, steps=50, faults=faults)
    return score([run(case, ["ours"]).windows["ours"]])


def test_a_job_that_becomes_slow_is_named_as_a_whole() -> None:
    total = scored("compute job=0 factor=1.2 from=30")
    assert (total.hits, total.false) == (1, 0)
    assert set(total.causes) == {("regression", "regression")}
    assert total.delays[0] <= 9
    assert total.cost_errors[0] < 0.2


@pytest.mark.full("a second healthy job")
def test_a_batch_that_grows_is_no_regression() -> None:
    assert scored("", events=Events(ramp_up=((30, 16),), warmup_steps=20, warmup_drift=0.03)).alarms == 0
