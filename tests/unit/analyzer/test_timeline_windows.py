"""Parts of a timeline against a plain reading of the same spans."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatronapp_analyzer.hub.http.timeline.schemas import TimelineQuery
from megatronapp_analyzer.hub.http.timeline.views import timeline, timeline_part
from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.message_arrows import match_transfers, peers
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.timeline import windows
from megatronapp_analyzer.hub.timeline.columns import ColumnsCache, columns_of
from megatronapp_analyzer.hub.timeline.windows import Bounds, rank_runs, select_window
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RecordKind

KINDS = (
    RecordKind.STEP,
    RecordKind.FORWARD,
    RecordKind.BACKWARD,
    RecordKind.SEND_POST,
    RecordKind.RECV_WAIT,
    RecordKind.LAYER_FORWARD,
    RecordKind.METRIC,
)
UNIT_NS = 8
Row = tuple[int, RecordKind, int, int, int]
"""Rank, kind, start, units of duration, ordinal."""
ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(KINDS), st.integers(0, 500), st.integers(0, 12), st.integers(0, 3)),
    min_size=1,
    max_size=60,
)


def stored(rows: list[Row], offsets_ns: tuple[int, ...] = (0, 7, 0, 0, 100, 0)) -> StoredStep:
    """A step of six ranks in a ring, each of which sends to the next."""
    table = np.zeros(len(rows), RANK_RECORD)
    table["comm"], table["microbatch"] = NO_COMM, NO_MICROBATCH
    for record, (rank, kind, start, units, ordinal) in zip(table, rows, strict=True):
        record["rank"], record["kind"], record["start_ns"], record["duration"] = rank, kind, 1000 + start, units
        if kind in (RecordKind.SEND_POST, RecordKind.RECV_WAIT):
            record["comm"], record["ordinal"] = int(kind == RecordKind.RECV_WAIT), ordinal
    table = table[np.lexsort((table["start_ns"], table["rank"]))]
    link = functools.partial(Communicator, "p2p")
    comms = {rank: {0: link((rank, (rank + 1) % 6)), 1: link(((rank - 1) % 6, rank))} for rank in range(6)}
    digest = StepDigest(
        attempt=0, step=3, start_real_ns=0, duration_ns=1, complete=True, values=np.zeros((4, 6), np.float32)
    )
    view = StepRecords(attempt=0, step=3, records=table, comms=comms)
    return StoredStep(view=view, digest=digest, offsets_ns=np.array(offsets_ns, np.int64))


def plainly(step: StoredStep, bounds: Bounds) -> dict[int, int]:
    """Place of each span that is drawn, and how many spans were merged into it."""
    records, found, taken = step.view.records, dict[int, int](), dict[tuple[Any, ...], int]()
    starts = records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    starts = (starts - starts.min()).tolist()
    tracks = sorted(set(records["rank"].tolist()))[bounds.first_track : bounds.first_track + bounds.tracks]
    pixel_ns = (bounds.to_ns - bounds.from_ns) / bounds.pixels
    for place, (record, start) in enumerate(zip(records, starts, strict=True)):
        length = int(record["duration"]) * UNIT_NS
        shown = record["rank"] in (tracks if bounds.ranks is None else bounds.ranks)
        if not shown or record["kind"] == RecordKind.METRIC or start > bounds.to_ns or start + length < bounds.from_ns:
            continue
        pixel = (record["rank"], record["kind"], int(np.floor((start - bounds.from_ns) / pixel_ns)))
        if length < pixel_ns and pixel in taken:
            found[taken[pixel]] += 1
            continue
        found[place] = 1
        if length < pixel_ns:
            taken[pixel] = place
    return found


BOUNDS = st.builds(
    lambda start, size, pixels, first, tracks, ranks: Bounds(
        from_ns=start, to_ns=start + size, pixels=pixels, first_track=first, tracks=tracks, ranks=ranks
    ),
    st.integers(0, 600),
    st.integers(1, 700),
    st.integers(1, 40),
    st.integers(0, 6),
    st.integers(1, 6),
    st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=4),
)


MESSAGES: list[Row] = [
    (rank, kind, at, 2, ordinal)
    for ordinal, at in enumerate((0, 40, 80, 120))
    for rank in range(6)
    for kind in (RecordKind.FORWARD, RecordKind.SEND_POST, RecordKind.RECV_WAIT)
] + [(1, RecordKind.FORWARD, 43, 2, 0)]
"""Four microbatches, in each of which every rank computes, sends to the next and receives from the one before."""


@given(ROWS, BOUNDS)
@example(MESSAGES, Bounds(from_ns=0, to_ns=160, pixels=10, first_track=1, tracks=2))
@example(MESSAGES, Bounds(from_ns=30, to_ns=100, pixels=2))
def test_a_part_has_the_spans_that_a_picture_of_it_draws(rows: list[Row], bounds: Bounds) -> None:
    step = stored(rows)
    found = select_window(columns_of(step, None), bounds)
    assert dict(zip(found.places.tolist(), found.merged.tolist(), strict=True)) == plainly(step, bounds)
    assert found.places.tolist() == sorted(found.places.tolist())
    shown = found.places.tolist()
    whole = {(int(send), int(receive)) for send, receive in match_transfers(step.view)}
    assert {(shown[send], shown[receive]) for send, receive in found.flows.tolist()} == {
        (send, receive) for send, receive in whole if send in shown and receive in shown
    }


@given(ROWS)
def test_columns_are_those_of_the_whole_step(rows: list[Row]) -> None:
    step = stored(rows)
    columns = columns_of(step, None)
    assert columns.peer.tolist() == peers(step.view).tolist()
    assert columns.track_ranks.tolist() == sorted({row[0] for row in rows})
    whole = timeline(step)
    assert whole.window is None
    assert {tuple(flow) for flow in whole.flows} == {(int(a), int(b)) for a, b in match_transfers(step.view)}
    part = timeline_part(step, None, columns, TimelineQuery(pixels=8192), 8192)
    assert part.window is not None
    assert part.start_ns == [whole.start_ns[place] for place in part.window.place]
    assert part.rank == [whole.rank[place] for place in part.window.place]


@given(ROWS, st.integers(0, 20))
@example(MESSAGES, 16)
@example(MESSAGES, 70)
def test_a_requested_span_is_returned_with_those_that_keys_select(rows: list[Row], place: int) -> None:
    step = stored(rows)
    columns = columns_of(step, None)
    nothing = Bounds(from_ns=9000, to_ns=9001, pixels=1)
    found = select_window(columns, dataclasses.replace(nothing, span=place)).places.tolist()
    records = step.view.records
    if place >= len(records) or records["kind"][place] == RecordKind.METRIC:
        assert found == []
        return
    edges = (RecordKind.STEP, RecordKind.LAYER_FORWARD, RecordKind.METRIC)
    main = [
        at
        for at in range(len(records))
        if records["rank"][at] == records["rank"][place] and records["kind"][at] not in edges
    ]
    main.sort(key=lambda at: (records["start_ns"][at], -int(records["duration"][at])))
    expected = {place, *main[:1], *main[-1:]}
    if place in main:
        at = main.index(place)
        expected |= set(main[max(0, at - 1) : at + 2])
    for send, receive in match_transfers(step.view).tolist():
        expected |= {send, receive} if place in (send, receive) else set()
    assert found == sorted(expected)


def test_the_size_of_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [(rank, RecordKind.FORWARD, 8 * at, 1, 0) for rank in range(6) for at in range(50)]
    columns = columns_of(stored(rows, (0,) * 6), None)
    monkeypatch.setattr(windows, "MAX_SPANS", 40)
    found = select_window(columns, Bounds(from_ns=0, to_ns=400, pixels=400))
    assert len(found.places) <= 40
    assert found.pixels < 50
    assert found.merged.sum() == 300


def test_tracks_of_forward_ranks_are_first() -> None:
    layout = dataclasses.replace(
        JobLayout.grid(dp=6), roles=(RankRole.BACKWARD, *[RankRole.FORWARD] * 4, RankRole.BACKWARD)
    )
    columns = columns_of(stored([(rank, RecordKind.FORWARD, 0, 1, 0) for rank in range(6)]), layout)
    assert columns.track_ranks.tolist() == [1, 2, 3, 4, 0, 5]
    assert rank_runs(columns.track_ranks) == [(1, 4), (0, 1), (5, 1)]
    assert rank_runs(np.zeros(0, np.int64)) == []


def test_columns_are_cached_until_their_step_changes() -> None:
    cache, step = ColumnsCache(limit_bytes=1), stored([(0, RecordKind.FORWARD, 0, 1, 0)])
    first = cache.of(step, None)
    assert cache.of(step, None) is first
    late: NDArray[Any] = np.concatenate([step.view.records, step.view.records])
    more = dataclasses.replace(step, view=dataclasses.replace(step.view, records=late))
    assert len(cache.of(more, None).records) == 2
    other = dataclasses.replace(step, view=dataclasses.replace(step.view, step=4))
    again = cache.of(other, None)
    assert cache.of(other, None) is again
    assert cache.of(more, None) is not first


def test_columns_follow_the_clocks_and_the_roles_of_a_step() -> None:
    """Clocks of nodes are known after the step, which is drawn before."""
    cache = ColumnsCache()
    step = stored([(0, RecordKind.FORWARD, 0, 9, 0), (1, RecordKind.FORWARD, 0, 9, 0)], (0,) * 6)
    assert cache.of(step, None).starts_ns.tolist() == [0, 0]
    aligned = dataclasses.replace(step, offsets_ns=np.array([0, 5000, 0, 0, 0, 0], np.int64), aligned=True)
    assert cache.of(aligned, None).starts_ns.tolist() == [0, 5000]
    roles = dataclasses.replace(JobLayout.grid(dp=2), roles=(RankRole.BACKWARD, RankRole.FORWARD))
    assert cache.of(aligned, roles).track_ranks.tolist() == [1, 0]


def test_the_memory_of_the_cache_counts_the_records() -> None:
    first, second = (stored([(0, RecordKind.FORWARD, 0, 1, 0)]) for _ in range(2))
    second = dataclasses.replace(second, view=dataclasses.replace(second.view, step=4))
    columns = ColumnsCache().of(first, None)
    assert columns.nbytes > first.view.records.nbytes
    cache = ColumnsCache(limit_bytes=2 * columns.nbytes - 1)
    before = cache.of(first, None)
    cache.of(second, None)
    assert cache.of(first, None) is not before


@pytest.mark.parametrize(
    ("ends", "window"), [((None, None), (100, 180)), ((None, 50), (49, 50)), ((150, None), (150, 180))]
)
def test_a_missing_end_of_a_part_never_reverses_it(
    ends: tuple[int | None, int | None], window: tuple[int, int]
) -> None:
    metric = (0, RecordKind.METRIC, 0, 0, 0)
    step = stored([metric, (0, RecordKind.FORWARD, 100, 10, 0)])
    query = TimelineQuery(pixels=10, from_ns=ends[0], to_ns=ends[1])
    part = timeline_part(step, None, ColumnsCache().of(step, None), query, 10)
    assert part.window is not None
    assert (part.window.from_ns, part.window.to_ns) == window
