"""Reading operations from a Parquet file with the columns of the public straggler traces."""

import dataclasses
import math
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
    "mc": "chunk of the model on this stage",
    "gmc": "chunk in the whole model",
}
"""Columns that are read, and what they hold."""


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
    """Seconds, with the precision of the file."""
    seconds_NRT: NDArray[np.float32]
    workers_RS: NDArray[np.int64]
    """Number of the worker of each replica and stage."""
    skipped: tuple[int, ...]
    """Steps with missing or repeated records."""

    @property
    def ends_NRT(self) -> NDArray[np.float32]:
        """Return when operations ended, in seconds."""
        ends: NDArray[np.float32] = self.starts_NRT + self.seconds_NRT
        return ends


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
        raise WhatIfError(f"{path} cannot be read: {error}") from error
    except pyarrow.ArrowInvalid as error:
        raise WhatIfError(
            f"{path} is no Parquet file: {error}; write one with the columns {', '.join(COLUMNS)}"
        ) from error
    if table.num_rows == 0:
        raise WhatIfError(f"{path} has no rows; it must have those of one step or more")
    empty = [name for name in COLUMNS if table[name].null_count]
    if empty:
        raise WhatIfError(f"{path} has rows without {', '.join(empty)}; every operation must have all columns")
    kinds = table["optype"].combine_chunks()
    if not pyarrow.types.is_dictionary(kinds.type):
        kinds = kinds.dictionary_encode()
    columns = {
        name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in COLUMNS if name != "optype"
    }
    columns["optype"] = kinds.indices.to_numpy()
    return recording_of(columns, kinds.dictionary.to_pylist(), source=str(path))


def recording_of(columns: Mapping[str, NDArray[Any]], kinds: list[str], *, source: str = "the trace") -> Recording:
    """Arrange rows by operation, replica and step.

    Args:
        columns: those of `COLUMNS`, one number a row; `optype` is an index into `kinds`.
        kinds: names of the kinds of operations.
        source: name of the trace in errors.

    Raises:
        WhatIfError: there is no step in which every replica has all operations once.
    """
    if min(int(columns[name].min()) for name in ("stage", "seq_id", "dp_rank")) < 0:
        raise WhatIfError(f"{source} has negative numbers in stage, seq_id or dp_rank; they must count from 0")
    stages, numbers, replicas = (int(columns[name].max()) + 1 for name in ("stage", "seq_id", "dp_rank"))
    steps, step_of_row = np.unique(columns["step"], return_inverse=True)
    keys = (columns["optype"].astype(np.int64) * numbers + columns["seq_id"]) * stages + columns["stage"]
    rows_of_step = np.bincount(step_of_row)
    usual = int(np.flatnonzero(rows_of_step == np.bincount(rows_of_step).argmax())[0])
    keys_N = np.flatnonzero(np.bincount(keys[step_of_row == usual]))  # operations that all steps must have
    places = np.full(len(kinds) * numbers * stages, -1, dtype=np.int64)
    places[keys_N] = np.arange(len(keys_N))
    operation_of_row = places[keys]
    is_known = operation_of_row >= 0
    shape = (len(keys_N), replicas, len(steps))
    cells = ((operation_of_row * replicas + columns["dp_rank"]) * len(steps) + step_of_row)[is_known]
    counts_NRT = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    unknown_T = np.bincount(step_of_row[~is_known], minlength=len(steps))
    is_complete_T = (counts_NRT == 1).all(axis=(0, 1)) & (unknown_T == 0)
    if not is_complete_T.any():
        raise WhatIfError(
            f"{source} has no step in which all {replicas} data-parallel ranks have each of the {len(keys_N)} "
            f"operations of step {steps[usual]} once; give a trace with whole steps"
        )

    def arranged(name: str) -> NDArray[np.float32]:
        values = np.zeros(math.prod(shape), dtype=np.float32)
        values[cells] = columns[name][is_known]
        found: NDArray[np.float32] = values.reshape(shape)[:, :, is_complete_T]
        return found

    is_first = step_of_row == int(np.flatnonzero(is_complete_T)[0])
    workers_RS = np.full((replicas, stages), -1, dtype=np.int64)
    workers_RS[columns["dp_rank"][is_first], columns["stage"][is_first]] = columns["rank"][is_first]
    first_rows = np.flatnonzero(is_first & (columns["dp_rank"] == 0))
    rows_N = first_rows[np.argsort(operation_of_row[first_rows])]
    return Recording(
        operations=Operations(
            kinds=tuple(kinds[place] for place in (keys_N // (numbers * stages)).tolist()),
            numbers_N=keys_N // stages % numbers,
            stages_N=keys_N % stages,
            chunks_N=columns["mc"][rows_N].astype(np.int64),
            model_chunks_N=columns["gmc"][rows_N].astype(np.int64),
        ),
        steps_T=steps[is_complete_T].astype(np.int64),
        starts_NRT=arranged("start_ts"),
        seconds_NRT=arranged("duration"),
        workers_RS=workers_RS,
        skipped=tuple(steps[~is_complete_T].tolist()),
    )
