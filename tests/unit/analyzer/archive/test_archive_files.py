"""Files of the archive: records are read as they were written, by the statistics of row groups."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pyarrow import parquet

from megatronapp_analyzer.errors import ArchiveError
from megatronapp_analyzer.hub.archive import parquet_files, schema
from megatronapp_analyzer.hub.archive.names import hour_of, records_name
from megatronapp_analyzer.hub.archive.rows import (
    ROW,
    CollectedRows,
    RingRange,
    Rows,
    collect,
    frames_of,
    is_sample,
    real_ns,
    sorted_rows,
)
from megatronapp_analyzer.hub.archive.values import RowFilter
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import RECORD, RecordKind

NS = 1_000_000_000


def by_ring(rows: Rows) -> Rows:
    return rows[np.lexsort((rows["index"], rows["worker"], rows["rank"]))]


@st.composite
def record_frames(draw: st.DrawFn) -> list[Frame]:
    """Frames of up to four ranks and a worker, with any bytes as records, some sent again or with a gap before."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    indices = dict.fromkeys(range(-1, 4), 0)
    found = []
    for rank, count, shift in draw(
        st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 40), st.integers(-5, 3)), max_size=20)
    ):
        first = max(0, indices[rank] + shift)
        records: NDArray[np.void] = np.frombuffer(random.bytes(count * RECORD.itemsize), RECORD).copy()
        records["step"] %= 5
        header = {"rank": None if rank < 0 else rank, "worker": max(rank, 0) // 2, "first": first, "lost": 0}
        found.append(Frame(FrameType.RECORDS, header, records.tobytes()))
        indices[rank] = max(indices[rank], first + count)
    return found


@settings(max_examples=20)
@given(frames=record_frames(), offset=st.integers(-(2**62), 2**62))
def test_any_records_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, frames: list[Frame], offset: int
) -> None:
    collected = collect(frames, {})
    collected.rows["offset_ns"] = offset
    path = tmp_path_factory.mktemp("store") / "2026-11-28T23" / records_name(3, 7)
    if not len(collected.rows):
        return
    parquet_files.write_records(path, 3, collected)
    found = np.concatenate(list(parquet_files.read_rows(path)))
    assert found.tobytes() == sorted_rows(collected.rows)[0].tobytes()
    assert by_ring(found).tobytes() == by_ring(collected.rows).tobytes()
    file = parquet_files.open_file(path)
    assert (file.attempt, file.segment, file.records) == (3, 7, len(found))
    assert file.rings == collected.rings
    assert (file.real_ns.least, file.real_ns.most) == (real_ns(found).min(), real_ns(found).max())


@settings(max_examples=40)
@given(frames=record_frames())
def test_records_are_collected_once_and_sent_again_in_the_order_of_their_rings(frames: list[Frame]) -> None:
    collected = collect(frames, {})
    seen: dict[tuple[int, int], dict[int, bytes]] = {}
    for frame in frames:
        first, rank = frame.header["first"], -1 if frame.header["rank"] is None else frame.header["rank"]
        ring = seen.setdefault((rank, frame.header["worker"]), {})
        newest = max(ring, default=-1)
        records = np.frombuffer(frame.body, RECORD)
        ring |= {first + at: row.tobytes() for at, row in enumerate(records) if first + at > newest}
    expected = {(*ring, index): row for ring, rows in seen.items() for index, row in rows.items()}
    found = {
        (int(row["rank"]), int(row["worker"]), int(row["index"])): row.tobytes()[: RECORD.itemsize]
        for row in collected.rows
    }
    assert len(found) == len(collected.rows)
    assert found == expected
    again = collect(frames_of(sorted_rows(collected.rows)[0]), {})
    assert by_ring(again.rows).tobytes() == by_ring(collected.rows).tobytes()


def test_a_late_record_is_sent_again_after_the_steps_before_it() -> None:
    records = np.zeros(6, RECORD)
    records["step"] = [1, 1, 2, 1, 2, 3]  # a checkpoint of step 1 ends within step 2
    header = {"rank": 0, "worker": 0, "first": 0, "lost": 0}
    rows = collect([Frame(FrameType.RECORDS, header, records.tobytes())], {}).rows
    sent = [
        (frame.header["first"], np.frombuffer(frame.body, RECORD)["step"].tolist())
        for frame in frames_of(sorted_rows(rows)[0])
    ]
    assert sent == [(0, [1, 1]), (2, [2, 1, 2]), (5, [3])]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"rank": 0, "worker": 0, "first": "x", "lost": 0},
        {"rank": -1, "worker": 0, "first": 0, "lost": 0},
        {"rank": 2**40, "worker": 0, "first": 0, "lost": 0},
        {"rank": 0, "worker": None, "first": 0, "lost": 0},
        {"rank": 0, "worker": 0, "first": -1, "lost": 0},
        {"rank": 0, "worker": 0, "first": 2**63, "lost": 0},
    ],
)
def test_a_malformed_frame_is_counted_and_the_others_are_collected(header: dict[str, Any]) -> None:
    body = np.zeros(2, RECORD).tobytes()
    good = [Frame(FrameType.RECORDS, {"rank": 0, "worker": 0, "first": first, "lost": 0}, body) for first in (0, 2)]
    collected = collect([good[0], Frame(FrameType.RECORDS, header, body), good[1]], {})
    assert (len(collected.rows), collected.malformed) == (4, 1)
    shortened = Frame(FrameType.RECORDS, good[1].header, body[:-1])
    assert collect([good[0], shortened, good[1]], {}).malformed == 1


