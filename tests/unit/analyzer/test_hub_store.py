import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.align.step_clocks import VALID_STEPS, AttemptClocks
from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.ingest.assembly import PATIENCE_STEPS
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.step_cache import StepCache
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.ingest.thinning_list import ThinningList
from megatronapp_common.trace import Flag, RecordKind


class Feeder:
    """Source of steps of two ranks, one frame per rank and step."""

    def __init__(self, ingest: TraceIngest, step_rows: Any, ring_header: Any) -> None:
        self.ingest = ingest
        self.step_rows = step_rows
        self.ring_header = ring_header
        self.first: dict[tuple[int, int], int] = {}

    def rings(self, attempt: int = 0, **changes: Any) -> None:
        for rank in (0, 1):
            self.ingest.add_ring(attempt, self.ring_header(rank, **changes))

    def send(self, rank: int, rows: Any, *, attempt: int = 0, lost: int = 0, skip: int = 0) -> Any:
        first = self.first.get((attempt, rank), 0) + skip
        self.first[attempt, rank] = first + len(rows)
        header = {"rank": rank, "worker": rank, "first": first, "lost": lost}
        return self.ingest.add_records(attempt, header, rows.tobytes())

    def step(self, step: int, attempt: int = 0, **how: Any) -> list[Any]:
        return [
            stored
            for rank in (0, 1)
            for stored in self.send(rank, self.step_rows(rank, step, **how), attempt=attempt).finished
        ]


@pytest.fixture
def feeder(step_rows: Any, ring_header: Any) -> Feeder:
    return Feeder(TraceIngest(StoreLimits(full_steps=4)), step_rows, ring_header)


def test_step_has_real_time_and_digest(feeder: Feeder) -> None:
    feeder.rings()
    (stored,) = feeder.step(2)
    assert stored.digest.duration_ns == 10_000_000
    assert stored.digest.start_real_ns == 1_700_000_000_000_000_000 + 1_020_000_000
    assert stored.view.real_time_s == pytest.approx(1_700_000_001.03)
    assert stored.digest.complete
    compute, wait, step, _ = stored.digest.values
    assert compute == pytest.approx([0.006, 0.006])
    assert wait == pytest.approx([0.001, 0.001])
    assert step == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(("flags", "uncertainty_s"), [(0, {}), (int(Flag.DEVICE_CLOCK), {0: 2e-5, 1: 2e-5})])
def test_the_uncertainty_of_clocks_of_devices_is_known_on_a_single_node(
    feeder: Feeder, flags: int, uncertainty_s: dict[int, float]
) -> None:
    feeder.rings()
    for rank in (0, 1):
        rows = feeder.step_rows(rank, 0)
        rows["flags"] |= np.uint8(flags)
        feeder.send(rank, rows)
    newest = feeder.ingest.newest
    assert newest is not None
    assert newest.clock_uncertainty_s == pytest.approx(uncertainty_s)


def test_slowdown_without_peers_is_against_own_history(feeder: Feeder) -> None:
    feeder.rings()
    for step in range(8):
        (stored,) = feeder.step(step)
    assert stored.digest.values[3] == pytest.approx([1.0, 1.0])
    (stored,) = feeder.step(8, compute_ms=6.0)
    assert stored.digest.values[3] == pytest.approx([2.0, 2.0])


def test_only_the_newest_steps_are_stored_in_full(feeder: Feeder) -> None:
    feeder.rings()
    for step in range(10):
        feeder.step(step)
    store = feeder.ingest.store
    assert store.full_steps == 4
    assert [digest.step for digest in store.digests(None, None)] == list(range(10))
    assert store.find(5, None) is None
    newest = store.find(None, None)
    assert newest is not None
    assert newest.view.step == 9
    assert [stored.view.step for stored in store.select(7, 8, newest=1)] == [7, 8]
    assert [stored.view.step for stored in store.select(None, None, newest=2)] == [8, 9]
    assert store.full_bytes == sum(stored.view.records.nbytes for stored in store.select(0, None, newest=0))


def test_byte_budget_beats_the_number_of_steps(step_rows: Any, ring_header: Any) -> None:
    feeder = Feeder(TraceIngest(StoreLimits(full_steps=100, full_bytes=2000)), step_rows, ring_header)
    feeder.rings()
    for step in range(30):
        feeder.step(step)
        assert feeder.ingest.store.full_bytes <= 2000
    assert 0 < feeder.ingest.store.full_steps < 30


def test_repeated_records_are_skipped_and_gaps_are_lost(feeder: Feeder, step_rows: Any) -> None:
    feeder.rings()
    rows = step_rows(0, 0)
    assert feeder.send(0, rows).records == len(rows)
    feeder.first[0, 0] = 0
    assert feeder.send(0, rows).records == 0
    feeder.first[0, 0] = len(rows) - 2
    assert feeder.send(0, step_rows(0, 1)).records == len(rows) - 2
    state = feeder.ingest.attempts[0]
    assert sum(state.lost.values()) == 0
    feeder.send(0, step_rows(0, 2), skip=7)
    assert state.lost == {(0, 0): 7}


