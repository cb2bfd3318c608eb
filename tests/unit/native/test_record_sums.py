"""Native summaries and sums of records against NumPy."""

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.model import RANK_RECORD, copy_rows, select_rows
from megatronapp_common.trace import RECORD
from megatronapp_native import sum_spans, summarize_frame

WORLD = 5
FLAG = 8


@st.composite
def frames(draw: Any, dtype: Any = RECORD) -> Any:
    """Draw records of any bytes."""
    count = draw(st.integers(1, 40))
    rows = draw(hnp.arrays(np.uint8, count * dtype.itemsize)).view(dtype)
    if "rank" in dtype.names:
        rows["rank"] = draw(hnp.arrays(np.int32, count, elements=st.integers(-1, WORLD)))
        rows["kind"] %= 8
    return rows


@given(records=frames())
def test_a_frame_is_summarized_by_its_steps_and_kinds(records: Any) -> None:
    least, greatest, kinds = summarize_frame(records.view(np.uint8))
    assert (least, greatest) == (records["step"].min(), records["step"].max())
    assert kinds == sum(1 << kind for kind in {min(int(kind), 63) for kind in records["kind"]})


@given(rows=frames(RANK_RECORD), table=st.binary(min_size=8, max_size=8), busy=st.integers(0, 7))
def test_spans_add_up_by_column_and_rank(rows: Any, table: bytes, busy: int) -> None:
    sums = np.full((3, WORLD), 7.0)
    sum_spans(rows.view(np.uint8), table + bytes(248), busy, FLAG, sums)
    wall_s = rows["duration"].astype(np.int64) * 8 * 1e-9
    queue_s = np.where(rows["flags"] & FLAG, rows["aux"].astype(np.int64) * 8, 0) * 1e-9
    for column in range(3):
        seconds = np.maximum(wall_s - queue_s, 0) if busy >> column & 1 else wall_s
        for rank in range(WORLD):
            chosen = (rows["rank"] == rank) & np.array([table[kind] >> column & 1 for kind in rows["kind"]], bool)
            assert sums[column, rank] == pytest.approx(seconds[chosen].sum(), rel=1e-12, abs=1e-15)


@given(rows=frames(RANK_RECORD), seed=st.integers(0, 1000), stride=st.integers(1, 3))
def test_selected_and_copied_rows_are_those_of_numpy(rows: Any, seed: int, stride: int) -> None:
    random = np.random.default_rng(seed)
    rows = rows[::stride]
    numbers, mask = random.integers(0, len(rows), 7), random.random(len(rows)) < 0.5
    for chosen in (numbers, mask):
        assert select_rows(rows, chosen).tobytes() == rows[chosen].tobytes()
    copied = copy_rows(rows)
    assert copied.tobytes() == rows.tobytes()
    assert copied.dtype == rows.dtype
    copied["start_ns"] += np.uint64(1)
    assert copied.tobytes() != rows.tobytes()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes are not one or more whole records"):
        summarize_frame(bytes(33))
    with pytest.raises(ValueError, match="0 bytes"):
        summarize_frame(b"")
    rows = np.zeros(1, RANK_RECORD).view(np.uint8)
    with pytest.raises(ValueError, match="columns of 256 kinds"):
        sum_spans(rows, bytes(255), 0, FLAG, np.zeros((1, 1)))
    with pytest.raises(ValueError, match="float64"):
        sum_spans(rows, bytes(256), 0, FLAG, np.zeros((1, 4))[:, ::2])
    with pytest.raises(ValueError, match="at most 8 columns"):
        sum_spans(rows, bytes(256), 0, FLAG, np.zeros((9, 1)))
    with pytest.raises(ValueError, match="35 bytes"):
        sum_spans(rows[:35], bytes(256), 0, FLAG, np.zeros((1, 1)))
