"""The native replay against the same rules written out, for generated patterns and durations."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatronapp_analyzer.whatif.pattern import StepPattern
from megatronapp_native import StepReplay


@dataclasses.dataclass(frozen=True)
class ReplayCase:
    pattern: StepPattern
    recorded_NRT: NDArray[np.float64]
    ideal_N: NDArray[np.float64]
    flags_BNR: NDArray[np.bool_]
    is_end_N: NDArray[np.bool_]


@st.composite
def cases(draw: st.DrawFn) -> ReplayCase:
    """Operations whose numbers are shuffled, so that their order is no topological one.

    Members of a group are on one level, and dependencies on lower levels, so that nothing waits for itself.
    """
    levels = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    count = len(levels)
    dependencies: list[tuple[int, ...]] = []
    for level in levels:
        lower = [number for number, other in enumerate(levels) if other < level]
        dependencies.append(tuple(draw(st.lists(st.sampled_from(lower), max_size=3))) if lower else ())
    groups: list[tuple[int, ...]] = []
    for level in sorted(set(levels)):
        left = [number for number, other in enumerate(levels) if other == level]
        while draw(st.booleans()) and left:
            size = draw(st.integers(1, len(left)))
            groups.append(tuple(left[:size]))
            left = left[size:]
    pattern = StepPattern(
        dependencies=tuple(dependencies),
        groups=tuple(groups),
        spans_replicas=tuple(draw(st.booleans()) for _ in groups),
    )
    replicas, steps, scenarios = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 15, 16, 33])),
        draw(st.integers(1, 3)),
    )
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return ReplayCase(
        pattern,
        source.random((count, replicas, steps)),
        source.random(count),
        source.random((scenarios, count, replicas)) < 0.5,
        np.arange(count) % draw(st.integers(1, 3)) == 0,
    )


def plain_replay(case: ReplayCase, flags_NR: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Start all operations that can start, again and again, until the last one has ended."""
    pattern, (count, replicas, steps) = case.pattern, case.recorded_NRT.shape
    seconds = np.where(flags_NR[:, :, None], case.recorded_NRT, case.ideal_N[:, None, None])
    group_of = {member: number for number, group in enumerate(pattern.groups) for member in group}
    starts: dict[int, NDArray[np.float64]] = {}
    ends: dict[int, NDArray[np.float64]] = {}
    while len(ends) < count:
        for number in range(count):
            waited_for = pattern.dependencies[number]
            if number not in starts and all(other in ends for other in waited_for):
                starts[number] = np.max([ends[other] for other in waited_for] or [np.zeros((replicas, steps))], axis=0)
        for number in [number for number in starts if number not in ends]:
            members = pattern.groups[group_of[number]] if number in group_of else (number,)
            if not all(member in starts for member in members):
                continue
            begin = np.max([starts[member] for member in members], axis=0)
            if number in group_of and pattern.spans_replicas[group_of[number]]:
                begin = np.broadcast_to(begin.max(axis=0), begin.shape)
            ends[number] = begin + seconds[number]
    last = [ends[number] for number in np.flatnonzero(case.is_end_N).tolist()]
    found: NDArray[np.float64] = np.max(last, axis=(0, 1))
    return found


@given(case=cases())
def test_replays_equal_the_rules_written_out(case: ReplayCase) -> None:
    replay = StepReplay(**case.pattern.flat(), is_end=case.is_end_N, recorded=case.recorded_NRT, ideal=case.ideal_N)
    expected = np.stack([plain_replay(case, flags_NR) for flags_NR in case.flags_BNR])
    np.testing.assert_array_equal(replay.step_seconds(case.flags_BNR), expected)


def test_circles_wrong_sizes_and_durations_are_refused() -> None:
    circle = StepPattern(dependencies=((1,), (0,)), groups=(), spans_replicas=())
    chain = StepPattern(dependencies=((), (0,)), groups=(), spans_replicas=())

    def replay(pattern: StepPattern, recorded: NDArray[np.float64]) -> StepReplay:
        return StepReplay(**pattern.flat(), is_end=np.ones(2), recorded=recorded, ideal=np.zeros(2))

    with pytest.raises(ValueError, match="wait for each other in a circle"):
        replay(circle, np.zeros((2, 1, 1)))
    with pytest.raises(ValueError, match="recorded has 6 numbers; operations x replicas x steps are 2"):
        replay(chain, np.zeros((6, 1, 1)))
    with pytest.raises(ValueError, match="must have operations, replicas and steps"):
        replay(chain, np.zeros(2))
    with pytest.raises(ValueError, match="durations must be finite numbers"):
        replay(chain, np.full((2, 1, 1), np.nan))
    with pytest.raises(ValueError, match="is_recorded has 3 flags"):
        replay(chain, np.zeros((2, 1, 1))).step_seconds(np.zeros(3, dtype=bool))
