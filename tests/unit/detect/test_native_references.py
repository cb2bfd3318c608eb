"""The native test of columns against two references, and medians of others: equal to their plain forms in NumPy."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_references import PlainReferences, plain_median_of_others_by

from megatronapp_analyzer.detect.baseline import median_of_others_by
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.two_references import ReferenceLimits, ShiftReading, TwoReferences
from megatronapp_native import ColumnTest

Floats = NDArray[np.float64]
DEVICE = ReferenceLimits(
    floor=0.004, own=0.012, peers=0.012, cap=0.56, peer_spread=0.012, least_peer_spread=0.004, largest_step=1.0
)
PROCESSOR = ReferenceLimits(
    floor=0.08, own=0.34, peers=0.47, cap=0.56, peer_spread=0.08, least_peer_spread=0.05, largest_step=0.05
)
SETTINGS = DetectorSettings()


def series(seed: int, steps: int, columns: int) -> Floats:
    """Draw values with slow columns, shifts, outliers, lost values, and columns that are never known."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0.0, 0.02, columns) + rng.normal(0.0, rng.choice([0.0, 0.005, 0.1]), (steps, columns))
    values += np.cumsum(rng.normal(0.0, 0.002, (steps, 1)), axis=0)
    for column in rng.integers(columns, size=int(rng.integers(4))):
        first = int(rng.integers(steps))
        values[first : first + int(rng.integers(1, steps + 1)), column] += rng.normal(0.0, 0.5)
    values[rng.random(values.shape) < 0.01] += 3.0
    values[rng.random(values.shape) < rng.choice([0.0, 0.1])] = np.nan
    values[:, rng.random(columns) < 0.05] = np.nan
    return values


def assert_equal_readings(found: ShiftReading, plain: ShiftReading) -> None:
    for field in dataclasses.fields(ShiftReading):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(plain, field.name), err_msg=field.name)


