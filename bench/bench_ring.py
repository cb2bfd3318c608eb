"""Cost of one trace record, in C++ and from Python, compared with a plain Python recorder.

    python bench/bench_ring.py

Anchor: appending the same eleven values to a list, as the first tracing prototype did; all figures are from one run,
in alternating blocks, as medians. A span of a device is `enter` and `leave` of the trainer's recorder, two events
included, with a simulated driver: a GPU adds the driver's calls, and `recordCostNs` of a ring is the sum.
"""

import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

from megatronapp_common.trace import RecordKind
from megatronapp_native import DeviceRecorder, RingReader, RingWriter, monotonic_ns, run_queue_ns
from megatronapp_trainer.scan.device import DeviceRecorder as TrainerRecorder
from megatronapp_trainer.scan.recorder import RecordKey

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCKS = 15
CALLS = 100_000
DEVICE_SPANS = 2_000
"""Spans of a block; more than the recorder's thread reads meanwhile, and less than its queue holds."""
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


def device_cost() -> float:
    """Median nanoseconds that a span of a device takes the thread that records it, without waits for a processor."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as directory:
        source = ROOT / "tests" / "support" / "training" / "simulated_cuda.c"
        library = f"{directory}/libsimulated_cuda.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, str(source), "-lpthread"], check=True)
        writer = RingWriter(f"{directory}/bench.ring", 65536, 0, b"")
        reader = RingReader(f"{directory}/bench.ring")
        recorder = TrainerRecorder(
            writer,
            native=DeviceRecorder(writer, 0, library),
            current_stream=lambda: 0,
            monotonic_ns=monotonic_ns,
            run_queue_ns=run_queue_ns,
            on_length=lambda _kind, _flags, _own_ns: None,
        )
        key, blocks = RecordKey(RecordKind.FORWARD, microbatch=0), []
        for block in range(BLOCKS):
            start = time.thread_time_ns()
            for _ in range(DEVICE_SPANS):
                recorder.leave(key, recorder.enter(key))
            blocks.append((time.thread_time_ns() - start) / DEVICE_SPANS)
            while reader.info().head < (block + 1) * DEVICE_SPANS:
                time.sleep(0.005)
        recorder.finish()
        writer.close(True)
    return statistics.median(blocks)


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
        "device_span_python_ns": round(device_cost(), 1),
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
