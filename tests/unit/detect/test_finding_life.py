"""Life of findings: what a larger subject does to those that it includes."""

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.candidates import SuspectCandidate
from megatronapp_analyzer.detect.findings.lifecycle import (
    GROWN_RATIO,
    GROWN_STEPS,
    MAX_EVIDENCE,
    SETTLED_HITS,
    FindingTrack,
    FindingTracker,
)
from megatronapp_analyzer.detect.findings.report import verdict_of
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import Cause, JobLayout, JobMoment, SubjectType, VerdictState, VerdictSubject
from megatronapp_common.topology import Coordinates

LAYOUT = JobLayout(coordinates=(Coordinates(tp=0, cp=0, ep=0, dp=0, pp=0),), workers=(0,), nodes=("a",))
BEGIN = JobMoment(attempt=0, step=0, time=0.0)
RANK = VerdictSubject(type=SubjectType.RANK, ranks=(0,))
NODE = VerdictSubject(type=SubjectType.NODE, ranks=(0, 1), node="a")
ROUNDING = 1e-9


def candidate(subject: VerdictSubject, cause: Cause = Cause.COMPUTE) -> SuspectCandidate:
    return SuspectCandidate(
        subject=subject,
        cause=cause,
        columns=subject.ranks,
        votes=5,
        excess_s=1.0,
        occurrence_s=0.1,
        ratio=1.5,
        by_history=True,
    )


def step(tracker: FindingTracker, number: int, *candidates: SuspectCandidate) -> list[FindingTrack]:
    """Let all that is proposed, or live, be over in a step; return what changed."""
    now = JobMoment(attempt=0, step=number, time=float(number))
    tracker.propose(
        candidates,
        lambda votes: now,
        lambda suspect: False,
        hits=lambda suspect: 3,
    )
    changed = tracker.advance(now, lambda track: (True, 5))
    return changed + tracker.confirm(now, lambda track: True, lambda track: track.cause)


def test_a_node_ends_the_finding_of_its_rank() -> None:
    tracker = FindingTracker(DetectorSettings())
    (named,) = step(tracker, 1, candidate(RANK))
    assert named.state is VerdictState.CONFIRMED
    changed = step(tracker, 2, candidate(NODE))
    states = {track.candidate.subject: track.state for track in changed}
    assert states == {RANK: VerdictState.CLEARED, NODE: VerdictState.CONFIRMED}
    assert named.until == JobMoment(attempt=0, step=2, time=2.0)
    assert [track.candidate.subject for track in tracker.live.values()] == [NODE]


def test_a_member_continues_the_finding_of_its_unit() -> None:
    unit = dataclasses.replace(candidate(VerdictSubject(type=SubjectType.RANK, ranks=(0, 1))), columns=(3,))
    member = dataclasses.replace(unit, subject=RANK)
    tracker = FindingTracker(DetectorSettings())
    (named,) = step(tracker, 1, unit)
    since, wide = named.since, named.id
    changed = {track.id: track for track in step(tracker, 2, member)}
    (track,) = tracker.live.values()
    assert track.subject == RANK
    assert (track.since, track.hits, track.state) == (since, 6, VerdictState.CONFIRMED)
    assert {id: track.state for id, track in changed.items()} == {
        wide: VerdictState.CLEARED,
        track.id: VerdictState.CONFIRMED,
    }
    assert changed[wide].until == JobMoment(attempt=0, step=2, time=2.0)
    assert [track.subject for track in step(tracker, 3, unit)] == [RANK]


def test_a_suspected_member_takes_the_place_of_its_named_unit() -> None:
    unit = dataclasses.replace(candidate(VerdictSubject(type=SubjectType.RANK, ranks=(0, 1))), columns=(3,))
    suspect = dataclasses.replace(unit, subject=RANK, votes=3)
    tracker = FindingTracker(DetectorSettings())
    assert step(tracker, 1, suspect) == []
    assert [track.subject for track in step(tracker, 2, unit)] == [unit.subject]
    changed = {track.subject: track.state for track in step(tracker, 3, dataclasses.replace(suspect, votes=5))}
    assert changed == {unit.subject: VerdictState.CLEARED, RANK: VerdictState.CONFIRMED}
    assert [track.since.step for track in tracker.live.values()] == [1]


