"""Ring, journal, outbox, tiles, exact numbers and PCA: what holds for any input."""

import functools
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.scope.delivery.page_queue import MAX_QUEUED_BYTES, PageQueue
from megatronapp_analyzer.scope.probes import pca
from megatronapp_analyzer.scope.store.frame_log import FrameLog
from megatronapp_analyzer.scope.store.memory_budget import CLASS_FRACTIONS, MemoryBudget, RetentionClass
from megatronapp_analyzer.scope.store.row_table import RowTable
from megatronapp_analyzer.scope.views import export_values
from megatronapp_analyzer.scope.views.tiles import TILE, TileRef, missing, tile
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame

BIG = 1 << 40


@given(
    items=st.lists(st.tuples(st.sampled_from(RetentionClass), st.integers(1, 50)), max_size=60),
    limit=st.integers(0, 300),
)
def test_the_ring_stays_within_its_bytes_and_lets_go_in_order(
    items: list[tuple[RetentionClass, int]], limit: int
) -> None:
    ring = MemoryBudget(limit)
    removed: list[int] = []
    tickets = [ring.hold(kind, size, functools.partial(removed.append, n)) for n, (kind, size) in enumerate(items)]
    remaining = [n for n in range(len(items)) if n not in removed]
    assert ring.used_bytes == sum(items[n][1] for n in remaining) <= limit
    assert len(removed) == len(set(removed))
    for kind in RetentionClass:
        of_kind = [n for n in range(len(items)) if items[n][0] == kind]
        assert [n for n in removed if n in of_kind] == of_kind[: sum(n in of_kind for n in removed)]
        assert not of_kind or items[of_kind[-1]][1] * CLASS_FRACTIONS > limit or of_kind[-1] in remaining, (
            "the newest has its share"
        )
    assert not items or items[-1][1] * 2 > limit or len(items) - 1 in remaining
    for ticket in tickets:
        ring.release(ticket)
    assert (ring.used_bytes, len(ring)) == (0, 0)


def test_attention_rows_are_evicted_before_vectors_down_to_their_quota() -> None:
    ring, evicted = MemoryBudget(100), list[str]()
    ring.hold(RetentionClass.VECTORS, 40, lambda: evicted.append("vectors"))
    ring.hold(RetentionClass.VALUES, 30, lambda: evicted.append("values"))
    for name in ("old rows", "rows"):
        ring.hold(RetentionClass.ROWS, 15, functools.partial(evicted.append, name))
    ring.hold(RetentionClass.VECTORS, 30, lambda: evicted.append("newer vectors"))
    assert evicted == ["old rows", "values"]


def test_vectors_that_fill_the_ring_leave_memory_for_requested_values() -> None:
    ring = MemoryBudget(100)
    for _ in range(50):
        ring.hold(RetentionClass.VECTORS, 10, lambda: None)
    table: RowTable[str] = RowTable(ring, RetentionClass.VALUES)
    table.put("q", [0], np.zeros((1, 50), np.uint8))
    for _ in range(50):
        ring.hold(RetentionClass.VECTORS, 10, lambda: None)
    table.put("q", [1], np.zeros((1, 25), np.uint8))
    assert sorted(table.get("q")) == [1]


def test_rows_that_newer_ones_replaced_are_not_forgotten_with_the_older() -> None:
    ring = MemoryBudget(16)
    table: RowTable[str] = RowTable(ring, RetentionClass.ROWS)
    table.put("head", [0, 1], np.zeros((2, 4), np.uint8))
    table.put("head", [1, 2], np.ones((2, 4), np.uint8))
    table.put("other", [0], np.zeros((1, 4), np.uint8))
    assert sorted(table.get("head")) == [1, 2] and table.get("head")[1][0] == 1
    assert sorted(table.stored_keys()) == ["head", "other"]
    table.close()
    assert ring.used_bytes == 0


def step(number: int, size: int = 1000) -> Frame:
    tensor = Tensor("head.max", "u8", np.zeros((1, size), np.uint8))
    return build_frame(
        FrameType.SCOPE_STEP, {"run": "r", "step": number, "rows": [[0, number]], "ids": [number]}, [tensor]
    )


def rows(number: int, size: int = 1000) -> Frame:
    tensor = Tensor("attention", "u8s", np.zeros(size, np.uint8))
    return build_frame(FrameType.SCOPE_ROWS, {"run": "r", "step": number}, [tensor])


def state(name: str) -> Frame:
    return Frame(FrameType.SCOPE_RUN, {"run": "r", "state": name})


