"""Requests for a checkpoint as text, and in a file that another process writes."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.save_request import SaveRequest, read_save_request

NODES = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), max_size=4).map(tuple)


@given(attempt=st.integers(0, 10**6), time=st.integers(0, 10**10), nodes=NODES)
def test_a_request_is_read_as_it_was_written(attempt: int, time: int, nodes: tuple[str, ...]) -> None:
    request = SaveRequest(attempt=attempt, time=time, nodes=nodes)
    assert SaveRequest.parse(request.text) == request


@pytest.mark.parametrize(
    "text",
    ["", "1", "x 1", "1 x", "1 -2", "1 2 a b", "0.5 1", "1 " + 400 * "9", 5000 * "9" + " 1", "1 \u0663"],
    ids=lambda text: text[:8],
)
def test_other_texts_are_no_request(text: str) -> None:
    assert SaveRequest.parse(text) is None


def test_a_file_counts_for_its_attempt_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "request"
    assert read_save_request(path, attempt=3) is None
    path.write_text("3 100 n1")
    assert read_save_request(path, attempt=3) == SaveRequest(attempt=3, time=100, nodes=("n1",))
    assert read_save_request(path, attempt=4) is None
