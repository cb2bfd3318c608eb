"""Rows of a pipeline of two stages with the 1F1B order, as a recorder would have written them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

Row = tuple[int, int, int, str, float, float, int]
"""Replica, stage, step, kind, start, end, number."""
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "end_ts", "seq_id")
KINDS = ("forward", "backward")
TRANSFER_S = 0.25
END_S = {"gc": 0.0, "layernorm-grads-all-reduce": 0.5, "grads-reduce-scatter": 1.0, "optimizer-clip-main-grad": 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPipeline:
    """Two stages; all times are multiples of 1/8 s, so that sums are exact in single precision."""

    replicas: int = 2
    steps: tuple[int, ...] = (3, 4, 7)
    microbatches: int = 3
    pass_s: Callable[[int, int, int, str], float] = lambda _replica, _stage, _step, kind: (
        1.0 if kind == "forward" else 2.0
    )

    def rows(self) -> Iterator[Row]:
        """Give all operations, step after step."""
        for step in self.steps:
            rows = [row for replica in range(self.replicas) for row in self._passes(replica, step)]
            yield from rows
            yield from self._end(rows, step)

    def table(self) -> pyarrow.Table:
        """Return the rows as a table with the columns of the public traces."""
        rows = list(self.rows())
        columns: dict[str, Any] = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
        starts, ends = (np.array(columns[name], dtype=np.float32) for name in ("start_ts", "end_ts"))
        stages = np.array(columns["stage"], dtype=np.int16)
        del columns["end_ts"]
        columns |= {"start_ts": starts, "duration": ends - starts, "gmc": stages, "mc": np.zeros_like(stages)}
        columns |= {"mb_id": columns["seq_id"], "rank": np.array(columns["dp_rank"]) * 2 + stages}
        return pyarrow.table(columns)

    def _passes(self, replica: int, step: int) -> Iterator[Row]:
        """Run both stages in the order of 1F1B. A transfer begins when both stages have posted it."""
        orders = {0: ["forward", *["forward", "backward"] * (self.microbatches - 1), "backward"]}
        orders[1] = ["forward", "backward"] * self.microbatches
        ends: dict[tuple[int, str], list[float]] = {(stage, kind): [] for stage in (0, 1) for kind in KINDS}
        arrived: dict[str, list[float]] = {kind: [] for kind in KINDS}
        free = [0.0, 0.0]
        while orders[0] or orders[1]:
            for stage in (0, 1):
                if not orders[stage]:
                    continue
                kind = orders[stage][0]
                mine, theirs = ends[stage, kind], ends[1 - stage, kind]
                number, start = len(mine), free[stage]
                if (stage, kind) in {(1, "forward"), (0, "backward")}:
                    if len(theirs) <= number:
                        continue  # the other stage has not computed it yet
                    before = arrived[kind][-1:] or [0.0]
                    sent, posted = max(*before, theirs[number]), max(*before, *mine[-1:], *self._first(kind, ends))
                    end = max(sent, posted) + TRANSFER_S
                    yield replica, 1 - stage, step, f"{kind}-send", sent, end, number
                    yield replica, stage, step, f"{kind}-recv", posted, end, number
                    arrived[kind].append(end)
                    start = max(start, end)
                free[stage] = start + self.pass_s(replica, stage, step, kind)
                yield replica, stage, step, f"{kind}-compute", start, free[stage], number
                mine.append(free[stage])
                orders[stage].pop(0)

    def _first(self, kind: str, ends: Mapping[tuple[int, str], list[float]]) -> list[float]:
        """Return when the first gradient is posted for: after the forward pass before the last one of the warm-up."""
        return ends[0, "forward"][:1] if kind == "backward" and self.microbatches > 1 else [0.0]

    def _end(self, rows: list[Row], step: int) -> Iterator[Row]:
        """Reduce, clip and update after the last pass; the collectives wait for all."""
        passes = [row for row in rows if row[3].endswith("compute")]
        ends = {
            (replica, stage): max(row[5] for row in passes if row[:2] == (replica, stage))
            for replica in range(self.replicas)
            for stage in (0, 1)
        }
        for kind, seconds in END_S.items():
            starts = dict(ends)
            for worker, start in starts.items():
                ready = start
                if kind == "grads-reduce-scatter":
                    ready = max(starts[replica, worker[1]] for replica in range(self.replicas))
                elif kind == "optimizer-clip-main-grad":
                    ready = max(starts.values())
                ends[worker] = ready + seconds
                yield *worker, step, kind, start, ends[worker], 0
        for worker, start in ends.items():
            yield *worker, step, "optimizer", start, start + 1.0, 0


def step_seconds(table: pyarrow.Table) -> NDArray[np.float64]:
    """Return how long the steps took, in order."""
    steps, starts, durations = (table[name].to_numpy() for name in ("step", "start_ts", "duration"))
    return np.array(
        [(starts + durations)[steps == step].max() for step in sorted(set(steps.tolist()))], dtype=np.float64
    )
