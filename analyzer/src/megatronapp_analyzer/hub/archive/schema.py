"""Columns of the archive's Parquet files, and the conversion of rows to them and back.

docs/trace-store.md describes them for users; a change of their meaning raises VERSION.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatronapp_analyzer.hub.archive.rows import NO_RANK, ROW, Rows, is_sample, real_ns
from megatronapp_common.trace import (
    DURATION_UNIT_NS,
    NO_COMM,
    NO_LAYER,
    NO_MICROBATCH,
    Counter,
    Metric,
    RecordKind,
)

VERSION = 1
_KINDS = 256
_TEXT = pa.dictionary(pa.int32(), pa.string())


def _field(name: str, type_: pa.DataType, text: str, unit: str = "") -> pa.Field:
    metadata = {"description": text} | ({"unit": unit} if unit else {})
    return pa.field(name, type_, metadata=metadata)


RECORDS_SCHEMA = pa.schema(
    [
        _field("attempt", pa.int32(), "Life of the gang that recorded it; step numbers repeat after a restart."),
        _field("step", pa.uint32(), "Step of the training, from 0; 0 in counters of workers."),
        _field("rank", pa.int32(), "Global rank; null for counters of a worker. Joins `rings`."),
        _field("worker", pa.int32(), "Worker of the rank. Joins `rings`."),
        _field("index", pa.int64(), "Number of the record in the life of its ring: (attempt, worker, rank, index)."),
        _field("start", pa.timestamp("ns", tz="UTC"), "Begin in real time, by the aligned clock of the rank."),
        _field("clock_offset_ns", pa.int64(), "Real time minus CLOCK_MONOTONIC of the rank's node.", "ns"),
        _field("duration_ns", pa.int64(), "Length, a multiple of 8; see bit 1 of flags.", "ns"),
        _field("kind", _TEXT, "Name of the kind of span: forward, recv_wait, ..., or metric and counter."),
        _field("chunk", pa.uint8(), "Virtual pipeline stage on the rank."),
        _field("microbatch", pa.uint16(), "Index in the step and rank; null if it belongs to none."),
        _field("layer", pa.uint8(), "Layer of spans of layers, null: none; of copy its path, of nccl its operation."),
        _field("comm", pa.uint16(), "Slot in `comms` of the rank's ring; of samples their number; null: none."),
        _field("ordinal", pa.uint32(), "Number of the message or collective; of counters the device; others: docs."),
        _field("aux", pa.uint32(), "By flags: size in 16 B (2), work in tokens (4), wait (8) or lead (128) in 8 ns."),
        _field("flags", pa.uint8(), "Bits: 1 saturated, 2 4 8 128 see aux, 16 device clock, 32 skipped, 64 injected."),
        _field("sample", _TEXT, "Name of the metric or counter; null for spans."),
        _field("value", pa.float32(), "Value of the metric or counter; null for spans."),
    ]
)
"""Rows of spans and samples."""

COMMUNICATOR = pa.struct(
    [pa.field("slot", pa.int32()), pa.field("kind", pa.string()), pa.field("members", pa.list_(pa.int32()))]
)
RINGS_SCHEMA = pa.schema(
    [
        _field("attempt", pa.int32(), "As in records."),
        _field("rank", pa.int32(), "Global rank; null for the ring of a worker. Joins `records`."),
        _field("worker", pa.int32(), "Worker. Joins `records`."),
        _field("node", pa.string(), "Node of the worker."),
        _field("local_rank", pa.int32(), "Rank within its worker; null for the ring of a worker."),
        _field("role", pa.string(), "Passes of the rank: all, forward, backward; null for the ring of a worker."),
        *(_field(name, pa.int32(), "Place of the rank in this kind of parallelism.") for name in ("tp", "cp", "ep")),
        *(_field(name, pa.int32(), "Place of the rank in this kind of parallelism.") for name in ("dp", "pp")),
        _field("device", pa.string(), "cpu, or the GPU."),
        _field("boot_id", pa.string(), "Clock of the node: rings with the same share CLOCK_MONOTONIC."),
        _field("comms", pa.list_(COMMUNICATOR), "Communicators; a directed pair p2p has [source, destination]."),
        _field("header", pa.string(), "JSON of the RING frame, of which the other columns are parts."),
    ]
)
"""Rows of rings: the newest metadata of each."""


def _names(enumeration: type[RecordKind] | type[Metric] | type[Counter], prefix: str, count: int) -> list[str]:
    known = {int(member): member.name.lower() for member in enumeration}
    return [known.get(number, f"{prefix}-{number}") for number in range(count)]


KIND_NAMES = _names(RecordKind, "kind", _KINDS)
_KIND_NUMBERS = {name: number for number, name in enumerate(KIND_NAMES)}
_METRICS, _COUNTERS = _names(Metric, "metric", _KINDS), _names(Counter, "counter", _KINDS)


def to_table(rows: Rows, attempt: int) -> pa.Table:
    """Return sorted rows as a table of RECORDS_SCHEMA."""
    samples = is_sample(rows)
    plain: dict[str, Any] = {
        "attempt": np.full(len(rows), attempt, np.int32),
        "duration_ns": rows["duration"].astype(np.int64) * DURATION_UNIT_NS,
        "clock_offset_ns": rows["offset_ns"],
    }
    for name in ("step", "worker", "index", "chunk", "ordinal", "aux", "flags"):
        plain[name] = rows[name]
    columns = {name: pa.array(np.ascontiguousarray(values)) for name, values in plain.items()}
    for name, absent in _ABSENT.items():
        values = np.ascontiguousarray(rows[name])
        columns[name] = pa.array(values, mask=values == absent)
    columns["start"] = pa.array(real_ns(rows)).view(pa.timestamp("ns", tz="UTC"))
    columns["kind"] = _texts(rows["kind"].astype(np.int64), KIND_NAMES, None)
    columns["value"] = pa.array(np.ascontiguousarray(rows["aux"]).view("<f4"), mask=~samples)
    number = np.minimum(rows["comm"], _KINDS - 1).astype(np.int64) + _KINDS * (rows["kind"] == RecordKind.COUNTER)
    columns["sample"] = _texts(number, _METRICS + _COUNTERS, ~samples)
    return pa.Table.from_arrays([columns[name] for name in RECORDS_SCHEMA.names], schema=RECORDS_SCHEMA)


_ABSENT = {"rank": NO_RANK, "microbatch": NO_MICROBATCH, "layer": NO_LAYER, "comm": NO_COMM}
"""Numbers that are null in the files."""


def _texts(numbers: NDArray[np.int64], names: Sequence[str], absent: NDArray[np.bool_] | None) -> pa.Array:
    present = np.unique(numbers if absent is None else numbers[~absent])
    places = np.zeros(len(names), np.int32)
    places[present] = np.arange(len(present))
    texts = pa.array([names[number] for number in present.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(places[numbers], mask=absent), texts)


def to_rows(table: pa.Table) -> Rows:
    """Return a table of RECORDS_SCHEMA as rows: what `to_table` was given. Raises ValueError for an unknown kind."""
    rows = np.empty(len(table), ROW)
    for name in ("step", "worker", "index", "chunk", "ordinal", "aux", "flags"):
        rows[name] = table[name].to_numpy()
    for name, absent in _ABSENT.items():
        rows[name] = table[name].fill_null(absent).to_numpy()
    rows["offset_ns"] = offsets = table["clock_offset_ns"].to_numpy()
    rows["start_ns"] = (table["start"].cast(pa.int64()).to_numpy() - offsets).view(np.uint64)
    rows["duration"] = table["duration_ns"].to_numpy() // DURATION_UNIT_NS
    rows["kind"] = _numbers(table["kind"], _KIND_NUMBERS.get)
    return rows


def _numbers(column: pa.ChunkedArray, number_of: Callable[[str], int | None]) -> NDArray[np.uint8]:
    parts = [np.zeros(0, np.uint8)]
    for chunk in column.cast(_TEXT).chunks:
        numbers = [number_of(name) for name in chunk.dictionary.to_pylist()]
        if None in numbers:
            raise ValueError(f"kinds {chunk.dictionary.to_pylist()} are not all known")
        parts.append(np.array(numbers or [0], np.uint8)[chunk.indices.to_numpy()])
    return np.concatenate(parts)
