"""Life of findings: what a larger subject does to those that it includes."""

import dataclasses

from megatronapp_analyzer.detect.candidates import SuspectCandidate
from megatronapp_analyzer.detect.findings.lifecycle import FindingTrack, FindingTracker
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import Cause, JobMoment, SubjectType, VerdictState, VerdictSubject

RANK = VerdictSubject(type=SubjectType.RANK, ranks=(0,))
NODE = VerdictSubject(type=SubjectType.NODE, ranks=(0, 1), node="a")


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
    tracker.propose(candidates, lambda votes: now, lambda suspect: False, hits=lambda suspect: 3)
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
