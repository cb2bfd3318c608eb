"""Reading operations from a Parquet file with the columns of the public straggler traces."""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import WhatIfError

COLUMNS: Mapping[str, str] = {
    "dp_rank": "data-parallel rank",
    "stage": "pipeline stage",
    "rank": "number of the worker, which is a data-parallel rank of a stage",
    "step": "number of the step",
    "optype": "kind of operation, such as forward-compute",
    "start_ts": "start in seconds",
    "duration": "duration in seconds",
    "seq_id": "number among the operations of this kind in the step, on this worker",
    "mc": "chunk of the model on this stage, -1 for operations of none",
    "gmc": "chunk in the whole model, -1 for operations of none",
}
"""Columns that are read, and what they hold."""
_SECONDS = ("start_ts", "duration")
_MOST = 1 << 20
"""Bound of ranks, stages, chunks and numbers of operations."""
_BOUNDS = {"step": (-(1 << 62), 1 << 62), "mc": (-1, _MOST), "gmc": (-1, _MOST)}
"""Bounds of other columns: operations of no chunk have -1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step, the same in all replicas and steps: N of them."""

    kinds: tuple[str, ...]
    numbers_N: NDArray[np.int64]
    """Place among the operations of this kind on the stage, in the order in which they were launched."""
    stages_N: NDArray[np.int64]
    chunks_N: NDArray[np.int64]
    """Chunk of the model on the stage, from 0."""
    model_chunks_N: NDArray[np.int64]
    """Chunk of the whole model, from 0 at the first stage's first chunk."""

    def __len__(self) -> int:
        return len(self.kinds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps in which every replica has all operations. N operations, R replicas (data-parallel ranks), T steps."""

    operations: Operations
    steps_T: NDArray[np.int64]
    starts_NRT: NDArray[np.float32]
    """Seconds since the first start of the step, in single precision."""
    seconds_NRT: NDArray[np.float32]
    workers_RS: NDArray[np.int64]
    """Number of the worker of each replica and stage."""
    skipped: tuple[int, ...]
    """Steps in which records are missing, repeated, or of other operations."""

    @property
    def ends_NRT(self) -> NDArray[np.float32]:
        """Return when operations ended, in seconds."""
        ends: NDArray[np.float32] = self.starts_NRT + self.seconds_NRT
        return ends


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            "there is no such file; give a Parquet file of recorded operations (docs/whatif.md), not the name of a job"
        )
    return str(error)


def read_parquet(path: pathlib.Path) -> Recording:
    """Read a recording. Raises WhatIfError for a file that cannot be read, or without a complete step."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            if missing:
                described = ", ".join(f"{name} ({COLUMNS[name]})" for name in missing)
                raise WhatIfError(f"{path} has no column {described}; its columns must be {', '.join(COLUMNS)}")
            table = file.read(columns=list(COLUMNS), use_threads=False)
    except OSError as error:
        raise WhatIfError(f"{path} cannot be read: {_reason(error)}") from error
    except (pyarrow.ArrowException, UnicodeDecodeError, MemoryError) as error:
        advice = f"write one with the columns {', '.join(COLUMNS)}"
        raise WhatIfError(f"{path} is no Parquet file that can be read: {error}; {advice}") from error
    if table.num_rows == 0:
        raise WhatIfError(f"{path} has no rows; it must have those of one step or more")
    empty = [name for name in COLUMNS if table[name].null_count]
    if empty:
        raise WhatIfError(f"{path} has rows without {', '.join(empty)}; every operation must have all columns")
    types = pyarrow.types
    for name in COLUMNS:
        kind = table.schema.field(name).type
        if name == "optype":
            fits = types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
        else:
            fits = types.is_integer(kind) or types.is_floating(kind)
        if not fits:
            expected = "text" if name == "optype" else "numbers"
            raise WhatIfError(f"{path}: column {name} ({COLUMNS[name]}) is of type {kind}; it must hold {expected}")
    kinds = table["optype"].combine_chunks()
    if not types.is_dictionary(kinds.type):
        kinds = kinds.dictionary_encode()
    columns = {
        name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in COLUMNS if name != "optype"
    }
    columns["optype"] = kinds.indices.to_numpy()
    return recording_of(columns, list(map(str, kinds.dictionary.to_pylist())), source=str(path))


def recording_of(columns: Mapping[str, NDArray[Any]], kinds: list[str], *, source: str = "the trace") -> Recording:
    """Arrange rows by operation, replica and step.

    Args:
        columns: those of `COLUMNS`, one number a row; `optype` is an index into `kinds`.
        kinds: names of the kinds of operations.
        source: name of the trace in errors.

    Raises:
        WhatIfError: numbers that are no times or places, ranks or stages without rows, and no step in which every
            replica has all operations once.
    """
    whole = {name: _whole_numbers(columns[name], name, source) for name in COLUMNS if name not in _SECONDS}
    starts, seconds = (_seconds(columns[name], name, source) for name in _SECONDS)
    replicas, stages = (_count(whole[name], name, source) for name in ("dp_rank", "stage"))
    steps, step_of_row = np.unique(whole["step"], return_inverse=True)
    places, place_of_row = np.unique(whole["seq_id"] * stages + whole["stage"], return_inverse=True)
    keys = whole["optype"] * len(places) + place_of_row
    cells = keys * replicas + whole["dp_rank"]
    rows_of_step = np.split(np.argsort(step_of_row, kind="stable"), np.cumsum(np.bincount(step_of_row))[:-1])
    model = _model_step([cells[rows] for rows in rows_of_step], replicas)
    if model is None:
        raise WhatIfError(
            f"{source} has no step in which all {replicas} data-parallel ranks have the same operations, each of them "
            "once; give a trace with whole steps"
        )
    cells_NR = np.sort(cells[rows_of_step[model]])
    complete = [
        number
        for number, rows in enumerate(rows_of_step)
        if len(rows) == len(cells_NR) and np.array_equal(np.sort(cells[rows]), cells_NR)
    ]
    rows_TC = np.stack([rows[np.argsort(cells[rows])] for rows in (rows_of_step[number] for number in complete)])
    shape = (len(cells_NR) // replicas, replicas, len(complete))

    def arranged(values: NDArray[np.float64]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = values[rows_TC].T.reshape(shape).astype(np.float32)
        return found

    keys_N, rows_N = cells_NR[::replicas] // replicas, rows_TC[0, ::replicas]
    stages_N = places[keys_N % len(places)] % stages
    begun = np.full(len(steps), np.inf)
    np.minimum.at(begun, step_of_row, starts)  # a start of the day has no microseconds left in single precision
    return Recording(
        operations=Operations(
            kinds=tuple(kinds[place] for place in (keys_N // len(places)).tolist()),
            numbers_N=places[keys_N % len(places)] // stages,
            stages_N=stages_N,
            chunks_N=whole["mc"][rows_N],
            model_chunks_N=whole["gmc"][rows_N],
        ),
        steps_T=steps[complete],
        starts_NRT=arranged(starts - begun[step_of_row]),
        seconds_NRT=arranged(seconds),
        workers_RS=_workers(whole, rows_TC.ravel(), (replicas, int(stages_N.max()) + 1), source),
        skipped=tuple(int(step) for number, step in enumerate(steps.tolist()) if number not in set(complete)),
    )


def _whole_numbers(values: NDArray[Any], name: str, source: str) -> NDArray[np.int64]:
    """Return a column of whole numbers. Raises WhatIfError."""
    with np.errstate(invalid="ignore"):
        found: NDArray[np.int64] = values.astype(np.int64)
    least, most = _BOUNDS.get(name, (0, _MOST))
    wrong = np.flatnonzero((found != values) | (found < least) | (found >= most))
    if wrong.size:
        raise WhatIfError(
            f"{source}: {name} ({COLUMNS[name]}) of row {wrong[0]} is {values[wrong[0]]}; it must be a whole number "
            f"from {least} to {most - 1}"
        )
    return found


def _seconds(values: NDArray[Any], name: str, source: str) -> NDArray[np.float64]:
    """Return a column of seconds. Raises WhatIfError."""
    found: NDArray[np.float64] = values.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(found) | ((found < 0) & (name == "duration")))
    if wrong.size:
        raise WhatIfError(
            f"{source}: {name} of row {wrong[0]} is {found[wrong[0]]}; it must be a number of seconds"
            + (" from 0 on" if name == "duration" else "")
        )
    return found


def _count(values: NDArray[np.int64], name: str, source: str) -> int:
    """Return how many ranks or stages there are. Raises WhatIfError for one without rows."""
    found = np.bincount(values)
    absent = np.flatnonzero(found == 0)
    if absent.size:
        raise WhatIfError(f"{source} has rows of {name} {len(found) - 1}, and none of {name} {absent[0]}; count from 0")
    return len(found)


def _model_step(cells_of_step: list[NDArray[np.int64]], replicas: int) -> int | None:
    """Return the step whose operations all others must have: whole, and with the usual number of records.

    `cells_of_step`: operation x replica of each record. Of numbers that are as usual the larger one is taken.
    """
    sizes = [len(cells) for cells in cells_of_step]
    counts = collections.Counter(sizes)
    for size in sorted(counts, key=lambda size: (-counts[size], -size)):
        for number, cells in enumerate(cells_of_step):
            if sizes[number] != size:
                continue
            distinct = np.unique(cells, return_index=True)[0]
            if len(distinct) == size == replicas * len(np.unique(distinct // replicas, return_index=True)[0]):
                return number
    return None


def _workers(
    whole: Mapping[str, NDArray[np.int64]], rows: NDArray[np.int64], shape: tuple[int, int], source: str
) -> NDArray[np.int64]:
    """Return the number of the worker of each replica and stage, `shape`. Raises WhatIfError where they contradict."""
    replica_of_row, stage_of_row, worker_of_row = (whole[name][rows] for name in ("dp_rank", "stage", "rank"))
    workers_RS = np.full(shape, -1, dtype=np.int64)
    workers_RS[replica_of_row, stage_of_row] = worker_of_row
    wrong = np.flatnonzero(workers_RS[replica_of_row, stage_of_row] != worker_of_row)
    if wrong.size:
        raise WhatIfError(
            f"{source}: dp_rank {replica_of_row[wrong[0]]} of stage {stage_of_row[wrong[0]]} has rank "
            f"{worker_of_row[wrong[0]]} in some rows and another one in others; a worker must have one number"
        )
    numbers, counts = np.unique(workers_RS, return_counts=True)
    if (counts > 1).any():
        raise WhatIfError(
            f"{source}: {counts[counts > 1][0]} workers have rank {numbers[counts > 1][0]}; each data-parallel rank of "
            "a stage must have a number of its own"
        )
    return workers_RS
