"""Sentences of verdicts: ranks have their role where the ranks of a job have roles."""

import dataclasses

import pytest

from megatronapp_analyzer.detect.findings.sentences import name, sentence
from megatronapp_analyzer.model import Cause, JobLayout, SubjectType, VerdictState, VerdictSubject
from megatronapp_common.topology import RankRole

PLAIN = JobLayout.grid(dp=2)
ROLES = dataclasses.replace(PLAIN, roles=(RankRole.BACKWARD, RankRole.FORWARD))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (PLAIN, "The link from rank 1 to rank 0"),
        (ROLES, "The link from forward rank 1 to backward rank 0"),
    ],
    ids=["plain", "roles"],
)
def test_a_link_is_named_with_the_roles_of_both_ends(layout: JobLayout, expected: str) -> None:
    subject = VerdictSubject(type=SubjectType.LINK, ranks=(1, 0), node="n", worker=0)
    assert name(subject, layout) == expected


@pytest.mark.parametrize(("ratio", "expected"), [(1.013, "1.01 times"), (1.084, "1.08 times"), (1.87, "1.9 times")])
def test_a_small_slowdown_is_visible(ratio: float, expected: str) -> None:
    subject = VerdictSubject(type=SubjectType.RANK, ranks=(1,), node="n", worker=0)
    text = sentence(
        subject, Cause.COMPUTE, VerdictState.CONFIRMED, PLAIN, ratio=ratio, excess_s=0.01, lost_s=0.1, since=3
    )
    assert f"computes {expected} as long as expected" in text
