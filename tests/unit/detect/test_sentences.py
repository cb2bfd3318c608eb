"""Sentences of verdicts: ranks have their role where the ranks of a job have roles."""

import dataclasses

import pytest

from megatronapp_analyzer.detect.findings.sentences import name
from megatronapp_analyzer.model import JobLayout, SubjectType, VerdictSubject
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