@given(
    before=st.lists(st.floats(0.9, 1.1), min_size=GROWN_STEPS, max_size=12),
    after=st.lists(st.floats(0.9, 1.1), min_size=GROWN_STEPS, max_size=12),
    times=st.sampled_from([0.3, 1.0, 1.5, 3.0, 10.0]),
)
def test_a_finding_follows_its_growth_in_four_steps(before: list[float], after: list[float], times: float) -> None:
    track = FindingTrack(candidate=candidate(RANK), since=BEGIN)
    for size in [*before, *(times * each for each in after)]:
        track.occurrences.append(size)
        track.ratios.append(1 + size)
        track.follow_growth()
        track.add_cost(size)
    if times < GROWN_RATIO:
        assert len(track.occurrences) == len(track.lost_s) == min(len(before) + len(after), MAX_EVIDENCE)
    else:
        least, most = 0.9 * times - ROUNDING, 1.1 * times + ROUNDING
        assert least <= track.occurrence_s <= most
        assert least <= track.seconds_per_step <= most
        assert least <= track.ratio - 1 <= most
    assert track.replayed_s == pytest.approx(sum(before) + times * sum(after))


def test_a_cause_is_judged_again_after_more_evidence() -> None:
    tracker = FindingTracker(DetectorSettings())
    causes = itertools.chain([Cause.MEMORY] * 3, itertools.repeat(Cause.COMPUTE))
    states: list[dict[Cause, VerdictState]] = []
    for number in range(1, SETTLED_HITS):
        now = JobMoment(attempt=0, step=number, time=float(number))
        tracker.propose([candidate(RANK)], lambda votes, now=now: now, lambda suspect: False, hits=lambda suspect: 3)  # type: ignore[misc]
        changed = tracker.advance(now, lambda track: (True, 5))
        cause = next(causes)
        changed += tracker.confirm(now, lambda track: True, lambda track, cause=cause: cause)  # type: ignore[misc]
        states.append({track.cause: track.state for track in changed})
    (named,) = tracker.live.values()
    assert named.hits > SETTLED_HITS
    assert all(found == {Cause.MEMORY: VerdictState.CONFIRMED} for found in states[:3])
    assert {Cause.MEMORY: VerdictState.CLEARED, Cause.COMPUTE: VerdictState.CONFIRMED} in states
    assert states[-1] == {Cause.COMPUTE: VerdictState.CONFIRMED}


def test_links_within_a_unit_are_not_narrowed_to_a_member() -> None:
    unit = dataclasses.replace(candidate(VerdictSubject(type=SubjectType.RANK, ranks=(0, 1))), columns=(3,))
    tracker = FindingTracker(DetectorSettings())
    (named,) = step(tracker, 1, unit)
    named.confirmed_cause = Cause.LINK
    step(tracker, 2, dataclasses.replace(unit, subject=RANK))
    assert [track.subject.ranks for track in tracker.live.values()] == [(0, 1)]


def life(evidence: Iterable[bool], settings: DetectorSettings) -> list[bool]:
    """Return for each step whether rank 0 is named, from whether the step is evidence against it."""
    tracker = FindingTracker(settings)
    last: list[bool] = []
    return [_is_named_after(tracker, settings, number, over, last) for number, over in enumerate(evidence)]


def _is_named_after(
    tracker: FindingTracker, settings: DetectorSettings, number: int, over: bool, last: list[bool]
) -> bool:
    """Track one step; `last` are the judgements of the last steps, which it is added to."""
    now = JobMoment(attempt=0, step=number, time=float(number))
    last.append(over)
    votes = sum(last[-settings.votes :])
    proposed = [dataclasses.replace(candidate(RANK), votes=votes)] if votes >= settings.suspect_votes else []
    tracker.propose(proposed, lambda votes: now, lambda suspect: False, hits=lambda suspect: 3)
    tracker.advance(now, lambda track: (over, votes))
    tracker.confirm(now, lambda track: True, lambda track: track.cause)
    return any(track.named for track in tracker.live.values())


@given(on=st.integers(4, 15), off=st.integers(1, DetectorSettings().longest_pause - 1), periods=st.integers(3, 5))
def test_the_verdict_of_a_fault_that_stops_and_starts_stays(on: int, off: int, periods: int) -> None:
    settings = DetectorSettings()
    pattern = ([True] * on + [False] * off) * periods
    named = life([*pattern, *[False] * 100], settings)
    first = settings.confirm_votes - 1
    assert named.index(True) == first
    again = on + off + first  # from here on it is known to return
    end = len(pattern) - off
    assert all(named[again:end])
    if off < settings.clear_steps:
        assert all(named[first:end])
    clean = max(settings.clear_steps, min(2 * off, settings.longest_pause))
    # Its last steps stay among the votes for some more, so it is recovering a little later.
    assert not any(named[end + clean :])


