"""Order of edges, replay and medians of groups in C++: equal to their plain forms in NumPy."""

import dataclasses
import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_graph import plain_messages_of, plain_replay, plain_segment_medians, plain_sort_by_level

from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.graph.matching import Messages, messages_of
from megatronapp_analyzer.graph.records import CommIndex
from megatronapp_analyzer.graph.replay import replay
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout
from megatronapp_common.trace import NO_COMM, RecordKind
from megatronapp_native import (
    column_medians,
    latest_times,
    longest_paths,
    match_messages,
    row_medians,
    segment_medians,
    shortest_transfers,
    sort_by_level,
)

pytestmark = pytest.mark.usefixtures("native_threads")

VALUES = st.sampled_from([0.0, 1.0, -2.5, math.nan]) | st.floats(-9, 9)


@given(
    events=st.integers(0, 12),
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    acyclic=st.booleans(),
)
def test_edges_are_sorted_as_by_the_plain_form(events: int, edges: list[tuple[int, int]], acyclic: bool) -> None:
    inside = [(a, b) for a, b in edges if max(a, b) < events and (a < b or not acyclic)]
    source, target = (np.array([edge[end] for edge in inside], np.int64) for end in (0, 1))
    order, begin, seen = sort_by_level(source, target, events)
    plain_order, plain_begin, plain_seen = plain_sort_by_level(source, target, events)
    assert seen == plain_seen
    assert order.tolist() == plain_order.tolist()
    assert begin.tolist() == plain_begin.tolist()


@pytest.mark.parametrize("scenarios", [(), (3,)])
def test_replays_are_those_of_the_plain_form(sim: ModuleType, scenarios: tuple[int, ...]) -> None:
    graph = build(sim.Simulator(sim.Job(layout=JobLayout.grid(tp=2, dp=2, pp=3)), 3).step(1))
    weights = np.random.default_rng(1).random((len(graph.edges.weight), *scenarios))
    assert replay(graph, weights).tolist() == plain_replay(graph, weights).tolist()


COMMS = {
    0: {0: Communicator("p2p", (0, 1)), 1: Communicator("dp", (0, 2)), 3: Communicator("p2p", (1, 0))},
    1: {0: Communicator("p2p", (1, 0)), 2: Communicator("p2p", (0, 1))},
    2: {0: Communicator("dp", (0, 2)), 1: Communicator("p2p", (0, 1, 2))},
}
RECEIVED = st.tuples(
    st.integers(-1, 4),
    st.sampled_from([0, 1, 2, 3, 9, NO_COMM]),
    st.integers(0, 3) | st.just(2**32 - 1),
    st.sampled_from(
        [RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT, RecordKind.FORWARD]
    ),
)


@given(received=st.lists(RECEIVED, max_size=40), comms=st.sampled_from([COMMS, {}, {1: COMMS[2]}]))
def test_messages_are_those_of_the_plain_form(
    received: list[tuple[int, int, int, RecordKind]], comms: dict[int, dict[int, Communicator]]
) -> None:
    records = np.zeros(len(received), RANK_RECORD)
    for row, (rank, slot, ordinal, kind) in zip(records, received, strict=True):
        row["rank"], row["comm"], row["ordinal"], row["kind"] = rank, slot, ordinal, kind
    found, plain = (match(records, CommIndex(comms)) for match in (messages_of, plain_messages_of))
    for field in dataclasses.fields(Messages):
        assert getattr(found, field.name).tolist() == getattr(plain, field.name).tolist(), field.name


