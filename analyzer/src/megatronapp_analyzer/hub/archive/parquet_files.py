"""Writing and reading of the archive's Parquet files.

Files are whole or absent: they are written under another name, brought to the disk, and renamed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatronapp_analyzer.errors import ArchiveError, DamagedArchiveError
from megatronapp_analyzer.hub.archive import schema
from megatronapp_analyzer.hub.archive.names import RECORDS, UNFINISHED
from megatronapp_analyzer.hub.archive.rows import CollectedRows, RingRange, Rows, sorted_rows
from megatronapp_analyzer.hub.archive.values import ArchiveFile, Extent, RowFilter
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_common.trace import RecordKind

GROUP_ROWS = 1 << 16
"""Rows of a row group: what a reader of few ranks or steps reads at least."""
INFO = b"megatronapp"
"""Key of the file's own metadata: JSON."""
_DELTA = ("step", "index", "start")
_PLAIN = ("duration_ns", "value")
_UNREADABLE = (pa.ArrowException, OSError, KeyError, TypeError, ValueError)
"""Errors of files that are damaged, or of another kind."""


def write_records(path: pathlib.Path, attempt: int, collected: CollectedRows) -> None:
    """Write the records of a segment, sorted. Raises OSError."""
    rows, spans = sorted_rows(collected.rows)
    info = {"version": schema.VERSION, "rings": _rings_json(collected.rings), "ended": _ended(rows[:spans])}
    options: dict[str, Any] = {
        "sorting_columns": pq.SortingColumn.from_ordering(
            schema.RECORDS_SCHEMA, [(name, "ascending") for name in ("step", "rank", "start")]
        ),
        "use_dictionary": [name for name in schema.RECORDS_SCHEMA.names if name not in _DELTA + _PLAIN],
        "column_encoding": dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
    }
    metadata = {INFO: json.dumps(info, separators=(",", ":"))}
    with (
        _new_file(path) as file,
        pq.ParquetWriter(
            file,
            schema.RECORDS_SCHEMA.with_metadata(metadata),
            compression="zstd",
            write_page_index=True,
            **options,
        ) as writer,
    ):
        for begin, end in ((0, spans), (spans, len(rows))):
            for first in range(begin, end, GROUP_ROWS):
                writer.write_table(schema.to_table(rows[first : min(first + GROUP_ROWS, end)], attempt))


def _rings_json(rings: Mapping[RingKey, RingRange]) -> list[list[int | None]]:
    return [[worker, rank, found.first, found.next] for (worker, rank), found in rings.items()]


def _ended(spans: Rows) -> list[int] | None:
    steps = spans["step"][spans["kind"] == RecordKind.STEP]
    return [int(steps.min()), int(steps.max())] if len(steps) else None


def write_rings(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rings of an attempt, each as a mapping by RINGS_SCHEMA. Raises OSError."""
    table = pa.Table.from_pylist(list(rows), schema=schema.RINGS_SCHEMA)
    with _new_file(path) as file:
        pq.write_table(table, file, compression="zstd")


def read_rings(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """Return the headers of the RING frames in a file of rings. Raises ArchiveError."""
    try:
        return [json.loads(header) for header in pq.read_table(path, columns=["header"])["header"].to_pylist()]
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


@contextlib.contextmanager
def _new_file(path: pathlib.Path) -> Iterator[Any]:
    """Open a file that has its name once it is whole and on the disk, and that is deleted if writing fails."""
    unfinished = path.with_name(path.name + UNFINISHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Bring the names in a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: pathlib.Path) -> ArchiveFile:
    """Return what the footer of a file says. Raises FileNotFoundError, and ArchiveError for a damaged or other file."""
    named = RECORDS.fullmatch(path.name)
    try:
        size = path.stat().st_size
        metadata = pq.read_metadata(path)
        info = json.loads(metadata.metadata[INFO])
        if named is None or info["version"] != schema.VERSION:
            raise ValueError(f"it has version {info['version']} of the format, not {schema.VERSION}")
        groups = [_GroupStatistics.of(metadata.row_group(number)) for number in range(metadata.num_row_groups)]
        spans = [group.steps for group in groups if group.has_spans]
        return ArchiveFile(
            path=path,
            attempt=int(named[1]),
            segment=int(named[2]),
            size=size,
            records=metadata.num_rows,
            steps=_over(spans) if spans else None,
            ended=Extent(least=info["ended"][0], most=info["ended"][1]) if info["ended"] else None,
            real_ns=_over([group.real_ns for group in groups]),
            rings={(worker, rank): RingRange(first, next_) for worker, rank, first, next_ in info["rings"]},
        )
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _over(spans: Sequence[Extent]) -> Extent:
    return Extent(least=min(span.least for span in spans), most=max(span.most for span in spans))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _GroupStatistics:
    """Statistics of a row group, which has spans or samples."""

    has_spans: bool
    steps: Extent
    ranks: Extent | None
    real_ns: Extent

    @classmethod
    def of(cls, group: Any) -> "_GroupStatistics":  # noqa: ANN401 - pyarrow has no types
        columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
        found = {name: columns[name].statistics for name in ("step", "rank", "start", "value")}
        start = found["start"]
        return cls(
            has_spans=found["value"].null_count > 0,
            steps=Extent(least=found["step"].min, most=found["step"].max),
            ranks=Extent(least=found["rank"].min, most=found["rank"].max) if found["rank"].has_min_max else None,
            real_ns=Extent(least=start.min_raw, most=start.max_raw),
        )

    def may_have(self, chosen: RowFilter) -> bool:
        """Return true if spans of a filter may be among the rows."""
        return self.has_spans and chosen.overlaps(self.steps, self.ranks, self.real_ns)


def read_rows(path: pathlib.Path, chosen: RowFilter | None = None) -> Iterator[Rows]:
    """Yield the rows of a file by row group; with a filter only its spans, of the row groups that may have some.

    Raises FileNotFoundError, and ArchiveError for a damaged file.
    """
    try:
        with pq.ParquetFile(path, read_dictionary=["kind", "sample"]) as file:
            for number in range(file.metadata.num_row_groups):
                if chosen is None or _GroupStatistics.of(file.metadata.row_group(number)).may_have(chosen):
                    rows = schema.to_rows(file.read_row_group(number, use_threads=False))
                    yield rows if chosen is None else chosen.apply(rows)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def release_memory() -> None:
    """Return the memory of files that were written to the system."""
    pa.default_memory_pool().release_unused()


def _unreadable(path: pathlib.Path, error: Exception) -> ArchiveError:
    # Arrow's own errors about the content have no number; those of the system, such as too many open files, have.
    is_damage = isinstance(error, pa.ArrowInvalid) or (isinstance(error, OSError) and error.errno is None)
    if is_damage:
        return DamagedArchiveError(f"{path}: damaged: {type(error).__name__}: {error}")
    return ArchiveError(f"{path}: cannot be read, or no file of this trace store: {type(error).__name__}: {error}")
