"""Order in which columns become slow: which of them may have a fault in common."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.features import Floats
from megatronapp_analyzer.detect.statistics.onset_order import CLEAR_STRENGTH, NO_ORDER, OnsetOrder, Onsets
from megatronapp_analyzer.detect.statistics.persistence import VoteWindow

VOTES, FORGET = 5, 10
SLOW, DOUBTFUL = CLEAR_STRENGTH + 0.1, 1.1
STRENGTHS = st.sampled_from([-0.2, 0.1, 0.4, 0.7, DOUBTFUL, SLOW])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Steps of evidence that establish a slowness on a clock, and whether a few clear steps do so, too."""

    steps_needed: int
    brief: bool


DEVICE, PROCESSOR = Clock(steps_needed=3, brief=True), Clock(steps_needed=6, brief=False)


def onsets_of(rows: Sequence[Floats], clock: Clock = DEVICE) -> Onsets:
    """Return the moments after steps with these strengths, [step][column]; NaN for a column that is unknown."""
    columns = len(rows[0])
    votes, order = VoteWindow(columns, VOTES), OnsetOrder(columns, FORGET)
    onsets = NO_ORDER
    for row in rows:
        known = np.isfinite(row)
        strength = np.nan_to_num(row)
        over = strength > 1.0
        votes.add(over, known)
        onsets = order.add(
            over,
            known,
            strength,
            votes.count,
            votes_needed=np.full(columns, 4),
            steps_needed=clock.steps_needed,
            brief=clock.brief,
        )
    return onsets


def slow_from(begin: int, steps: int = 30, strength: float = SLOW, end: int = 99) -> Floats:
    """Return a column's strengths: slow from the step `begin` on."""
    step = np.arange(steps)
    return np.where((step >= begin) & (step < end), strength, 0.1)


def together(*columns: Floats, clock: Clock = DEVICE) -> tuple[int, ...]:
    """Return which of columns, given by their strengths in each step, may have a fault in common."""
    return onsets_of(list(np.stack(columns, axis=1)), clock).together(range(len(columns)))


@given(st.integers(1, 15), st.integers(0, 6))
def test_columns_two_steps_apart_have_faults_of_their_own(begin: int, later: int) -> None:
    assert together(slow_from(begin), slow_from(begin + later)) == ((0, 1) if later < 2 else (1,))
    assert together(slow_from(begin + later), slow_from(begin)) == ((0, 1) if later < 2 else (0,))


@given(st.integers(0, 8), st.sampled_from([DEVICE, PROCESSOR]))
def test_without_clear_steps_a_slowness_has_to_last(later: int, clock: Clock) -> None:
    """On a processor also with them: it may be busy for some steps."""
    strength = DOUBTFUL if clock.brief else SLOW
    needed = 4 if clock.brief else 6
    found = together(slow_from(3, strength=strength), slow_from(3 + later, strength=strength), clock=clock)
    assert found == ((0, 1) if later < needed else (1,))


@given(st.lists(STRENGTHS, min_size=1, max_size=20), st.integers(2, 4))
def test_what_happens_to_all_columns_alike_is_common_to_them(strengths: list[float], columns: int) -> None:
    assert together(*[np.array(strengths)] * columns) == tuple(range(columns))


@given(st.lists(st.tuples(STRENGTHS, STRENGTHS), min_size=1, max_size=20))
def test_the_last_to_become_slow_stays(before: list[tuple[float, float]]) -> None:
    onsets = onsets_of([np.array([*row, 0.1]) for row in before] + [np.full(3, SLOW)] * 3)
    assert 2 in onsets.together((0, 1, 2))
    for column in (0, 1):
        may_be = onsets.together((column, 2)) == (column, 2)
        assert onsets.may_be_together([2, column], (column, 2)).tolist() == [may_be, may_be]


@given(st.lists(st.tuples(STRENGTHS, STRENGTHS), min_size=1, max_size=20), st.lists(st.integers(0, 20), max_size=8))
def test_steps_in_which_nothing_is_known_change_nothing(rows: list[tuple[float, float]], places: list[int]) -> None:
    plain = [np.array(row) for row in rows]
    holes = list(plain)
    for place in places:
        holes.insert(min(place, len(holes)), np.full(2, np.nan))
    assert onsets_of(plain).together((0, 1)) == onsets_of(holes).together((0, 1))


def test_a_column_without_a_record_is_not_taken_for_healthy() -> None:
    lost = slow_from(3)
    lost[3:9] = np.nan
    assert together(slow_from(3), lost) == (0, 1)


def test_an_order_is_forgotten_once_the_earlier_column_is_healthy_for_long() -> None:
    first = slow_from(2, steps=60, end=12)
    for again in (20, 50):
        both = slow_from(again, steps=60)
        found = together(np.maximum(first, both), both)
        assert found == ((1,) if again == 20 else (0, 1))


@given(st.integers(4, 12), st.integers(1, 30), st.sampled_from([DEVICE, PROCESSOR]))
def test_a_fault_in_common_that_pauses_stays_common(on: int, off: int, clock: Clock) -> None:
    both = np.tile([*[SLOW] * on, *[0.1] * off], 3)
    for begin in range(0, len(both), on + off):
        for end in (begin + 1, begin + on):
            assert together(both[:end], both[:end], clock=clock) == (0, 1)


def test_faults_of_several_columns_stay_theirs_while_they_pause() -> None:
    first, second = slow_from(2), slow_from(5)
    first[12:20] = second[12:20] = 0.1
    assert together(first, second) == (1,)


def test_without_an_order_all_columns_may_be_slow_together() -> None:
    assert NO_ORDER.together({3, 1}) == (1, 3)
    assert NO_ORDER.together(()) == ()
    assert NO_ORDER.may_be_together([3, 1], (2,)).all()