def drained(outbox: PageQueue) -> list[Frame]:
    out: list[Frame] = []
    while found := outbox.pop():
        out += [frames.decode(data) for data in found]
    return out


def test_a_journal_numbers_frames_and_stores_only_the_newest_of_each_state() -> None:
    journal = FrameLog("r", MemoryBudget(BIG))
    for name in ("queued", "queued", "queued", "prefill", "decoding", "decoding"):
        journal.append(state(name))
    journal.append(step(0))
    assert [entry.seq for entry in journal.after(0)] == [3, 4, 6, 7]
    assert [entry.seq for entry in journal.after(4)] == [6, 7]
    assert journal.newest == 7


def test_frames_evicted_from_the_ring_are_resent_as_gaps_without_numbers() -> None:
    ring = MemoryBudget(4000)
    journal = FrameLog("r", ring)
    for number in range(6):
        journal.append(step(number))
        journal.append(rows(number))
    outbox = PageQueue()
    outbox.resume("r", lambda: journal.after(0))
    got = drained(outbox)
    steps = [frame for frame in got if frame.type == FrameType.SCOPE_STEP]
    assert [frame.header["ids"] for frame in steps] == [[number] for number in range(6)]
    assert [bool(frame.body) for frame in steps] == [False, False, False, False, True, True]
    gaps = {frame.header["what"]: frame.header for frame in got if frame.type == FrameType.SCOPE_GAP}
    assert gaps["rows"]["reason"] == gaps["step"]["reason"] == "old"


@settings(max_examples=60)
@given(
    works=st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 4000)),
            st.tuples(st.just("rows"), st.integers(1, 4000)),
            st.tuples(st.just("state"), st.just(0)),
            st.tuples(st.just("credit"), st.integers(0, 5000)),
            st.tuples(st.just("send"), st.just(0)),
        ),
        max_size=80,
    )
)
def test_no_token_is_lost_and_every_gap_is_reported(works: list[tuple[str, int]]) -> None:
    journal, outbox = FrameLog("r", MemoryBudget(BIG)), PageQueue(credit=3000, limit_bytes=20_000)
    pushed: list[Any] = []
    got: list[Frame] = []
    made = {"step": lambda size: step(len(pushed), size), "rows": lambda size: rows(len(pushed), size)}
    for what, size in works:
        if what == "credit":
            outbox.grant(size)
        elif what == "send":
            got += [frames.decode(data) for data in outbox.pop()]
        else:
            entry = journal.append(state(f"s{len(pushed)}") if what == "state" else made[what](size))
            pushed.append(entry)
            outbox.push(entry)
            droppable = sum(len(entry.short or b"") + 400 for entry in pushed)
            assert outbox.waiting_bytes <= 20_000 + droppable
    got += drained(outbox)
    assert outbox.waiting_bytes == 0 and len(outbox) == 0
    tokens = [frame.header["step"] for frame in got if frame.type == FrameType.SCOPE_STEP]
    assert tokens == [entry.step for entry in pushed if entry.type == FrameType.SCOPE_STEP]
    states = [frame.header["state"] for frame in got if frame.type == FrameType.SCOPE_RUN]
    assert len(states) == sum(entry.type == FrameType.SCOPE_RUN for entry in pushed)
    whole = {frame.header["step"] for frame in got if frame.body}
    reported: set[tuple[str, int]] = set()
    for frame in got:
        if frame.type == FrameType.SCOPE_GAP:
            reported |= {(frame.header["what"], n) for n in range(frame.header["from"], frame.header["to"] + 1)}
    for entry in pushed:
        if entry.type in {FrameType.SCOPE_STEP, FrameType.SCOPE_ROWS}:
            assert entry.step in whole or (entry.what, entry.step) in reported


def test_resumed_frames_arrive_whole_as_fast_as_the_page_paints() -> None:
    journal = FrameLog("r", MemoryBudget(BIG))
    for number in range(60):
        journal.append(step(number, 250_000))
    outbox, got, owed = PageQueue(), [], 0
    outbox.resume("r", lambda: journal.after(0))
    while len(outbox):
        sent = outbox.pop()
        got += [frames.decode(data) for data in sent]
        owed += sum(map(len, sent))
        if not sent:
            outbox.grant(owed)
            owed = 0
    assert [frame.header["step"] for frame in got] == list(range(60))
    assert all(frame.body for frame in got)


