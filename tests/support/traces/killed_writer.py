"""Hubs that store traces and are killed by SIGKILL, each in a process that is forked from this one.

For each line `FOLDER FIRST CALL` on the standard input, a child stores steps from FIRST on and writes the number of
each step that is stored as a line. Before (even CALL) or after (odd) its CALL // 2-th call of a function that changes
files of the archive it is killed. The line `end` follows.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from spooled_job import SpooledJob

from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RECORD, RecordKind

SPANS = 5
STEPS = 60
"""Steps after which a child ends by itself."""


def step_rows(rank: int, step: int) -> Any:
    """Return the spans of a rank in a step."""
    rows = np.zeros(SPANS, RECORD)
    rows["step"], rows["comm"], rows["microbatch"] = step, NO_COMM, NO_MICROBATCH
    rows["start_ns"] = 1_000_000_000 + step * 10_000_000 + np.arange(SPANS) * 1_000_000 + rank
    rows["kind"] = [RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.STEP]
    rows["duration"] = 1000
    return rows


def ring_header(rank: int) -> dict[str, Any]:
    """Return the RING header of one of two ranks."""
    return {
        "rank": rank,
        "worker": rank,
        "metadata": {
            "localRank": 0,
            "node": "node",
            "world": 2,
            "layout": {"pipeline": 2},
            "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": rank},
            "comms": [],
        },
        "bootId": "boot",
        "clockPairs": [[0, 1_700_000_000_000_000_000]],
    }


class Killer:
    """Counter of calls, which kills the process at one of them."""

    def __init__(self, call: int) -> None:
        self._left, self._after = call // 2, bool(call % 2)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same until its call is due."""

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            found = function(*arguments, **options)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call


def store(folder: Path, first: int, call: int) -> None:
    """Store steps until killed."""
    killer = Killer(call)
    os.fsync = killer.around(os.fsync)
    for name in ("replace", "unlink", "mkdir"):
        setattr(Path, name, killer.around(getattr(Path, name)))
    job = SpooledJob(folder, step_rows, ring_header)
    job.announce()
    for step in range(first, first + STEPS):
        job.write(range(step, step + 1))
        job.spooled._writer.wait_until_written()  # type: ignore[union-attr]
        os.write(1, b"%d\n" % step)
    job.spooled.close()


def main() -> None:
    """Fork a child for each line."""
    importlib.import_module("pyarrow.parquet")  # once for all children
    for line in sys.stdin:
        folder, first, call = line.rsplit(maxsplit=2)
        pid = os.fork()
        if not pid:
            try:
                store(Path(folder), int(first), int(call))
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        os.write(1, b"end\n")


if __name__ == "__main__":
    main()
