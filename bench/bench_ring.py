"""Cost of one trace record, in C++ and from Python, compared with a plain Python recorder.

    python bench/bench_ring.py

Anchor: appending the same eleven values to a list, as the first tracing prototype did; all figures are from one run,
in alternating blocks, as medians.
"""

import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

from megatronapp_native import RingWriter, monotonic_ns

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCKS = 15
CALLS = 100_000
SHM = pathlib.Path("/dev/shm")
VALUES = (10**15, 10**7, 1000, 3, 10**6, 4, 5, 3, 0, 0, 8)


def block_ns(call: Callable[..., object], arguments: tuple[int, ...]) -> float:
    """Nanoseconds per call over one block, loop included."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call(*arguments)
    return (time.perf_counter_ns() - start) / CALLS


def list_recorder() -> Callable[..., object]:
    """The anchor: a tuple appended to a bounded list."""
    durations: list[tuple[int, ...]] = []

    def record(*values: int) -> None:
        durations.append(values)
        if len(durations) > 65536:
            durations.clear()

    return record


def python_costs() -> dict[str, float]:
    """Median nanoseconds of each call from Python."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as directory:
        writer = RingWriter(f"{directory}/bench.ring", 65536, 0, b"")
        calls: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
            "record": (writer.record, VALUES),
            "list_append": (list_recorder(), VALUES),
            "clock": (monotonic_ns, ()),
        }
        blocks: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(BLOCKS):
            for name, (call, arguments) in calls.items():
                blocks[name].append(block_ns(call, arguments))
        writer.close(True)
    return {name: statistics.median(values) for name, values in blocks.items()}


def native_costs() -> dict[str, float]:
    """Return the output of the C++ benchmark."""
    script = ROOT / "scripts" / "native_checks.sh"
    done = subprocess.run([str(script), "bench"], check=True, capture_output=True, text=True)
    costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def main() -> None:
    """Print one JSON line."""
    python, native = python_costs(), native_costs()
    result = {
        "record_python_ns": round(python["record"], 1),
        "record_native_ns": native["record_ns"],
        "open_close_native_ns": native["open_close_ns"],
        "run_queue_native_ns": native["run_queue_ns"],
        "clock_python_ns": round(python["clock"], 1),
        "list_append_ns": round(python["list_append"], 1),
        "ratio_to_list_append": round(python["record"] / python["list_append"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
