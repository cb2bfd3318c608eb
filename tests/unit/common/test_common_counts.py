"""Counts in their short form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.text.run_length import format_run_lengths, parse_run_lengths


@given(st.lists(st.integers(1, 64), min_size=1, max_size=50))
def test_what_is_written_is_read_back(counts: list[int]) -> None:
    text = format_run_lengths(counts)
    assert parse_run_lengths(text) == tuple(counts)
    assert len(text) <= len(",".join(map(str, counts))) + 3 * len(counts)


def test_a_thousand_equal_counts_are_a_single_run() -> None:
    assert format_run_lengths([8] * 1000) == "8x1000"
    assert format_run_lengths([8, 8, 4]) == "8x2,4"
    assert parse_run_lengths("8,8,4") == (8, 8, 4)


@pytest.mark.parametrize("text", ["", "0", "8x0", "x2", "8x", "8 x2", "8,,4", "-8", "٨", "8x999999999", "4x3,4x131071"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no count"):
        parse_run_lengths(text)
