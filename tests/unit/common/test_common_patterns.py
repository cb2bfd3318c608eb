"""Expressions of users in the rules of a job: what they find, and that none of them can hold the operator up."""

import pytest

from megatronapp_common.text.re2 import matches_re2


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("CUDA error", "rank 3: CUDA error: an illegal memory access", True),
        ("^CUDA error", "rank 3: CUDA error", False),
        ("(?i)xid [0-9]+", "NVRM: Xid 79", True),
        ("NCCL.*timeout", "NCCL watchdog\ntimeout", False),
        ("(?s)NCCL.*timeout", "NCCL watchdog\ntimeout", True),
        ("", "", True),
        ("a(", "a(", False),
        (r"(a)\1", "aa", False),
        ("é", "café", True),
    ],
)
def test_a_pattern_matches_anywhere_in_the_text(pattern: str, text: str, found: bool) -> None:
    assert matches_re2(pattern, text) is found


def test_a_pattern_that_backtracks_elsewhere_ends_at_once() -> None:
    assert matches_re2("(a+)+$", "a" * 50_000 + "b") is False