@given(st.integers(62, 90))
def test_a_fault_that_returns_after_long_is_another_fault(off: int) -> None:
    settings = DetectorSettings()
    named = life(([True] * 8 + [False] * off) * 3, settings)
    assert sum(named) == 3 * (8 - 3 + settings.clear_steps - 1)


@given(gap=st.integers(2, 30), strays=st.integers(0, 12))
def test_single_steps_after_the_end_of_a_fault_do_not_lengthen_its_verdict(gap: int, strays: int) -> None:
    settings = DetectorSettings()
    after = ([False] * gap + [True]) * strays + [False] * (settings.clear_steps + 4)
    assert not life([True] * 8 + after, settings)[-1]


def test_a_verdict_that_pauses_does_not_cover_a_fault_of_a_part_of_it() -> None:
    settings = DetectorSettings()
    tracker = FindingTracker(settings)
    whole = dataclasses.replace(
        candidate(VerdictSubject(type=SubjectType.NODE, ranks=(0, 1, 2, 3), node="a")), columns=(0, 1, 2, 3)
    )
    numbers = itertools.count(1)
    proposed: list[SuspectCandidate] = []

    def over(track: FindingTrack) -> tuple[bool, int]:
        return (True, 5) if track.candidate in proposed else (False, 0)

    def steps(*candidates: SuspectCandidate, count: int) -> list[FindingTrack]:
        """Let only what is proposed be over; return what changed."""
        changed: list[FindingTrack] = []
        proposed[:] = candidates
        for number in itertools.islice(numbers, count):
            now = JobMoment(attempt=0, step=number, time=float(number))
            tracker.propose(candidates, lambda votes: BEGIN, lambda suspect: False, hits=lambda suspect: 3)
            changed += tracker.advance(now, over)
            changed += tracker.confirm(now, lambda track: True, lambda track: track.cause)
        return changed

    steps(whole, count=5)
    steps(count=40)
    steps(whole, count=5)
    steps(count=settings.clear_steps - 2)
    assert not steps(candidate(RANK), count=1)
    steps(count=1)
    (named,) = steps(candidate(RANK), count=1)
    assert (named.subject, named.state) == (RANK, VerdictState.CONFIRMED)
    back = {track.subject.type: track.state for track in steps(whole, count=1)}
    assert back == {SubjectType.NODE: VerdictState.CONFIRMED, SubjectType.RANK: VerdictState.CLEARED}
    assert [track.subject for track in tracker.live.values()] == [whole.subject]


@given(on=st.integers(4, 15), off=st.integers(1, 30))
def test_pauses_do_not_make_a_verdict_doubtful(on: int, off: int) -> None:
    tracker, last = FindingTracker(DetectorSettings()), list[bool]()
    sure = []
    for number, over in enumerate(([True] * on + [False] * off) * 6):
        _is_named_after(tracker, DetectorSettings(), number, over, last)
        sure += [verdict_of(track, LAYOUT, 100).confidence for track in tracker.live.values() if track.named]
    assert min(sure) > 0.5


def test_findings_of_another_cause_and_of_equal_subjects_stay() -> None:
    tracker = FindingTracker(DetectorSettings())
    step(tracker, 1, candidate(RANK), candidate(RANK, Cause.HOST))
    step(tracker, 2, candidate(NODE, Cause.HOST))
    assert {(track.candidate.subject, track.candidate.cause) for track in tracker.live.values()} == {
        (RANK, Cause.COMPUTE),
        (NODE, Cause.HOST),
    }


def test_columns_of_groups_and_of_pairs_are_not_the_same() -> None:
    """Both have the cause of links; a group's column 0 says nothing of the pair in column 0."""
    group = candidate(VerdictSubject(type=SubjectType.GROUP, ranks=(0, 1)), Cause.LINK)
    pair = candidate(VerdictSubject(type=SubjectType.LINK, ranks=(0, 1)), Cause.LINK)
    receiver = dataclasses.replace(candidate(RANK, Cause.LINK), columns=(0, 1, 2))
    tracker = FindingTracker(DetectorSettings())
    step(tracker, 1, dataclasses.replace(group, columns=(0,)))
    step(tracker, 2, dataclasses.replace(pair, columns=(0,)))
    assert {track.subject.type for track in tracker.live.values()} == {SubjectType.GROUP, SubjectType.LINK}
    step(tracker, 3, receiver)
    assert {track.subject.type for track in tracker.live.values()} == {SubjectType.GROUP, SubjectType.RANK}