@pytest.mark.parametrize("with_replicas", [False, True])
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 24), limits=st.sampled_from([DEVICE, PROCESSOR]))
@settings(max_examples=10)
def test_readings_are_those_of_the_plain_form(
    seed: int, columns: int, limits: ReferenceLimits, with_replicas: bool
) -> None:
    rng = np.random.default_rng(seed)
    peers = rng.integers(-1, max(columns // 4, 1), columns)
    replicas = rng.integers(max(columns // 2, 1), size=columns) if with_replicas else None
    least_window = int(rng.choice([1, 28]))
    native = TwoReferences(peers, SETTINGS, replicas=replicas, least_window=least_window)
    plain = PlainReferences(peers, SETTINGS, replicas=replicas, least_window=least_window)
    doubt = rng.choice([0.0, 0.002]) * rng.random(columns)
    for step, row in enumerate(series(seed, int(rng.choice([3, 30, 110])), columns)):
        usual = rng.random(columns) < 0.9 if step % 3 == 0 else None
        found = native.read(row, limits, lambda shift: doubt, usual=usual)
        assert_equal_readings(found, plain.read(row, limits, lambda shift: doubt, usual=usual))


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(0, 6), more=st.integers(1, 6))
@settings(max_examples=10)
def test_columns_may_be_added(seed: int, columns: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    peers = rng.integers(-1, 2, columns + more)
    native, plain = TwoReferences(peers[:columns], SETTINGS), PlainReferences(peers[:columns], SETTINGS)
    values = series(seed, 40, columns + more)
    for step, row in enumerate(values):
        if step == 12:
            native.grow(peers)
            plain.grow(peers)
        known = row[:columns] if step < 12 else row
        zeros = np.zeros(len(known))
        if len(known):
            found = native.read(known, DEVICE, lambda shift, zeros=zeros: zeros)  # type: ignore[misc]
            assert_equal_readings(found, plain.read(known, DEVICE, lambda shift, zeros=zeros: zeros))  # type: ignore[misc]


@pytest.mark.parametrize("references", [TwoReferences, PlainReferences])
@pytest.mark.parametrize("lost_steps", [(), (40, 60)])
def test_steps_without_peers_do_not_end_what_is_known_of_them(
    references: type[TwoReferences | PlainReferences], lost_steps: tuple[int, ...]
) -> None:
    """Peers are alike to a thousandth: a new one that is 2.5 % slower from its first step on is found by that."""
    rng, peers = np.random.default_rng(2), np.array([0, 0, 1, 1, 2, 2, 3, 3, 0, 1])
    test = references(peers[:8], SETTINGS)
    found = []
    for step in range(110):
        values = rng.normal(0.0, 0.001, 10)
        values[8] += 0.025
        if step in lost_steps:
            values[lost_steps.index(step) : 8 : 2] = np.nan
        if step == 80:
            test.grow(peers)
        known = values[: 8 if step < 80 else 10]
        zeros = np.zeros(len(known))
        reading = test.read(known, DEVICE, lambda shift, zeros=zeros: zeros)  # type: ignore[misc]
        found.append(reading.over[8:].tolist())
    assert np.array(found[90:]).mean(axis=0).tolist() == [1.0, 0.0]


def judged(values: Floats, references: type[TwoReferences | PlainReferences] = TwoReferences) -> NDArray[np.bool_]:
    """Return which columns without peers are over in each step."""
    test = references(np.full(values.shape[1], -1), SETTINGS)
    zeros = np.zeros(values.shape[1])
    return np.array([test.read(row, DEVICE, lambda shift: zeros).over for row in values])


@pytest.mark.parametrize("columns", [1, 2, 3])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=2)
def test_a_small_shift_after_large_ones_is_found(columns: int, seed: int) -> None:
    """Two shifts of the last column by 0.6 end, and what follows them is no noise: one of 5 % is clear.

    Noise alone is over in a healthy step of about one series of 10,000: that is allowed in one of 20.
    """
    rng, alarms = np.random.default_rng(seed), 0
    for _ in range(20):
        values = rng.normal(0.0, 0.004, (150, columns))
        for begin, size in ((30, 0.6), (75, 0.6), (120, 0.05)):
            values[begin : begin + 20, -1] += size
        over = judged(values)
        assert over[35:50, -1].all()
        assert over[80:95, -1].all()
        assert over[128:140, -1].all()
        assert over[:, :-1].sum(axis=0).max(initial=0) <= 1
        alarms += bool(over[56:75, -1].any() or over[101:120, -1].any())
    assert alarms <= 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_a_shift_just_above_the_limit_is_not_learned_as_noise(seed: int) -> None:
    """A shift of 3 % in a job of two columns is found within 20 steps, and stays: with at most one of 20 missed."""
    rng, missed = np.random.default_rng(seed), 0
    for _ in range(20):
        values = rng.normal(0.0, 0.004, (180, 2))
        values[60:, -1] += 0.03
        over = judged(values)
        missed += not (over[60:80, -1].any() and over[80:, -1].mean() > 0.9)
    assert missed <= 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_change_of_all_columns_during_a_shift_is_over_with_it(seed: int) -> None:
    """Both columns are slower for a time in which the first one is slower still: the second has no shift."""
    values = np.random.default_rng(seed).normal(0.0, 0.004, (150, 2))
    values[60:] += 0.1
    values[30:80, 0] += 0.1
    over = judged(values)
    assert over[36:80, 0].all()
    assert not over[:, 1].any()
    assert not over[88:].any()


@pytest.mark.parametrize("references", [TwoReferences, PlainReferences])
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(0.2, 0.8), columns=st.integers(4, 6))
@settings(max_examples=15)
def test_the_size_of_a_small_lasting_shift_follows_a_larger_shift(
    references: type[TwoReferences | PlainReferences], seed: int, size: float, columns: int
) -> None:
    values = np.random.default_rng(seed).normal(0.0, 0.004, (150, columns))
    values[30:, -1] += 0.025
    values[90:110, -1] += size
    test, zeros = references(np.full(columns, -1), SETTINGS), np.zeros(columns)
    sizes = np.array([test.read(row, DEVICE, lambda shift: zeros).size[-1] for row in values])
    assert np.median(sizes[60:90]) == pytest.approx(0.025, abs=0.01)
    assert np.abs(sizes[94:110] - size - 0.025).max() < 0.04
    assert np.median(sizes[114:]) == pytest.approx(0.025, abs=0.02)


@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 4), st.sampled_from([0.0, 1.0, -1.0, 2.5, math.nan, math.inf]) | st.floats(-9, 9)),
        max_size=30,
    )
)
def test_medians_of_others_are_those_of_the_plain_form(rows: list[tuple[int, float]]) -> None:
    groups, values = np.array([group for group, _ in rows], np.int64), np.array([value for _, value in rows])
    np.testing.assert_array_equal(median_of_others_by(values, groups), plain_median_of_others_by(values, groups))


def test_sizes_that_do_not_fit_are_refused() -> None:
    test = ColumnTest(
        np.zeros(3, np.int64), window=8, min_history=4, least_window=1, independent_tests=1e3, prior_errors=np.ones(12)
    )
    with pytest.raises(ValueError, match="values has 2 numbers for 3 columns"):
        test.compare(np.zeros(2), dataclasses.astuple(DEVICE))
    with pytest.raises(ValueError, match="limits has 2 numbers; it must have 7"):
        test.compare(np.zeros(3), (0.0, 1.0))
    with pytest.raises(ValueError, match="the step that compare\\(\\) has begun has 0 numbers for 3 columns"):
        test.judge(np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3), np.ones(3, np.bool_))
    with pytest.raises(ValueError, match="2 columns are fewer than the 3 before"):
        test.grow(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="-2 is no number of a group"):
        median_of_others_by(np.zeros(1), np.array([-2]))