def test_first_contact_counts_the_losses_reported_by_the_ring(feeder: Feeder, step_rows: Any) -> None:
    feeder.rings()
    feeder.send(0, step_rows(0, 40), lost=3, skip=500)
    assert feeder.ingest.attempts[0].lost == {(0, 0): 3}


def test_late_span_joins_its_step(feeder: Feeder, rows: Any) -> None:
    feeder.rings()
    (before,) = feeder.step(0)
    feeder.send(0, rows([{"kind": RecordKind.CHECKPOINT, "step": 0, "start_ns": 2_000_000_000, "duration": 5}]))
    stored = feeder.ingest.store.find(0, 0)
    assert stored is not None
    assert len(stored.view.records) == len(before.view.records) + 1
    assert len([digest for digest in feeder.ingest.store.digests(None, None)]) == 1


def test_a_new_attempt_ends_the_previous_attempt(feeder: Feeder, step_rows: Any, ring_header: Any) -> None:
    feeder.rings()
    feeder.step(0)
    feeder.send(0, step_rows(0, 1))
    (left,) = feeder.ingest.add_ring(1, ring_header(0))
    assert (left.view.attempt, left.view.step, left.digest.complete) == (0, 1, False)
    newest = feeder.ingest.newest
    assert newest is not None
    assert newest.attempt == 1