@pytest.fixture
def large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Rows]:
    """A file of 20 steps of 8 ranks in row groups of 16 rows: a step has two."""
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 16)
    rows = np.zeros(20 * 8 * 4, ROW)
    rows["step"] = np.repeat(np.arange(20), 32)
    rows["rank"] = rows["worker"] = np.tile(np.repeat(np.arange(8), 4), 20)
    rows["start_ns"] = rows["step"] * np.uint64(NS) + np.tile(np.arange(4), 160).astype(np.uint64)
    rows["kind"] = np.tile([RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.STEP, RecordKind.METRIC], 160)
    rows["index"] = rows["step"].astype(np.int64) * 4 + np.tile(np.arange(4), 160)
    path = tmp_path / "1970-01-01T00" / records_name(0, 0)
    rings: dict[RingKey, RingRange] = {(rank, rank): RingRange(0, 80) for rank in range(8)}
    parquet_files.write_records(path, 0, CollectedRows(rows=rows, rings=rings))
    return path, rows


FILTERS = st.builds(
    RowFilter,
    steps=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)),
    ranks=st.none() | st.tuples(st.integers(0, 8), st.integers(0, 8)),
    real_ns=st.none() | st.tuples(st.integers(0, 20 * NS), st.integers(0, 20 * NS)),
)


def test_steps_ranks_and_times_are_found(large_file: tuple[Path, Rows]) -> None:
    path, rows = large_file
    spans = sorted_rows(rows[~is_sample(rows)])[0]

    @given(chosen=FILTERS)
    @settings(max_examples=15)
    def check(chosen: RowFilter) -> None:
        found = np.concatenate([np.zeros(0, ROW), *parquet_files.read_rows(path, chosen)])
        assert found.tobytes() == chosen.apply(spans).tobytes()

    check()


@pytest.mark.parametrize(
    ("chosen", "groups"),
    [
        (RowFilter(steps=(7, 7)), [10, 11]),
        (RowFilter(steps=(7, 7), ranks=(0, 1)), [10]),
        (RowFilter(real_ns=(2 * NS, 3 * NS - 1)), [3, 4]),
        (RowFilter(steps=(30, 40)), []),
    ],
)
def test_only_row_groups_with_such_spans_are_read(
    large_file: tuple[Path, Rows], monkeypatch: pytest.MonkeyPatch, chosen: RowFilter, groups: list[int]
) -> None:
    read: list[int] = []

    class GroupCounter(parquet.ParquetFile):  # type: ignore[misc]
        def read_row_group(self, number: int, **options: Any) -> Any:
            read.append(number)
            return super().read_row_group(number, **options)

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", GroupCounter)
    list(parquet_files.read_rows(large_file[0], chosen))
    # A step has 24 spans, and a group 16 rows.
    assert read == groups


def test_columns_have_units_and_names(large_file: tuple[Path, Rows]) -> None:
    table = parquet.read_table(large_file[0])
    fields = {field.name: field.metadata for field in table.schema}
    assert all(metadata[b"description"] for metadata in fields.values())
    assert (fields["duration_ns"][b"unit"], fields["clock_offset_ns"][b"unit"]) == (b"ns", b"ns")
    assert set(table["kind"].to_pylist()) == {"forward", "backward", "step", "metric"}
    assert json.loads(table.schema.metadata[parquet_files.INFO])["version"] == schema.VERSION
    assert table.schema.names == schema.RECORDS_SCHEMA.names


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: data[: len(data) // 2]])
def test_a_torn_file_is_an_error_that_names_it(large_file: tuple[Path, Rows], damage: Any) -> None:
    path, _ = large_file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArchiveError, match=r"records-a0000-000000\.parquet"):
        parquet_files.open_file(path)


@pytest.mark.parametrize(
    ("real", "hour"),
    [(0, "1970-01-01T00"), (3600 * NS, "1970-01-01T01"), (-5, "1970-01-01T00"), (2**63 - 1, "2262-04-11T23")],
)
def test_hours_are_those_of_utc(real: int, hour: str) -> None:
    assert hour_of(real) == hour
