"""Traces that Perfetto shows whole: spans of a track are nested or disjoint, in JSON and in protobuf."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from megatronapp_traces import MegatronAppJob
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from perfetto_rule import ViewedSpan, dropped, read_chrome, read_perfetto

from megatronapp_analyzer.errors import ExportError
from megatronapp_analyzer.graph.matching import match_messages
from megatronapp_analyzer.hub.export import protobuf
from megatronapp_analyzer.hub.export.around import SLICE_BYTES, steps_around
from megatronapp_analyzer.hub.export.chrome import chrome_trace, microseconds
from megatronapp_analyzer.hub.export.formats import TraceFormat, spans_of_a_slice, trace_file
from megatronapp_analyzer.hub.export.nesting import NESTED_ROWS, SLACK_NS, place_spans
from megatronapp_analyzer.hub.export.perfetto import perfetto_trace
from megatronapp_analyzer.hub.export.tracks import Span, Track, TrackedTrace, TrackRole, source_of, tracks_of
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.offline.megatronapp_files import read_rank_files
from megatronapp_analyzer.offline.read import read_traces
from megatronapp_analyzer.offline.stored import ingest_of
from megatronapp_common.trace import NO_LAYER, Counter, Flag, LayerSite, PassFlag, RecordKind

TIMES = st.integers(0, 3000) | st.integers(0, 10).map(lambda part: 5000 * part)


@given(spans=st.lists(st.tuples(TIMES, st.integers(0, 3000) | st.just(20_000)), max_size=40))
def test_spans_of_a_row_are_nested_or_disjoint_and_hardly_moved(spans: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in spans], np.int64)
    ends = starts + np.array([length for _, length in spans], np.int64)
    placed = list(place_spans(starts, ends))
    assert sorted(index for index, *_ in placed) == list(range(len(spans)))
    assert dropped(ViewedSpan(row, "", start, end) for _, row, start, end in placed) == []
    for index, _, start, end in placed:
        assert start <= end
        assert abs(start - starts[index]) <= SLACK_NS >= abs(end - ends[index])
    given_ = [ViewedSpan(0, "", int(starts[index]), int(ends[index])) for index, *_ in placed]
    if not dropped(given_):
        assert {(row, start - starts[index], end - ends[index]) for index, row, start, end in placed} <= {(0, 0, 0)}


@pytest.mark.parametrize(
    ("second", "placed"),
    [
        ((4000, 10_020), [(0, 0, 10_000), (0, 4000, 10_000)]),  # a part that ends after the whole
        ((9990, 15_000), [(0, 0, 10_000), (0, 10_000, 15_000)]),  # a neighbour that begins before the end
        ((20, 15_000), [(0, 0, 15_000), (0, 0, 10_000)]),  # a whole that begins after its part
        ((4000, 12_000), [(0, 0, 10_000), (1, 4000, 12_000)]),
    ],
)
def test_rounded_times_are_moved_and_others_get_a_row(
    second: tuple[int, int], placed: list[tuple[int, int, int]]
) -> None:
    starts, ends = np.array([0, second[0]]), np.array([10_000, second[1]])
    assert [(row, start, end) for _, row, start, end in place_spans(starts, ends)] == placed


def test_many_spans_at_once_take_a_bounded_number_of_attempts_each(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.arange(2000) * 2 * SLACK_NS
    ends = starts + 500 * 2 * SLACK_NS
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        placed = list(place_spans(starts, ends))
    finally:
        sys.setprofile(before)
    assert dropped(ViewedSpan(row, "", start, end) for _, row, start, end in placed) == []
    assert {row for _, row, _, _ in placed} == set(range(500)), "rows of spans that have ended are used again"
    assert calls < (NESTED_ROWS + 2) * len(starts)
    monkeypatch.setattr("megatronapp_analyzer.hub.export.nesting.MOST_ROWS", 400)
    with pytest.raises(ExportError, match="more than 400 spans of a track overlap; export fewer steps"):
        list(place_spans(starts, ends))


@given(time_ns=st.integers(0, 1 << 50))
@example(time_ns=4035)
def test_microseconds_are_read_as_the_same_nanoseconds(time_ns: int) -> None:
    assert int(json.loads(json.dumps(microseconds(time_ns))) * 1000) == time_ns


@given(
    number=st.integers(-(1 << 63), (1 << 64) - 1),
    real=st.floats(allow_nan=False),
    content=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_fields_are_read_by_another_implementation(number: int, real: float, content: str) -> None:
    """Fields of DebugAnnotation and TrackEvent cover all of their types."""
    written = protobuf.integer(3, number) + protobuf.message(11, protobuf.integer(4, number))
    annotation = pb.DebugAnnotation.FromString(written)
    signed = number - (1 << 64) if number >= 1 << 63 else number
    assert (annotation.uint_value, annotation.dict_entries[0].int_value) == (number % (1 << 64), signed)
    assert pb.DebugAnnotation.FromString(protobuf.double(5, real)).double_value == real
    assert pb.DebugAnnotation.FromString(protobuf.text(6, content)).string_value == content
    event = pb.TrackEvent.FromString(protobuf.fixed64(47, number))
    assert list(event.flow_ids) == [number % (1 << 64)]


@pytest.fixture
def device_steps(step_rows: Any, ring_header: Any, rows: Any) -> TraceIngest:
    """Two steps of devices that lag their hosts, with rounded times, a long read and two copies at once."""
    filled = TraceIngest(StoreLimits())
    for rank in (0, 1):
        filled.add_ring(0, ring_header(rank))
    first = [0, 0]
    for step in range(2):
        for rank in (0, 1):
            device = step_rows(rank, step)
            spans = device["kind"] < RecordKind.METRIC
            device["flags"][spans] |= np.uint8(Flag.DEVICE_CLOCK)
            device["start_ns"][spans] += 4_000_000 + np.arange(spans.sum(), dtype=np.uint64) * 7
            device["flags"][device["kind"] == RecordKind.STEP] |= np.uint8(Flag.SKIPPED_UPDATE)
            device["flags"][device["kind"] == RecordKind.BACKWARD] |= np.uint8(PassFlag.EARLY)
            begun = 1_000_000_000 + step * 10_000_000
            at = {"step": step, "comm": NO_COMM_SLOT, "flags": 0}
            host = [
                at | {"kind": RecordKind.DATA, "start_ns": begun + 100, "duration": 1_000_000},
                at | {"kind": RecordKind.CHECKPOINT, "start_ns": begun + 8_500_000, "duration": 200_000},
                at | {"kind": RecordKind.OPTIMIZER, "start_ns": begun + 13_000_000, "duration": 125_002},
                at | {"kind": RecordKind.COPY, "comm": 1 - rank, "start_ns": begun + 9_000_000, "duration": 90_000},
                at | {"kind": RecordKind.COPY, "comm": 1 - rank, "start_ns": begun + 9_100_000, "duration": 90_000},
            ]
            host[0] |= {"flags": Flag.AUX_RUN_QUEUE, "aux": 77}
            host[1] |= {"flags": Flag.INJECTED}
            host[2] |= {"flags": Flag.DEVICE_CLOCK | Flag.AUX_LEAD, "aux": 12}
            body = np.concatenate([rows(host), device])
            header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
            filled.add_records(0, header, body.tobytes())
            first[rank] += len(body)
    half = {"kind": RecordKind.COUNTER, "comm": Counter.CPU_PRESSURE, "start_ns": 1_015_000_000, "aux": 0x3F000000}
    filled.add_records(0, {"rank": None, "worker": 0, "first": 0, "lost": 0}, rows([half]).tobytes())
    filled.end_attempt(0)
    return filled


NO_COMM_SLOT = 0xFFFF


def tracked(ingest: TraceIngest) -> TrackedTrace:
    return tracks_of(source_of(ingest, "demo", ingest.store.select(None, None, newest=50)))


def test_no_span_of_a_device_is_dropped_in_either_format(device_steps: TraceIngest) -> None:
    trace = tracked(device_steps)
    events = sum(len(step.view.records) for step in device_steps.store.newest(9)) + len(trace.arrows)
    spans = read_chrome(json.loads(json.dumps(chrome_trace(trace))))
    assert (len(spans), dropped(spans)) == (events, [])
    viewed = read_perfetto(perfetto_trace(trace))
    assert (len(viewed.spans), dropped(viewed.spans)) == (events, [])
    assert sorted((span.name, span.start_ns, span.end_ns) for span in spans) == sorted(
        (span.name, span.start_ns, span.end_ns) for span in viewed.spans
    )
    merged = [ViewedSpan(span.track[0], span.name, span.start_ns, span.end_ns) for span in spans]
    assert len(dropped(merged)) > 4, "the case must be one that a single track cannot show"


def test_host_device_and_transfers_have_tracks_of_their_own(device_steps: TraceIngest) -> None:
    viewed = read_perfetto(perfetto_trace(tracked(device_steps)))
    names = {f"rank {rank} (pp {rank}, dp 0, tp 0)": f"worker {rank} on node-{rank}" for rank in (0, 1)}
    for name, process in names.items():
        by_role = {role: {span.name for span in viewed.spans if span.track == f"{name} {role}"} for role in ROLES}
        assert by_role["host"] == {"data", "checkpoint"}
        assert {"forward 0", "backward 0", "step", "optimizer"} <= by_role["device"]
        assert by_role["transfers"] == by_role["transfers 2"] == {"copy"}
        assert {viewed.tracks[f"{name} {role}"] for role in ROLES} == {process}
    assert viewed.counters == {"loss": [(9_999_900, 4.0), (19_999_900, 5.0)], "cpu_pressure 0": [(14_999_900, 0.5)]}


def test_parts_of_passes_are_named_with_their_layer(step_rows: Any, ring_header: Any, rows: Any) -> None:
    filled = TraceIngest(StoreLimits())
    filled.add_ring(0, ring_header(0))
    part = {"kind": RecordKind.LAYER_FORWARD, "start_ns": 1_000_001_000, "duration": 10, "comm": NO_COMM_SLOT}
    parts = [part | {"ordinal": LayerSite.MLP, "layer": 3}, part | {"ordinal": LayerSite.LOSS, "layer": NO_LAYER}]
    body = np.concatenate([rows(parts), step_rows(0, 0)])
    filled.add_records(0, {"rank": 0, "worker": 0, "first": 0, "lost": 0}, body.tobytes())
    filled.end_attempt(0)
    arguments = [
        event["args"] for event in chrome_trace(tracked(filled))["traceEvents"] if "layer_forward" in event["name"]
    ]
    assert [(entry["part"], entry.get("layer")) for entry in arguments] == [("mlp", 3), ("loss", None)]


ROLES = ("host", "device", "transfers", "transfers 2")


def test_flows_lead_from_sends_to_receives(device_steps: TraceIngest) -> None:
    trace = tracked(device_steps)
    viewed = read_perfetto(perfetto_trace(trace))
    assert len(viewed.flows) == len(trace.arrows) > 0
    for sent, received in viewed.flows.values():
        assert sent.startswith("send_post")
        assert received.startswith("recv_wait")
        assert sent.partition(" on ")[2] != received.partition(" on ")[2]
    steps = [values["step"] for values in viewed.arguments]
    assert set(steps) == {0, 1}
    assert {values["bytes"] for values in viewed.arguments if "bytes" in values} == {1024}


def test_an_arrow_begins_before_it_ends_where_the_receive_waits() -> None:
    """The receive begins before the send; Perfetto reads events in the order of their times."""
    spans = [
        Span(track=0, start_ns=50, end_ns=60, name="send_post", kind=0, category="span", arguments={"step": 3}),
        Span(track=1, start_ns=10, end_ns=80, name="recv_wait", kind=0, category="span", arguments={"step": 3}),
    ]
    trace = TrackedTrace(
        job="demo",
        origin_ns=0,
        first_step=(0, 3),
        last_step=(0, 3),
        processes={0: "worker 0"},
        tracks=[Track(process=0, rank=rank, role=TrackRole.HOST, row=0, name=f"rank {rank}") for rank in (0, 1)],
        spans=spans,
        arrows=[(0, 1)],
        counters=[],
    )
    viewed = read_perfetto(perfetto_trace(trace))
    assert viewed.flows == {1: ["send_post on rank 0", "recv_wait on rank 1"]}
    newest: dict[int, float] = {}
    starts: dict[str, float] = {}
    arrows = []
    events = [event for event in chrome_trace(trace)["traceEvents"] if event["ph"] in "Xsf"]
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["ph"] == "X":
            newest[event["tid"]] = event["ts"]
        elif event["ph"] == "s":
            starts[event["id"]] = newest[event["tid"]]
        else:
            arrows.append((starts[event["id"]], newest[event["tid"]]))
    assert arrows == [(0.05, 0.079)], "starts of the spans that the arrow joins, of which the later one is its end"


def test_an_exported_trace_is_read_as_it_was_recorded(device_steps: TraceIngest, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(chrome_trace(tracked(device_steps))))
    job = read_traces([tmp_path / "trace.json"])
    again = ingest_of(job).store.newest(9)
    for before, after in zip(device_steps.store.newest(9), again, strict=True):
        assert after.digest.step == before.digest.step
        found, expected = (np.sort(step.view.records, order=["rank", "kind", "start_ns"]) for step in (after, before))
        for name in ("rank", "kind", "step", "microbatch", "chunk", "aux", "flags", "ordinal"):
            assert found[name].tolist() == expected[name].tolist(), name
        moved = (
            found["start_ns"].astype(np.int64)
            + after.offsets_ns[0]
            - before.offsets_ns[0]
            - expected["start_ns"].astype(np.int64)
        )
        assert np.abs(moved).max() <= SLACK_NS
        assert len(match_messages(after.view.records, after.view.comms)) == len(
            match_messages(before.view.records, before.view.comms)
        )


def test_ranks_that_communicate_with_the_verdicts_have_priority() -> None:
    files = MegatronAppJob(replicas=4, iterations=1).files()
    ingest = ingest_of(read_rank_files(files))
    records = ingest.store.newest(1)[0].view.records
    most = int(np.bincount(records["rank"])[[0, 4, 5]].sum())
    (step,) = steps_around(ingest.store, verdict([4], [0]), most)
    assert set(step.view.records["rank"].tolist()) == {0, 4, 5}, (
        "the rank, its neighbour in the pipeline, and a replica"
    )


def verdict(ranks: list[int], steps: list[int], since: int = 0) -> dict[str, Any]:
    return {
        "id": "v1",
        "subject": {"ranks": ranks},
        "since": {"attempt": 0, "step": since, "time": 0.0},
        "evidence": {"steps": steps},
    }


def test_a_part_of_a_trace_is_around_the_newest_evidence(step_rows: Any, ring_header: Any) -> None:
    ingest = TraceIngest(StoreLimits())
    for rank in (0, 1):
        ingest.add_ring(0, ring_header(rank))
    for step in range(12):
        for rank in (0, 1):
            ingest.add_records(
                0, {"rank": rank, "worker": rank, "first": step * 9, "lost": 0}, step_rows(rank, step).tobytes()
            )
    of_step = len(ingest.store.newest(1)[0].view.records)

    def chosen(most: int, **of: Any) -> list[int]:
        return [step.view.step for step in steps_around(ingest.store, verdict(**of), most)]

    assert chosen(4 * of_step, ranks=[1], steps=[2, 5, 7]) == [2, 5, 6, 7]
    assert chosen(3 * of_step, ranks=[1], steps=[], since=4) == [3, 4, 5]
    assert chosen(10_000, ranks=[1], steps=[7]) == list(range(12))
    (only,) = steps_around(ingest.store, verdict([1], [7]), of_step // 2)
    assert set(only.view.records["rank"]) == {1}, "the verdict's rank is always shown"
    with pytest.raises(ExportError, match="no step of attempt 3 is stored any more"):
        steps_around(ingest.store, verdict([0], []) | {"since": {"attempt": 3, "step": 0}}, 10)


@pytest.mark.parametrize("format_", list(TraceFormat))
def test_a_part_of_a_trace_has_about_a_megabyte(step_rows: Any, ring_header: Any, format_: TraceFormat) -> None:
    ingest = TraceIngest(StoreLimits())
    for rank in (0, 1):
        ingest.add_ring(0, ring_header(rank))
    for step in range(1 + spans_of_a_slice(format_) // 300):
        for rank in (0, 1):
            part = np.concatenate([step_rows(rank, step)] * 30)
            part["ordinal"] = np.arange(len(part)) // 6
            ingest.add_records(0, {"rank": rank, "worker": rank, "first": step * len(part), "lost": 0}, part.tobytes())
    steps = steps_around(ingest.store, verdict([1], []), spans_of_a_slice(format_))
    content = trace_file(source_of(ingest, "demo", steps), format_)
    assert SLICE_BYTES / 2 < len(content) < SLICE_BYTES * 1.25
