"""The small statistics under the detector, against plain definitions."""

import importlib.util
import math
import pathlib
import warnings
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.baseline import (
    ColumnHistory,
    filled,
    median_of_known,
    median_of_others,
    median_of_others_by,
)
from megatronapp_analyzer.detect.effect import level
from megatronapp_analyzer.detect.features import segment_medians
from megatronapp_analyzer.detect.statistics.persistence import VoteWindow, confidence

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=12)


def _lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else math.nan


ANY_FLOATS = st.lists(st.floats(), max_size=12)


@given(values=ANY_FLOATS, value=st.sampled_from([0.0, 1.0]))
def test_filled_values_are_those_of_numpy_to_the_last_bit(values: list[float], value: float) -> None:
    given_values = np.array(values)
    assert filled(given_values, value).tobytes() == np.nan_to_num(given_values, nan=value).tobytes()
    assert given_values.tobytes() == np.array(values).tobytes()


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=False), max_size=12))
def test_the_median_of_known_values_is_that_of_numpy_to_the_last_bit(values: list[float]) -> None:
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.simplefilter("ignore")  # numpy warns of values without any that is known
        expected, found = np.nanmedian(np.array(values)), median_of_known(np.array(values))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@given(values=VALUES)
def test_median_of_others(values: list[float]) -> None:
    finite = [value for value in values if not math.isnan(value)]
    for at, (value, found) in enumerate(zip(values, median_of_others(np.array(values)), strict=True)):
        others = [other for where, other in enumerate(values) if where != at and not math.isnan(other)]
        expected = math.nan if math.isnan(value) or len(finite) < 2 else _lower_median(others)
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_median_of_others_keeps_groups_apart() -> None:
    found = median_of_others_by(np.array([1.0, 9.0, 2.0, 8.0]), np.array([0, 1, 0, 1]))
    assert found.tolist() == [2.0, 8.0, 1.0, 9.0]


@given(rows=st.lists(st.tuples(st.integers(0, 4), st.floats(-1e6, 1e6)), max_size=40))
def test_segment_medians(rows: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in rows], np.int64)
    found = segment_medians(groups, np.array([value for _, value in rows]), 5)
    for group in range(5):
        expected = _lower_median([value for where, value in rows if where == group])
        assert found[group] == expected or (math.isnan(found[group]) and math.isnan(expected))


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_a_history_holds_the_last_accepted_values(values: list[float]) -> None:
    history = ColumnHistory(2, 8)
    for value in values:
        history.add(np.array([value, value]), np.array([True, False]))
    assert history.count.tolist() == [min(len(values), 8), 0]
    assert history.median()[0] == _lower_median(values[-8:])
    assert math.isnan(history.median()[1])


def test_columns_added_later_start_empty() -> None:
    history = ColumnHistory(1, 4)
    history.add(np.array([5.0]), np.array([True]))
    history.grow(3)
    history.add(np.array([7.0, 1.0, math.nan]), np.array([True, True, True]))
    assert history.count.tolist() == [2, 1, 0]


def test_an_unknown_step_does_not_count() -> None:
    votes = VoteWindow(2, 3)
    for known in (True, True, False, False, True):
        votes.add(np.array([True, True]), np.array([True, known]))
    assert votes.count.tolist() == [3, 3]
    votes.add(np.array([False, False]), np.array([True, False]))
    assert votes.count.tolist() == [2, 3]


@given(steps=st.lists(st.tuples(*[st.booleans()] * 4), max_size=12))
def test_votes_are_the_last_known_judgements_of_each_column(steps: list[tuple[bool, bool, bool, bool]]) -> None:
    votes = VoteWindow(2, 3)
    for first, second, *known in steps:
        votes.add(np.array([first, second]), np.array(known))
    for column in range(2):
        judged = [step[column] for step in steps if step[2 + column]]
        assert votes.count[column] == sum(judged[-3:])


@given(steps=st.integers(1, 50), columns=st.integers(1, 10_000))
def test_confidence_rises_with_votes_and_falls_with_columns(steps: int, columns: int) -> None:
    values = [confidence(votes, steps, columns) for votes in range(steps + 1)]
    assert values == sorted(values)
    assert all(0 <= value <= 1 for value in values)
    assert confidence(steps, steps, columns) >= confidence(steps, steps, columns + 1)


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=20), fraction=st.floats(0, 1))
def test_the_level_removes_exactly_the_excess(values: list[float], fraction: float) -> None:
    array = np.array(values)
    excess = fraction * array.sum()
    levelled = np.minimum(array, level(array, excess))
    assert array.sum() - levelled.sum() == pytest.approx(excess, abs=1e-9)


@pytest.fixture(scope="module")
def bounds() -> ModuleType:
    path = pathlib.Path(__file__).parents[3] / "bench" / "exact_bounds.py"
    spec = importlib.util.spec_from_file_location("exact_bounds", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (60, 60, (0.9404, 1.0)),
        (0, 60, (0.0, 0.0596)),
        (5, 10, (0.1871, 0.8129)),
        (0, 0, (0.0, 1.0)),
        (0, 5000, (0.0, 0.0007)),
        (2500, 5000, (0.4860, 0.5140)),
    ],
)
def test_exact_bounds(bounds: ModuleType, successes: int, trials: int, expected: tuple[float, float]) -> None:
    """Values of published tables."""
    assert bounds.clopper_pearson(successes, trials) == pytest.approx(expected, abs=1e-4)
