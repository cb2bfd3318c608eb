"""Replicas that get more work than others: what their passes take for it, and that they are not called slow."""

from collections.abc import Iterator

import numpy as np
import pytest
from detect.faults import parse
from detect.layout import Grid
from detect.noise import GPU
from detect.runner import run
from detect.score import Window, score
from detect.simulation import Events, SimulatedJob
from detect.suite import DetectionCase
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.work import StepWork, WorkModel, work_details
from megatronapp_analyzer.model import RANK_RECORD, JobLayout, RankRecords
from megatronapp_common.trace import Flag, RecordKind

REPLICAS, MICROBATCHES = 4, 6
LAYOUT = JobLayout.grid(dp=REPLICAS)
PACES = np.array([1.0, 1.1, 0.95, 1.3])


def work_records(tokens: np.ndarray, pairs: np.ndarray) -> RankRecords:
    rows = np.zeros(tokens.shape, RANK_RECORD)
    rows["kind"], rows["flags"], rows["aux"], rows["ordinal"] = RecordKind.WORK, Flag.AUX_WORK, tokens, pairs
    rows["rank"], rows["microbatch"] = np.arange(REPLICAS)[:, None], np.arange(MICROBATCHES)
    return rows.ravel()


def passes() -> RankRecords:
    rows = np.zeros((REPLICAS, MICROBATCHES), RANK_RECORD)
    rows["kind"], rows["rank"], rows["microbatch"] = (
        RecordKind.FORWARD,
        np.arange(REPLICAS)[:, None],
        np.arange(MICROBATCHES),
    )
    return rows.ravel()


def normalised(model: WorkModel, tokens: np.ndarray, pairs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    lengths, work = model.normalise(work_records(tokens, pairs), passes(), seconds.ravel())
    assert work is not None
    return lengths.reshape(REPLICAS, MICROBATCHES)


def drawn(rng: np.random.Generator, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens and pairs of steps; pairs are not proportional to tokens."""
    for _ in range(steps):
        tokens = rng.integers(2000, 6000, (REPLICAS, MICROBATCHES))
        yield tokens, tokens * rng.integers(1, 6, tokens.shape)


@settings(max_examples=15, deadline=None)
@given(by_tokens=st.floats(0.0, 1.0), by_pairs=st.floats(0.0, 0.5), seed=st.integers(0, 1000))
def test_passes_of_different_work_are_compared_as_if_it_were_equal(
    by_tokens: float, by_pairs: float, seed: int
) -> None:
    model, rng = WorkModel(LAYOUT, DetectorSettings(warmup_steps=0)), np.random.default_rng(seed)
    usual: tuple[float, float] | None = None
    for tokens, pairs in drawn(rng, 12):
        usual = usual or (float(np.median(tokens)), float(np.median(pairs)))
        grown = 1 + by_tokens * (tokens / usual[0] - 1) + by_pairs * (pairs / usual[1] - 1)
        lengths = normalised(model, tokens, pairs, 0.02 * PACES[:, None] * np.maximum(grown, 0.2))
        usable = grown > 0.2
    expected = np.broadcast_to(0.02 * PACES[:, None], lengths.shape)
    np.testing.assert_allclose(lengths[usable], expected[usable], rtol=0.12)


def test_tokens_that_cost_nothing_are_learned_to_cost_nothing() -> None:
    model, equal = WorkModel(LAYOUT, DetectorSettings()), np.full((REPLICAS, MICROBATCHES), 4000)
    seconds = 0.02 * PACES[:, None] + np.zeros(equal.shape)
    for _ in range(10):
        np.testing.assert_allclose(normalised(model, equal, equal, seconds), seconds)
    more = equal.copy()
    more[1] = 6000  # the shape is padded to the same length
    for _ in range(3):
        lengths = normalised(model, more, more, seconds)
    np.testing.assert_allclose(lengths, seconds, rtol=0.05)


def test_without_reports_lengths_stay_as_they_are() -> None:
    model, seconds = WorkModel(LAYOUT, DetectorSettings()), np.linspace(1.0, 2.0, REPLICAS * MICROBATCHES)
    lengths, work = model.normalise(passes()[:0], passes(), seconds)
    assert work is None
    assert lengths is seconds


def test_work_of_microbatches_that_no_pass_has_is_ignored() -> None:
    """A damaged record must not cost a table of 65,535 microbatches for each replica."""
    equal = np.full((REPLICAS, MICROBATCHES), 4000)
    reported = work_records(equal, equal)
    damaged = reported[-1:].copy()
    damaged["microbatch"] = 60_000
    model = WorkModel(LAYOUT, DetectorSettings())
    _, work = model.normalise(np.concatenate([reported, damaged]), passes(), np.ones(equal.size))
    assert work is not None
    assert work.tokens.shape == equal.shape
    assert WorkModel(LAYOUT, DetectorSettings()).normalise(damaged, passes(), np.ones(equal.size))[1] is None


@pytest.mark.parametrize(("lost", "lines"), [(0, 0), (slice(1, None), 2), (slice(0, 0), 2)])
def test_a_replica_whose_reports_are_lost_is_not_described(lost: int | slice, lines: int) -> None:
    tokens = np.ones((REPLICAS, MICROBATCHES))
    tokens[lost] = np.nan
    work = StepWork(tokens=tokens, pairs=tokens, usual_tokens=4000.0, growth=(1.0, 0.0))
    details = work_details(work, 0, 1.5)
    assert len(details) == lines
    assert "nan" not in " ".join(details)


def watched(grid: Grid, faults: str, seed: int = 5, uneven: float = 0.0) -> Window:
    job = SimulatedJob(
        grid=grid,
        noise=GPU,
        microbatches=4,
        faults=parse(faults, grid),
        reports_work=True,
        work_part=0.8,
        events=Events(uneven=uneven),
    )
    case = DetectionCase(row="work", layout="", job=job, seed=seed, steps=30, faults=job.faults)
    return run(case, ["ours"]).windows["ours"]


@pytest.mark.parametrize("grid", [Grid(dp=4), Grid(dp=2, pp=2), Grid(dp=2, tp=2)])
def test_a_replica_with_more_tokens_is_named_for_them_alone(grid: Grid) -> None:
    total = score([watched(grid, "tokens replica=1 factor=1.4 from=16")])
    assert (total.hits, total.parts, total.false) == (1, 0, 0)
    assert dict(total.causes) == {("data-imbalance", "data-imbalance"): 1}
    assert total.cost_errors[0] < 0.1


def test_a_slow_device_among_more_tokens_is_named_too() -> None:
    total = score([watched(Grid(dp=4), "tokens replica=1 factor=1.5 from=16; compute rank=2 factor=1.5 from=18")])
    assert (total.hits, total.false) == (2, 0)
    assert dict(total.causes) == {("data-imbalance", "data-imbalance"): 1, ("compute", "compute"): 1}


def test_uneven_work_of_healthy_replicas_is_not_named() -> None:
    assert watched(Grid(dp=4), "", uneven=0.3).named == {}
