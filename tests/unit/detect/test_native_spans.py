"""Spans of a step in C++: which records a stream has, their columns, and other clocks; equal to their plain forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_spans import plain_laid_out_s, plain_shifted, plain_stream_rows

from megatronapp_analyzer.align.clocks import ClockModel
from megatronapp_analyzer.align.device_clocks import DeviceClocks
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import RANK_RECORD, RankRecords, StepRecords
from megatronapp_common.trace import Flag, RecordKind
from megatronapp_native import SpanFormat, shift_starts, span_columns, summarize_rows, take_rows

pytestmark = pytest.mark.usefixtures("native_threads")

RANKS = 5


@st.composite
def drawn_records(draw: st.DrawFn) -> RankRecords:
    """Draw records of some ranks, most of the time sorted, with steps that end early and spans that overlap."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    records = np.zeros(draw(st.integers(0, 60)), RANK_RECORD)
    records["rank"] = rng.integers(RANKS, size=len(records))
    records["start_ns"] = 10**15 + rng.integers(10_000, size=len(records)) * int(rng.choice([1, 1_000_000]))
    records["duration"] = rng.integers(2_000, size=len(records))
    records["aux"] = rng.integers(500, size=len(records))
    kinds = [RecordKind.STEP, RecordKind.FORWARD, RecordKind.RECV_WAIT, RecordKind.TP_REDUCE, RecordKind.METRIC]
    records["kind"] = rng.choice(kinds, len(records), p=[0.1, 0.4, 0.3, 0.1, 0.1])
    records["flags"] = rng.choice([0, Flag.SATURATED, Flag.AUX_RUN_QUEUE, Flag.DEVICE_CLOCK], len(records))
    if draw(st.booleans()):
        records = records[np.lexsort((records["start_ns"], records["rank"]))]
    return records


@given(records=drawn_records())
def test_streams_and_columns_are_those_of_the_plain_form(records: RankRecords) -> None:
    rows = rec.stream_rows(records)
    assert rows.tolist() == plain_stream_rows(records).tolist()
    spans = records[rows]
    columns = rec.columns_of(spans, 10**15)
    start, end = plain_laid_out_s(spans, 10**15)
    assert columns.start_s.tolist() == start.tolist()
    assert columns.end_s.tolist() == end.tolist()
    assert columns.duration_s.tolist() == rec.durations_s(spans).tolist()
    assert columns.queue_s.tolist() == rec.run_queue_s(spans).tolist()
    assert columns.rank.tolist() == spans["rank"].tolist()
    assert columns.kind.tolist() == spans["kind"].tolist()
    assert columns.flags.tolist() == spans["flags"].tolist()
    assert rec.rows_of(records, rows).tobytes() == spans.tobytes()


@given(records=drawn_records())
def test_columns_and_sums_of_records_are_those_of_numpy(records: RankRecords) -> None:
    found = rec.RecordColumns.of(records)
    assert found.kind.tolist() == records["kind"].tolist()
    assert found.rank.tolist() == records["rank"].tolist()
    assert found.count.tolist() == np.bincount(records["kind"], minlength=256).tolist()
    assert found.flags == np.bitwise_or.reduce(records["flags"], initial=0)
    assert found.greatest_rank == records["rank"].max(initial=-1)
    assert found.start_ns == records["start_ns"].min(initial=2**64 - 1)


@given(records=drawn_records(), seed=st.integers(0, 2**32 - 1))
def test_other_clocks_are_those_of_the_plain_form(records: RankRecords, seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = DeviceClocks(offset_ns=rng.integers(-50, 50, RANKS), uncertainty_ns=np.zeros(RANKS))
    model = ClockModel(offset_ns=rng.integers(-(10**9), 10**9, RANKS), uncertainty_ns=np.zeros(RANKS), devices=devices)
    view = StepRecords(attempt=0, step=0, records=records, comms={})
    assert model.apply(view).records.tobytes() == plain_shifted(model, records).tobytes()


@pytest.mark.parametrize("length", [0, 300, rec.FEW_KINDS])
def test_kinds_are_found_in_few_and_in_many_records(length: int) -> None:
    records = np.zeros(length, RANK_RECORD)
    records["kind"] = np.arange(length) % 256
    for chosen in (rec.NESTED_KINDS, frozenset[RecordKind]()):
        found = rec.is_kind(records["kind"], chosen)
        assert found.tolist() == np.isin(records["kind"], [int(kind) for kind in chosen]).tolist()


def test_rows_that_do_not_fit_are_refused() -> None:
    rows, offsets, kinds = np.zeros(36, np.uint8), np.zeros(1, np.int64), np.zeros(256, np.bool_)
    layout = SpanFormat(left_out=kinds, step_kind=1, saturated_flag=1, run_queue_flag=2)
    with pytest.raises(ValueError, match="35 bytes are not whole rows of 36"):
        span_columns(rows[:35], 0, layout)
    with pytest.raises(ValueError, match="35 bytes are not whole rows of 36"):
        summarize_rows(rows[:35])
    with pytest.raises(ValueError, match="-1 is none of the 1 rows"):
        take_rows(rows, np.array([0, 0, 0, -1]))
    with pytest.raises(ValueError, match="0 and 1 offsets do not fit"):
        shift_starts(rows, offsets[:0], offsets, 1, kinds)
    with pytest.raises(ValueError, match="rank 0 is none of the 0 with an offset"):
        shift_starts(rows, offsets[:0], offsets[:0], 1, kinds)
    with pytest.raises(ValueError, match="a table of kinds has 3 flags; it must have 256"):
        SpanFormat(left_out=kinds[:3], step_kind=1, saturated_flag=1, run_queue_flag=2)