def test_curves_are_built_from_metric_records(feeder: Feeder) -> None:
    feeder.rings()
    for step in range(3):
        feeder.step(step)
    points = list(feeder.ingest.curves.curve("loss"))
    assert [(point.step, point.value) for point in points] == [(0, 4.0), (1, 5.0), (2, 6.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2 of a world of 2"),
        ({"bootId": None, "metadata": {}}, "localRank"),
        ({"clockPairs": [["x"]]}, "RING"),
    ],
)
def test_bad_ring_is_refused(feeder: Feeder, ring_header: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        feeder.ingest.add_ring(0, ring_header(0) | change)


def test_rings_must_agree_on_the_world(feeder: Feeder, ring_header: Any) -> None:
    feeder.ingest.add_ring(0, ring_header(0))
    other = ring_header(1)
    other["metadata"] = other["metadata"] | {"world": 4}
    with pytest.raises(ProtocolError, match="world of 4"):
        feeder.ingest.add_ring(0, other)


def test_a_layout_that_does_not_fit_loses_no_steps(feeder: Feeder, step_rows: Any, ring_header: Any) -> None:
    """Let the one known ring give a world of 2 and sizes for 4; rank 0's agent continues in spite of that."""
    ring = ring_header(0)
    ring["metadata"]["layout"] |= {"data": 2}
    feeder.ingest.add_ring(0, ring)
    count = PATIENCE_STEPS + 10
    finished = [stored for step in range(count) for stored in feeder.send(0, step_rows(0, step)).finished]
    assert [stored.view.step for stored in finished] == list(range(count))
    assert feeder.ingest.attempts[0].missing == [1]
    assert feeder.ingest.attempts[0].layout is None


def test_records_must_be_whole_and_announced(feeder: Feeder) -> None:
    header = {"rank": 0, "worker": 0, "first": 0, "lost": 0}
    with pytest.raises(ProtocolError, match="before its RING"):
        feeder.ingest.add_records(0, header, b"")
    feeder.rings()
    with pytest.raises(ProtocolError, match="not whole records"):
        feeder.ingest.add_records(0, header, b"x" * 33)
    with pytest.raises(ProtocolError, match="first"):
        feeder.ingest.add_records(0, {"rank": 0, "worker": 0, "lost": 0}, b"")


def two_nodes(ingest: TraceIngest, step_rows: Any, ring_header: Any) -> tuple[Feeder, Callable[[int], Any]]:
    """Return a feeder of two nodes, the second 30 ms off in real time, and a function that sends a step.

    The messages of the step tie the spans of rank 1 to those of rank 0.
    """
    feeder = Feeder(ingest, step_rows, ring_header)
    ingest.add_ring(0, ring_header(0, boot_id="a"))
    ingest.add_ring(0, ring_header(1, boot_id="b", offset_ns=1_700_000_000_030_000_000 - 5_000_000_000))

    def send(step: int) -> Any:
        feeder.send(0, step_rows(0, step))
        shifted = step_rows(1, step)
        shifted["start_ns"] += np.uint64(5_000_000_000)
        (stored,) = feeder.send(1, shifted).finished
        return stored

    return feeder, send


def error_ns(stored: Any) -> int:
    return abs(int(stored.offsets_ns[1]) + 5_000_000_000 - int(stored.offsets_ns[0]))


def test_nodes_with_other_clocks_are_tied_by_their_messages(step_rows: Any, ring_header: Any) -> None:
    _, send = two_nodes(TraceIngest(StoreLimits()), step_rows, ring_header)
    for step in range(6):
        stored = send(step)
    assert stored.aligned
    assert error_ns(stored) < 3_000_000


def test_clocks_that_are_estimated_elsewhere_change_stored_steps(step_rows: Any, ring_header: Any) -> None:
    """A reading may be late, there twice, or after another report of a ring, and holds for the steps that follow."""
    ingest = TraceIngest(StoreLimits(), aligns=False)
    _, send = two_nodes(ingest, step_rows, ring_header)
    first, second = send(0), send(1)
    assert (first.aligned, error_ns(first)) == (False, 30_000_000)
    layout = ingest.attempts[0].layout
    assert layout is not None
    clocks = AttemptClocks(layout)
    reading = clocks.observe(first.view)
    assert reading is not None
    ingest.add_ring(0, ring_header(0, boot_id="a"))
    for _ in range(2):
        ingest.take_reading(reading)
    stored = ingest.store.find(0, 0)
    assert stored is not None
    assert stored.aligned
    assert error_ns(stored) < 3_000_000
    assert ingest.attempts[0].clock_doubt_s(1) < 0.003
    third = send(2)
    assert (third.aligned, error_ns(third) < 3_000_000) == (False, True)
    assert not ingest.store.find(1, 0).aligned  # type: ignore[union-attr]
    assert error_ns(send(VALID_STEPS + 1)) == 30_000_000, "a reading of long ago says nothing"
    ingest.forget_readings()
    assert ingest.attempts[0].clock_doubt_s(1) == math.inf
    assert error_ns(send(VALID_STEPS + 2)) == 30_000_000
    other = dataclasses.replace(reading, tied=reading.tied[:1], uncertainty_s=reading.uncertainty_s[:1])
    ingest.take_reading(other)
    ingest.take_reading(dataclasses.replace(reading, attempt=7))
    assert ingest.attempts[0].clock_uncertainty_s == {}
    assert second.view.step == 1


class CountingRings(dict[int, Any]):
    """Rings of an attempt, and how often all of them were read."""

    reads = 0

    def values(self) -> Any:
        self.reads += 1
        return super().values()


def test_the_rings_are_searched_for_the_first_clock_once_for_all_ranks(ring_header: Any) -> None:
    """A search for each of 10,000 ranks would take the hub some seconds."""
    ingest = TraceIngest(StoreLimits(), aligns=False)
    for rank, node in enumerate("ab"):
        ingest.add_ring(0, ring_header(rank, boot_id=node))
    state = ingest.attempts[0]
    state.rings = rings = CountingRings(state.rings)
    assert [state.clock_doubt_s(rank) for rank in range(2)] == [0.0, math.inf]
    assert rings.reads == 1
    ingest.add_ring(0, ring_header(0, boot_id="b"))
    assert [state.clock_doubt_s(rank) for rank in range(2)] == [0.0, 0.0]


def test_figures_of_a_step_are_not_stored_before_its_clocks_are_known(step_rows: Any, ring_header: Any) -> None:
    ingest = TraceIngest(StoreLimits(), aligns=False)
    _, send = two_nodes(ingest, step_rows, ring_header)
    step = send(0)
    cache: StepCache[int] = StepCache(lambda _: 8)
    assert cache.figures([step], error_ns) == [30_000_000]
    ingest.store.align(step.key, np.array([0, -5_000_000_000]))
    aligned = ingest.store.find(0, 0)
    assert aligned is not None
    assert cache.figures([aligned], error_ns) == [0]
    assert cache.figures([aligned], lambda _: 1) == [0]


@given(st.integers(2, 50), st.integers(0, 300))
def test_thinning_keeps_the_newest_and_the_order(capacity: int, count: int) -> None:
    newest: ThinningList[int] = ThinningList(capacity)
    for value in range(count):
        newest.append(value)
    values = list(newest)
    assert len(values) <= capacity
    assert values == sorted(set(values))
    assert values[-(capacity // 2) :] == list(range(count))[-len(values[-(capacity // 2) :]) :] or not values
    if values:
        assert values[0] == 0
        assert newest.newest() == count - 1
    assert newest.tail(3) == values[-3:]
    assert newest.tail(0) == []


def test_stored_values_are_not_changed_by_late_spans(feeder: Feeder, rows: Any) -> None:
    feeder.rings()
    (before,) = feeder.step(0)
    copy = dataclasses.replace(before)
    length = len(before.view.records)
    feeder.send(1, rows([{"kind": RecordKind.EVALUATE, "step": 0, "start_ns": 1, "duration": 5}]))
    assert len(copy.view.records) == length
