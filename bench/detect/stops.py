"""Processes that are stopped and continued, or collect garbage, in a simulated stage."""

import numpy as np
from numpy.typing import NDArray

from detect.spans import SpanColumn
from megatronapp_common.trace import RecordKind

Floats = NDArray[np.float64]


class Stops:
    """Stopped and continued processes of a stage: maps work to wall time."""

    def __init__(self, duty: Floats, cycle_s: Floats, collects: NDArray[np.bool_], rng: np.random.Generator) -> None:
        """`duty`: part of each cycle in which a rank is stopped or, where it `collects`, collects garbage.

        Arrays are [step, replica, tensor rank].
        """
        self.running = 1.0 - duty
        self.cycle = cycle_s
        self.phase = rng.random(duty.shape) * self.cycle
        self.affected = bool((self.running < 1.0).any())
        self.kinds = [
            (kind, where) for kind, where in ((RecordKind.STOPPED, ~collects), (RecordKind.GC, collects)) if where.any()
        ]

    def records(self, begin: Floats, end: Floats) -> list[SpanColumn]:
        """Return the stops between `begin` and `end`; those of ranks that are not stopped have no length."""
        if not self.affected:
            return []
        on = self.running * self.cycle
        columns = []
        first = np.floor((begin + self.phase) / self.cycle)
        last = np.floor((end + self.phase) / self.cycle)
        count = int(np.where(self.running < 1.0, last - first, 0.0).max()) + 1
        for number in range(count):
            cycle = (first + number) * self.cycle - self.phase
            start = np.clip(cycle + on, begin, end)
            stop = np.where(self.running < 1.0, np.clip(cycle + self.cycle, begin, end), start)
            columns += [SpanColumn(kind, start, np.where(where, stop, start)) for kind, where in self.kinds]
        return columns

    def end(self, start: Floats, seconds: Floats) -> Floats:
        """Return when work that begins at `start` ends; what waits ends when the process runs."""
        if not self.affected:
            return start + seconds
        on = self.running * self.cycle
        cycles, rest = np.divmod(start + self.phase, self.cycle)
        done = cycles * on + np.minimum(rest, on) + seconds
        cycles, rest = np.divmod(done, on)
        wall = cycles * self.cycle + rest - self.phase
        return np.where(self.running < 1.0, np.maximum(wall, start), start + seconds)