@given(received=st.lists(RECEIVED, max_size=40), seed=st.integers(0, 2**32 - 1))
def test_shortest_transfers_are_those_of_numpy(received: list[tuple[int, int, int, RecordKind]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = np.zeros(len(received), RANK_RECORD)
    for row, (rank, slot, ordinal, kind) in zip(records, received, strict=True):
        row["rank"], row["comm"], row["ordinal"], row["kind"] = rank, slot, ordinal, kind
    records["start_ns"] = rng.integers(1_000, size=len(records))
    records["duration"] = rng.integers(100, size=len(records))
    messages, clock_of = messages_of(records, CommIndex(COMMS)).matched_only(), np.array([0, 1, 0])
    send, recv = records[messages.send_post], records[messages.recv_wait]
    delay = (
        recv["start_ns"].astype(np.int64) + 8 * recv["duration"].astype(np.int64) - send["start_ns"].astype(np.int64)
    )
    expected: dict[int, int] = {}
    for way, ns in zip((2 * clock_of[send["rank"]] + clock_of[recv["rank"]]).tolist(), delay.tolist(), strict=True):
        expected[way] = min(expected.get(way, ns), ns)
    every = messages_of(records, CommIndex(COMMS))
    ways, shortest = shortest_transfers(records.view(np.uint8), every.send_post, every.recv_wait, clock_of)
    found: dict[int, int] = {}
    for way, ns in zip(ways.tolist(), shortest.tolist(), strict=True):
        found[way] = min(found.get(way, ns), ns)
    assert found == expected


def test_tables_that_do_not_fit_are_refused() -> None:
    rows, numbers, pairs = np.zeros(36, np.uint8), np.zeros((1, 1), np.int64), np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match="35 bytes of rows"):
        match_messages(rows[:35], numbers, pairs, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="communicator 1 is none of the 1"):
        match_messages(rows, numbers + 1, pairs, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"pairs of \[number, 2\]"):
        match_messages(rows, numbers, pairs[0], [1, 2, 3, 4])


@given(rows=st.lists(st.tuples(st.integers(0, 4), VALUES), max_size=30))
def test_medians_of_segments_are_those_of_the_plain_form(rows: list[tuple[int, float]]) -> None:
    groups, values = np.array([group for group, _ in rows], np.int64), np.array([value for _, value in rows])
    np.testing.assert_array_equal(segment_medians(groups, values, 5), plain_segment_medians(groups, values, 5))


@given(columns=st.integers(0, 5), rows=st.lists(st.lists(VALUES, min_size=5, max_size=5), max_size=4))
def test_medians_of_rows_ignore_nan(columns: int, rows: list[list[float]]) -> None:
    table = np.array(rows).reshape(-1, 5)[:, :columns]
    expected = [np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else math.nan for row in table]
    np.testing.assert_array_equal(row_medians(table), np.array(expected))


@given(columns=st.integers(0, 20), rows=st.lists(st.lists(VALUES, min_size=20, max_size=20), max_size=6))
def test_medians_of_columns_ignore_nan(columns: int, rows: list[list[float]]) -> None:
    table = np.array(rows).reshape(-1, 20)[:, :columns]
    expected = [math.nan if np.isnan(each).all() else sorted_middle(each[~np.isnan(each)]) for each in table.T]
    np.testing.assert_array_equal(column_medians(table), np.array(expected))


def sorted_middle(values: NDArray[np.float64]) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def test_numbers_that_do_not_fit_are_refused() -> None:
    single, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="edges have 1 sources and 2 targets"):
        sort_by_level(single, two, 3)
    with pytest.raises(ValueError, match="an edge names event 7, and there are 3"):
        sort_by_level(single, single + 7, 3)
    rows = np.zeros(36, np.uint8)
    with pytest.raises(ValueError, match="1 sends and 2 receives"):
        shortest_transfers(rows, single, two, single)
    with pytest.raises(ValueError, match="1 is none of the 1 rows"):
        shortest_transfers(rows, single, single + 1, single)
    with pytest.raises(ValueError, match="rank 0 is none of the 0 with a clock"):
        shortest_transfers(rows, single, single, single[:0])
    with pytest.raises(ValueError, match="a table has two axes, and this one 1"):
        column_medians(np.zeros(2))
    with pytest.raises(ValueError, match="do not fit"):
        longest_paths(single, single + 1, np.zeros((2, 1)), np.zeros((2, 1)))
    with pytest.raises(ValueError, match="contiguous tables of float64"):
        longest_paths(single, single + 1, np.zeros((1, 1)), np.zeros((2, 1), np.float32))
    weights, sets = np.zeros(1), np.zeros(1, np.uint8)
    for initial, scenarios in ((np.zeros(2), 9), (np.zeros(2), 0), (np.zeros(0), 1)):
        with pytest.raises(ValueError, match=f"edges and {scenarios} scenarios do not fit"):
            latest_times(single, single + 1, weights, weights, sets, initial, scenarios)
    with pytest.raises(ValueError, match="2 sets and 2 times of 1 edges"):
        latest_times(single, single + 1, weights, weights, np.zeros(2, np.uint8), np.zeros(2), 1)
    with pytest.raises(ValueError, match="an edge names event 1, and there are 1"):
        latest_times(single, single + 1, weights, weights, sets, np.zeros(1), 1)
    with pytest.raises(ValueError, match="5 is none of the 5 groups"):
        segment_medians(single + 5, np.zeros(1), 5)