def test_a_page_that_lets_everything_wait_is_let_go() -> None:
    outbox, journal = PageQueue(), FrameLog("r", MemoryBudget(BIG))
    big = Frame(FrameType.SCOPE_RUN, {"run": "r", "state": "queued", "text": "x" * (1 << 20)})
    for _ in range(MAX_QUEUED_BYTES >> 20):
        assert not outbox.overrun
        outbox.push(journal.append(big))
    assert outbox.overrun


@settings(max_examples=30, deadline=None)
@given(data=st.data(), length=st.integers(1, 700), level=st.integers(0, 8))
def test_tiles_are_the_largest_of_what_they_cover(data: st.DataObject, length: int, level: int) -> None:
    whole = np.tril(np.random.default_rng(length).integers(0, 256, (length, length), np.uint8))
    known = {query: whole[query, : query + 1] for query in range(length)}
    span = TILE << level
    q, k = (data.draw(st.integers(0, (length - 1) // span)) for _ in range(2))
    place = TileRef(level=level, q=q, k=k, length=length)
    assert place.inside and missing(place, known) is None
    found = tile(place, known)
    region = whole[q * span : (q + 1) * span, k * span : (k + 1) * span]
    side = 1 << level
    padded = np.zeros([-(-size // side) * side for size in region.shape], np.uint8)
    padded[: region.shape[0], : region.shape[1]] = region
    shape = (padded.shape[0] // side, side, padded.shape[1] // side, side)
    np.testing.assert_array_equal(found, padded.reshape(shape).max(axis=(1, 3)))


def test_a_tile_names_the_queries_that_it_lacks() -> None:
    known = {query: np.zeros(query + 1, np.uint8) for query in range(300) if query not in {260, 270}}
    assert missing(TileRef(level=0, q=1, k=0, length=300), known) == range(260, 271)
    assert missing(TileRef(level=0, q=0, k=1, length=300), known) is None
    assert not TileRef(level=0, q=2, k=0, length=300).inside
    assert TileRef(level=0, q=0, k=0, length=300).full and not TileRef(level=0, q=1, k=0, length=300).full


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_every_export_format_has_the_same_numbers(numbers: list[float]) -> None:
    row = np.array(numbers, "<f4")
    block = export_values.block("residual", (0, 1, None), {7: row}, [7])
    np.testing.assert_array_equal(np.load(io.BytesIO(export_values.render(block, "npy")))[0], row)
    line = export_values.render(block, "csv").decode().splitlines()[1].split(",")
    assert line[0] == "7"
    np.testing.assert_array_equal(np.array([float(field) for field in line[1:]], "<f4"), row)
    values = json.loads(export_values.render(block, "json"))["values"][0]
    finite = [number if np.isfinite(number) else None for number in row.tolist()]
    assert values == finite


def cloud(seed: int, count: int = 60, width: int = 24) -> Any:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, width)) * np.linspace(5, 0.1, width) + random.normal(size=width)


def test_axes_are_those_of_the_covariance() -> None:
    rows = cloud(1)
    basis = pca.fit(rows)
    centred = rows - rows.mean(axis=0)
    sizes = np.linalg.eigvalsh(centred.T @ centred)[::-1]
    np.testing.assert_allclose(basis.explained, sizes[:8] / sizes.sum(), rtol=1e-9)
    np.testing.assert_allclose((basis.project(rows) ** 2).sum(axis=0), sizes[:8], rtol=1e-9)
    np.testing.assert_allclose(basis.axes @ basis.axes.T, np.eye(8), atol=1e-12)
    assert all(axis[np.abs(axis).argmax()] > 0 for axis in basis.axes)


@given(seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_a_refit_stays_near_the_old_axes(seed: int) -> None:
    old = pca.fit(cloud(1))
    rows = cloud(1) + 0.05 * np.random.default_rng(seed).normal(size=(60, 24))
    new = pca.fit(rows, onto=old)
    plain = pca.fit(rows)
    np.testing.assert_allclose(new.axes @ new.axes.T, np.eye(8), atol=1e-9)
    assert np.linalg.norm(new.axes - old.axes) <= np.linalg.norm(plain.axes - old.axes) + 1e-9
    assert new.explained.sum() == pytest.approx(plain.explained.sum())
    centred = rows - rows.mean(axis=0)
    explained = (new.project(rows) ** 2).sum(axis=0) / (centred**2).sum()
    np.testing.assert_allclose(explained, new.explained, rtol=1e-6)


def test_few_or_equal_rows_have_few_axes() -> None:
    basis = pca.fit(cloud(1, count=3))
    assert np.count_nonzero(np.abs(basis.axes).sum(axis=1)) == 2
    assert pca.fit(np.ones((4, 5))).explained.tolist() == [0] * 8
