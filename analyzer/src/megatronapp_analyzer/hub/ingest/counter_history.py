"""Newest samples of the counters that give reasons for verdicts, by worker, in memory that is bounded in bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.reasons.readings import CounterSamples
from megatronapp_common.trace import Counter, RecordKind

LIMIT_BYTES = 128 << 20
"""Memory of all samples: a minute or two of 16,384 devices."""
MOST_ROWS = 4096
"""Moments of a worker at most, about an hour: reading them takes microseconds."""
LEAST_ROWS = 32
"""Moments that a worker has space for, however many workers there are."""
MOST_COLUMNS = 1024
"""Counters of a worker at most; one with more writes garbage."""
MOST_LAYOUTS = 8
"""Sets of counters that moments of a worker have and that are remembered."""
USED = frozenset(
    {
        Counter.CPU_STEAL,
        Counter.CPU_THROTTLED,
        Counter.RANK_RUN_QUEUE,
        Counter.GPU_SM_CLOCK_MHZ,
        Counter.GPU_TEMPERATURE_C,
        Counter.GPU_POWER_W,
        Counter.GPU_POWER_LIMIT_W,
        Counter.GPU_THROTTLE_REASONS,
        Counter.GPU_MEMORY_USED_MIB,
        Counter.GPU_MEMORY_UTILISATION,
    }
)
_USED = np.array(sorted(USED), np.uint16)
Period = tuple[int, int]
"""Begin and end, in nanoseconds of the worker's clock."""
WorkerKey = tuple[int, int]
"""Key (attempt, worker): the clocks of attempts may differ."""


class _WorkerTable:
    """Samples of one worker: a row for each moment, a column for each counter of each device."""

    def __init__(self) -> None:
        self.columns: dict[tuple[int, int], int] = {}
        self.count = 0
        self.times: NDArray[np.int64] = np.empty(LEAST_ROWS, np.int64)
        self.values: NDArray[np.float32] = np.full((LEAST_ROWS, 0), np.nan, np.float32)
        self._layouts: dict[bytes, NDArray[np.int64]] = {}
        """Columns of the samples of a moment, which are the same in each."""

    @property
    def rows(self) -> int:
        """Return the number of rows that there is space for."""
        return len(self.times)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the samples."""
        return self.times.nbytes + self.values.nbytes

    def columns_of(self, counters: NDArray[np.uint16], devices: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the column of each sample of a moment; -1 for garbage."""
        layout = counters.tobytes() + devices.tobytes()
        columns = self._layouts.get(layout)
        if columns is None:
            pairs = zip(counters.tolist(), devices.tolist(), strict=True)
            columns = np.array([self._column(counter, device) for counter, device in pairs], np.int64)
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            if len(columns) <= MOST_COLUMNS:  # not those of garbage
                self._layouts[layout] = columns
        return columns

    def _column(self, counter: int, device: int) -> int:
        known = self.columns.get((counter, device))
        if known is not None:
            return known
        if len(self.columns) >= MOST_COLUMNS:
            return -1
        self.columns[counter, device] = number = len(self.columns)
        if number >= self.values.shape[1]:
            more = np.full((self.rows, max(8, number)), np.nan, np.float32)
            self.values = np.concatenate([self.values, more], axis=1)
        return number

    def resize(self, rows: int) -> None:
        """Change the number of rows that there is space for; the newest stay."""
        first = max(self.count - rows, 0)
        times, values = self.times[first : self.count], self.values[first : self.count]
        self.count -= first
        self.times = np.empty(rows, np.int64)
        self.values = np.full((rows, self.values.shape[1]), np.nan, np.float32)
        self.times[: self.count], self.values[: self.count] = times, values

    def drop_older_half(self) -> None:
        """Delete the older half of the rows; the space stays."""
        newest = self.count // 2
        first = self.count - newest
        self.times[:newest] = self.times[first : self.count].copy()
        self.values[:newest] = self.values[first : self.count].copy()
        self.values[newest:] = np.nan
        self.count = newest

    def row(self, time_ns: int) -> int:
        """Return the row of a moment: the newest one, or one after it."""
        if not self.count or self.times[self.count - 1] != time_ns:
            self.times[self.count] = time_ns
            self.count += 1
        return self.count - 1

    def select(self, periods: Sequence[Period]) -> CounterSamples:
        """Return the samples of some periods."""
        times, chosen = self.times[: self.count], np.zeros(self.count, np.bool_)
        for begin, end in periods:
            chosen |= (times >= begin) & (times < end)
        return CounterSamples(columns=self.columns, values=self.values[: self.count][chosen].astype(np.float64))


class CounterHistory:
    """Newest samples of all workers. At the limit older ones are deleted, those of old attempts first."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES, *, most_rows: int = MOST_ROWS) -> None:
        self._limit = limit_bytes
        self._most_rows = most_rows
        self._tables: dict[WorkerKey, _WorkerTable] = {}
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all samples."""
        return self._bytes

    def add(self, attempt: int, worker: int, records: NDArray[np.void]) -> None:
        """Take the records of a worker's ring; others than COUNTER records, and values without use, are skipped."""
        values = records["aux"].astype("<u4").view("<f4")
        used = (records["kind"] == RecordKind.COUNTER) & np.isin(records["comm"], _USED) & np.isfinite(values)
        if not used.any():
            return
        key = (attempt, worker)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _WorkerTable()
            self._bytes += table.nbytes
        chosen, found = records[used], values[used]
        times = chosen["start_ns"].astype(np.int64)
        begins = np.flatnonzero(np.diff(times, prepend=times[0] - 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(times)], strict=True):
            before = table.nbytes
            columns = table.columns_of(chosen["comm"][begin:end], chosen["ordinal"][begin:end])
            self._bytes += table.nbytes - before
            if table.count == table.rows and table.times[table.count - 1] != times[begin]:
                self._make_space(table)
            known = columns >= 0
            table.values[table.row(int(times[begin])), columns[known]] = found[begin:end][known]
        self._shrink()

    def select(self, attempt: int, worker: int, periods: Sequence[Period]) -> CounterSamples | None:
        """Return the samples of a worker in some periods; None without any."""
        table = self._tables.get((attempt, worker))
        samples = None if table is None else table.select(periods)
        return samples if samples is not None and len(samples.values) else None

    def _make_space(self, table: _WorkerTable) -> None:
        """Make space for further rows of a full table: more memory within the limits, otherwise that of older rows."""
        if 2 * table.rows <= self._most_rows and self._bytes + table.nbytes <= self._limit:
            self._resize(table, 2 * table.rows)
        else:
            table.drop_older_half()

    def _resize(self, table: _WorkerTable, rows: int) -> None:
        before = table.nbytes
        table.resize(rows)
        self._bytes += table.nbytes - before

    def _shrink(self) -> None:
        """Return to the limit: delete the oldest attempts, then the older half of the largest tables."""
        while self._bytes > self._limit:
            oldest, newest = min(self._tables)[0], max(self._tables)[0]
            if oldest < newest:
                for key in [key for key in self._tables if key[0] == oldest]:
                    self._bytes -= self._tables.pop(key).nbytes
                continue
            most = max(table.rows for table in self._tables.values())
            if most <= LEAST_ROWS:
                return
            for table in self._tables.values():
                if table.rows == most:
                    self._resize(table, most // 2)
